"""Run programs with one package in forked processes: `python -m tests.parity.behaviour.side OUT [TEXT]`.

The caller's PYTHONPATH selects the package `accelerate`. The file OUT receives the outcomes by name.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from notebook_accelerate.launch.processes import ports
from tests.parity.behaviour.description import describe
from tests.parity.behaviour.messages import recorded_messages
from tests.parity.behaviour.program_table import Program, programs

SECONDS = 180
"""The time limit in seconds for the programs of a process. After it, the process prints its stacks and exits."""
EXPRESSIONS = 25
"""The number of expressions that run one after the other in one process, because most take less time than a fork."""


def main(out: str, pattern: str = "") -> None:
    """Run the programs whose names contain ``pattern``, and write their outcomes to a file."""
    # Import this once, before forking. Otherwise, each process would import it with its first optimizer, for a second.
    importlib.import_module("torch._dynamo")
    importlib.import_module("accelerate.utils")
    found = programs(pattern)
    gc.collect()
    gc.freeze()  # Without this, garbage collection in the children would copy the parent's pages.
    outcomes: dict[str, Any] = {}
    for group in _groups(found):
        begin = time.perf_counter()
        results = run(group)
        for each, result in zip(group, results, strict=True):
            outcomes[each.name] = {**result, "seconds": (time.perf_counter() - begin) / len(group)}
    Path(out).write_bytes(pickle.dumps(outcomes))


def _groups(found: Sequence[Program]) -> Iterator[Sequence[Program]]:
    """Yield groups of programs that share their processes."""
    for ranks in sorted({each.ranks for each in found}):
        expressions = [each for each in found if each.is_expression and each.ranks == ranks]
        for first in range(0, len(expressions), EXPRESSIONS):
            yield expressions[first : first + EXPRESSIONS]
    for each in found:
        if not each.is_expression:
            yield [each]


def run(group: Sequence[Program]) -> list[dict[str, Any]]:
    """Run programs one after the other, each in an empty folder, in new processes.

    Returns:
        For each program, either "skipped" with the reason, or "ranks" with each rank's described result, the messages
        of the package, and the output.
    """
    if group[0].missing:
        return [{"skipped": f"not installed: {', '.join(group[0].missing)}"}]
    folder = Path(tempfile.mkdtemp(prefix="behaviour-"))
    ranks = max(group[0].ranks, 1)
    key = id(folder) | 1 << 60
    try:
        port = ports.reserve(key, 0, fixed=False)[0] if group[0].ranks else 0
        for pid in [_start(group, rank, port, folder) for rank in range(ranks)]:
            os.waitpid(pid, 0)
        return [{"ranks": [_outcome(folder, rank, at) for rank in range(ranks)]} for at in range(len(group))]
    finally:
        ports.release(key)
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(folder: Path, rank: int, at: int) -> dict[str, Any]:
    output = (folder / f"output-{rank}").read_text(errors="replace")
    try:
        results = pickle.loads((folder / f"results-{rank}").read_bytes())
    except FileNotFoundError:
        results = {}
    return {"result": {"died": True}, "messages": [], **results.get(at, {}), "output": output[-6000:]}


def _start(group: Sequence[Program], rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _child(group, rank, port, folder)
    finally:
        os._exit(0)


def _child(group: Sequence[Program], rank: int, port: int, folder: Path) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=2)
    _set_environment(group[0], rank, port)
    environment = dict(os.environ)
    results = {}
    for at, program in enumerate(group):
        if at:
            _reset(environment)
        (folder / f"work-{at}").mkdir(exist_ok=True)
        os.chdir(folder / f"work-{at}")
        if program.ranks and program.is_expression:
            importlib.import_module("accelerate").Accelerator()  # Set up the process group.
        results[at] = _result(program)
    partial = folder / f"partial-{rank}"
    partial.write_bytes(pickle.dumps(results))
    partial.rename(folder / f"results-{rank}")
    sys.stdout.flush()
    _wait_for_others(max(group[0].ranks, 1), folder)


def _result(program: Program) -> dict[str, Any]:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the generator that Accelerate saves
    torch.manual_seed(0)
    with recorded_messages() as messages:
        try:
            outcome = {"returned": describe(program.run())}
        except BaseException as error:  # noqa: BLE001 - what a program raises is its result
            traceback.print_exc()
            outcome = {"raised": describe(error)}
    return {"result": outcome, "messages": messages}


def _reset(environment: dict[str, str]) -> None:
    """Undo the changes that an expression made to its process."""
    state: Any = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(environment)


def _wait_for_others(ranks: int, folder: Path) -> None:
    """Wait up to ten seconds for all ranks to finish, because others may still need the store of rank 0."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all((folder / f"results-{rank}").exists() for rank in range(ranks)):
            return
        time.sleep(0.005)


def _set_environment(program: Program, rank: int, port: int) -> None:
    if not program.ranks:
        return
    size = program.ranks
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    place |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in place.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
