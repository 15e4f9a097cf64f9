"""Run a plain function on every rank of a gloo world, in a tenth of a second.

Ranks are forked from a server process that has imported torch but initialized nothing, so a test neither waits for the
import of torch nor sees state that earlier tests left in this process. The first call starts the server, which ends
with the test session.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle

from notebook_accelerate.launch.processes import ports

_ROOT = Path(__file__).resolve().parents[2]
_PRELOAD = [
    "tests.support.paused_collection",  # Garbage collection would take a third of the time of the imports below.
    "pytest",
    "deepspeed",  # Packages that are not installed are left out.
    "s3fs",
    "accelerate",  # This is the real package, if it is installed.
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch._dynamo",  # Every optimizer imports this, which takes a second.
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._functorch.aot_autograd",  # Flex attention and compilation import this.
    "psutil",
    "safetensors.torch",
    "notebook_accelerate.accelerator",
    "notebook_accelerate.checkpointing.state_loading",
    "notebook_accelerate.checkpointing.state_saving",
    "notebook_accelerate.strategies.fsdp.fsdp2",
    "notebook_accelerate.utils.dataclasses",
    __name__,  # This module imports the rest of what ranks need.
]
# The seconds that other ranks have to notice and report the failure of a rank, before they are killed.
_GRACE = 30.0
# The seconds for which a rank that has returned stays alive, because others may still need the store that it holds.
_STAY = 60.0
_keys = itertools.count(1 << 40)
"""Numbers for reserving ports, which must differ from the numbers of this process's runs."""


class RankError(AssertionError):
    """A rank of `run_ranks` failed. The message is its traceback.

    Args:
        message: The tracebacks, with the rank that failed first on top.
        rank: The rank that failed first.
        reports: The text of each rank that failed, by rank, in the order of failure.
    """

    def __init__(self, message: str, rank: int, reports: Mapping[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.reports = dict(reports)


@dataclass
class _Outcome:
    """The outcome that one rank sent back."""

    value: Any = None
    error: BaseException | None = None
    report: str | None = None
    at: float = 0.0
    """When the rank failed, on the machine's monotonic clock, or 0 if the rank died without a message."""


@dataclass
class _World:
    """The processes of one call, and the outcomes received so far."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: dict[int, Connection] = field(default_factory=dict)
    outcomes: dict[int, _Outcome] = field(default_factory=dict)

    @property
    def failed(self) -> list[int]:
        """The ranks that failed, in the order in which they reported it."""
        return [rank for rank, outcome in self.outcomes.items() if outcome.report is not None]


@contextmanager
def reserved_port() -> Iterator[int]:
    """Hold a TCP port of the loopback interface for a process group, as a launch does for its group."""
    key = next(_keys)
    try:
        yield ports.reserve(key, 0, fixed=False)[0]
    finally:
        ports.release(key)


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout: float = 240.0,
    process_group: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` new processes with torchrun's environment.

    Args:
        fn: The function that each rank calls. It reads its rank from the environment, `PartialState` or
            torch.distributed.
        args: The arguments, equal on every rank. Arguments and results are pickled.
        world_size: The number of ranks.
        timeout: The time limit in seconds for all ranks together, after which their stacks are printed and they are
            killed.
        process_group: Whether to set up torch's default process group (gloo) before the call. Otherwise the function
            does so, for example with `PartialState()` or `Accelerator()`.
        env: Further environment variables for the ranks, which override those of this process.

    Returns:
        The results by rank.

    Raises:
        RankError: A rank raised, died, or ran out of time; `__cause__` is the exception of the rank that failed first.
    """
    work = cloudpickle.dumps((fn, args, process_group))
    with reserved_port() as port:
        environments = [
            {**os.environ, **_environment(rank, world_size, port), **(env or {})} for rank in range(world_size)
        ]
        world = _start(work, environments, timeout)
        try:
            _collect(world, time.monotonic() + timeout)
        finally:
            _end(world)
    if world.failed:
        first = world.outcomes[world.failed[0]]
        reports = {rank: world.outcomes[rank].report or "" for rank in world.failed}
        text = "\n".join(f"rank {rank} of {world_size}:\n{report}" for rank, report in reports.items())
        raise RankError(text, world.failed[0], reports) from first.error
    return [world.outcomes[rank].value for rank in range(world_size)]


def _start(work: bytes, environments: list[dict[str, str]], timeout: float) -> _World:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    world = _World()
    for rank, environment in enumerate(environments):
        mine, theirs = context.Pipe()
        process = context.Process(target=_rank_main, args=(theirs, environment, work, timeout), daemon=True)
        process.start()
        theirs.close()
        world.processes.append(process)
        world.pipes[rank] = mine
    return world


def run_script(script: str, *arguments: str, world_size: int = 2, timeout: float = 240.0) -> list[tuple[int, str]]:
    """Run a script on every rank of a world, each in its own Python process, to test what happens when ranks exit.

    Args:
        script: The code to run.
        arguments: The arguments on its command line.
        world_size: The number of ranks.
        timeout: The time limit in seconds for each rank.

    Returns:
        The exit status and the stderr output of each rank, by rank.
    """
    command = [sys.executable, "-c", script, *arguments]
    with reserved_port() as port, ExitStack() as stack:
        # Use files, because pipes could become full.
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
        ranks = []
        try:
            for rank in range(world_size):
                env = {**os.environ, **_environment(rank, world_size, port)}
                ranks.append(subprocess.Popen(command, env=env, cwd=_ROOT, stderr=errors[rank]))
            for process in ranks:
                process.wait(timeout)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        for file in errors:
            file.seek(0)
        return [(process.returncode, file.read()) for process, file in zip(ranks, errors, strict=True)]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of a launch on one machine, with a loopback address."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }


def _collect(world: _World, deadline: float) -> None:
    """Read outcomes until every rank has reported, died or exceeded its time."""
    waiting = dict(world.pipes)
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting:
                reason = "killed: another rank had failed" if world.failed else "timed out (its stacks are on stderr)"
                world.outcomes[rank] = _Outcome(report=reason)
            return
        arrived = {r: _receive(waiting.pop(r), world.processes[r]) for r, pipe in world.pipes.items() if pipe in ready}
        # Several outcomes may have arrived while this process waited for a CPU. The first failure caused the others.
        world.outcomes.update(sorted(arrived.items(), key=lambda entry: entry[1].at))
        if world.failed:
            deadline = min(deadline, time.monotonic() + _GRACE)


def _receive(pipe: Connection, process: BaseProcess) -> _Outcome:
    try:
        payload = pipe.recv_bytes()
    except EOFError:
        process.join(60)
        return _Outcome(report=f"died without a word, exit code {process.exitcode} (negative: a signal)")
    outcome: _Outcome = pickle.loads(payload)
    return outcome


def _end(world: _World) -> None:
    for pipe in world.pipes.values():
        pipe.close()
    for rank, process in enumerate(world.processes):
        silent = rank not in world.outcomes or world.outcomes[rank].report is not None
        process.join(0.5 if silent else 60)
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


def _rank_main(pipe: Connection, environment: dict[str, str], work: bytes, timeout: float) -> None:
    """Run as one rank: take over the environment, call the function, and send the outcome."""
    import faulthandler

    import torch

    gc.freeze()  # Otherwise, garbage collection would copy the pages of all objects of the server process.
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)
    # This prints the stacks of a stuck rank and ends it, even if the test process is gone.
    faulthandler.dump_traceback_later(max(timeout - 1.0, 0.5), exit=True, file=2)
    torch.set_num_threads(1)
    payload, failed = _call(work)
    pipe.send_bytes(payload)
    faulthandler.cancel_dump_traceback_later()
    if not failed:  # A failed rank exits immediately, so that ranks that wait for it notice the failure.
        pipe.poll(_STAY)  # Wait until all ranks have reported and the test process closes its end.
    pipe.close()


def _call(work: bytes) -> tuple[bytes, bool]:
    import torch.distributed as dist

    try:
        fn, args, process_group = pickle.loads(work)
        if process_group:
            dist.init_process_group("gloo")
        outcome = pickle.dumps(_Outcome(value=fn(*args)))
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are results of a test too
        return _failure(error), True
    # Keep the process group until the process exits, because gloo's destructor can deadlock: it holds the interpreter
    # while it waits for a thread that needs it.
    return outcome, False


def _failure(error: BaseException) -> bytes:
    at = time.monotonic()
    report = "".join(traceback.format_exception(error))
    try:
        payload = pickle.dumps(_Outcome(error=error, report=report, at=at))
        pickle.loads(payload)  # Some exceptions can be pickled but not unpickled.
    except Exception:  # noqa: BLE001 - whatever the exception's own reduction raises
        return pickle.dumps(_Outcome(report=report, at=at))
    return payload
