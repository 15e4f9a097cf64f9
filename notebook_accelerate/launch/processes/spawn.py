"""Ranks as fresh interpreters, for platforms that cannot fork: slow to start, safe everywhere.

Other start methods share a part of it: the function and its arguments, pickled once for all ranks that do not inherit
the kernel's memory.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_accelerate.config.environ import inheritable
from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch.processes.interpreters import (
    existing_folder,
    interpreter_command,
    isolated_variables,
    uninterrupted,
    working_directory,
)
from notebook_accelerate.launch.processes.orphan_guard import own_mark
from notebook_accelerate.launch.processes.rank_pipes import RankPipes
from notebook_accelerate.launch.processes.rank_process import OwnChild, ProcessBackend, RankProcess, pidfd_of
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.notebook_settings import capture_notebook_settings
from notebook_accelerate.telemetry.pickling import dump, dump_bytes, load_file
from notebook_accelerate.telemetry.tracebacks import cell_sources

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.call_arguments import Plain
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


class PickledFunction:
    """A function and its arguments that another process has pickled; this one does not load them.

    Args:
        name: The function's name.
        payload: Descriptor of their file.
        arguments: The arguments by name, as plain values.
        settings: The settings of that process, from ``capture_notebook_settings``.
    """

    def __init__(self, name: str, payload: int, arguments: Mapping[str, Plain], settings: bytes) -> None:
        self.__name__ = name
        self.payload, self.plain_arguments, self.settings = payload, arguments, settings

    def __call__(self) -> Any:
        """Load the function and call it."""
        function, arguments = load_file(os.dup(self.payload))
        return function(*arguments)


def to_file(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Pickle a function and its arguments; return the descriptor of their file, owned by the caller.

    Raises:
        SerializationError: They cannot be pickled.
    """
    if isinstance(function, PickledFunction):
        return os.dup(function.payload)
    return dump((function, arguments), "the function or its arguments").to_file()


class PickledBackend(ProcessBackend):
    """Base of these start methods: the function and its arguments travel in one file."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__(function, arguments)
        self._payload = to_file(function, arguments)
        self._sources = cell_sources()
        self._settings = function.settings if isinstance(function, PickledFunction) else capture_notebook_settings()

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        """Add what a forked rank inherits from the kernel."""
        order.base_environment = inheritable()
        folder = working_directory()
        order.cwd = None if folder is None else str(folder)
        order.sys_path = list(sys.path)
        order.time_offset = steady_time.offset()
        order.sources = self._sources
        order.notebook_settings = self._settings
        order.mark = own_mark()
        if order.accelerator:
            order.accelerator = dump_bytes(order.accelerator, "LaunchConfig's accelerator", "launch")
        return order

    def close(self) -> None:
        super().close()
        os.close(self._payload)


class SpawnBackend(PickledBackend):
    """Starts one interpreter per rank."""

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        body = pickle.dumps(self.complete(order))
        with ExitStack() as rank_side, ExitStack() as undo:
            ends = RankPipes()
            rank_side.callback(ends.close_rank_side)
            undo.callback(ends.close_kernel_side)
            try:
                process = self._start_interpreter(ends)
            except OSError as error:
                raise LaunchError(f"rank {order.rank} could not be started: {error}") from error
            undo.pop_all()
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # the supervisor reports the end of a rank that has died already
            process.stdin.write(body)
        process.returncode = 0  # the supervisor reaps it, to read its resource usage
        return OwnChild(order.rank, process.pid, ends, pidfd_of(process.pid))

    def _start_interpreter(self, ends: RankPipes) -> subprocess.Popen[bytes]:
        channel = ends.rank_channel.fileno()
        wires = (channel, ends.rank_stdout, ends.rank_stderr, self._payload)
        call = (
            "from notebook_accelerate.launch.processes.spawn import rank_main; "
            f"rank_main({channel}, {ends.rank_stdout}, {ends.rank_stderr}, {self._payload}, {os.getpid()}, {_loaded()})"
        )
        with uninterrupted():
            return subprocess.Popen(
                interpreter_command(call),
                pass_fds=wires,
                stdin=subprocess.PIPE,
                start_new_session=True,
                env=isolated_variables(inheritable()),
                cwd=existing_folder(),
            )


def _loaded() -> list[str]:
    """Return what the rank imports first, as the kernel has: a torch.py of the user must not replace it later."""
    return [name for name in ("numpy", "torch") if name in sys.modules]


def rank_main(channel: int, stdout: int, stderr: int, payload: int, parent: int, preloaded: list[str]) -> NoReturn:
    """Run a rank in a fresh interpreter; reads the order from standard input."""
    from notebook_accelerate.telemetry.pickling import load_file
    from notebook_accelerate.worker import entry

    entry.discard_interrupt(parent)
    for name in preloaded:
        importlib.import_module(name)
    order = pickle.load(sys.stdin.buffer)  # not until its end: a rank forked meanwhile may hold the other end open
    wiring = entry.Wiring(channel, stdout, stderr, parent)
    entry.main(order, wiring, lambda: load_file(payload), inherited=None, forked=False)


# ---- ranks for a kernel on another machine

CARRIED = ("ACCELERATE_", "NOTEBOOK_ACCELERATE_")
"""Prefixes of the kernel's environment variables that remote ranks receive too."""
NOT_CARRIED = ("NOTEBOOK_ACCELERATE_SECRET", "NOTEBOOK_ACCELERATE_ON", "NOTEBOOK_ACCELERATE_STORE")


class PlacedBackend(SpawnBackend):
    """Starts a rank from a payload that the kernel pickled.

    Args:
        payload: Descriptor of the payload's file; closed with this object.
    """

    def __init__(self, payload: int) -> None:
        ProcessBackend.__init__(self, _elsewhere, ())
        self._payload, self._sources = payload, {}

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        """Return the order unchanged: the kernel has completed it."""
        return order


def _elsewhere() -> None:
    """Placeholder for the function, which this process never loads."""


def completed_for_another_machine(order: WorkerOrder) -> WorkerOrder:
    """Return an order, completed for this machine, with what another machine needs: called in the kernel."""
    carried = {
        name: value for name, value in os.environ.items() if name.startswith(CARRIED) and name not in NOT_CARRIED
    }
    order.environment = {**carried, **order.environment}
    order.base_environment = order.time_offset = None  # use that machine's
    order.mark = 0
    return order


def adapt_to_machine(order: WorkerOrder) -> None:
    """Adapt an order to this machine: called there.

    The working directory is the kernel's if it exists here, unless a runtime environment provides one; the import path
    is this machine's, followed by the kernel's folders that exist here.
    """
    environment = {name: value for name, value in os.environ.items() if not value.startswith("ray.util.")}
    environment.pop("RAY_LD_PRELOAD_ON_WORKERS", None)
    order.mark = own_mark()  # what the rank starts ends with this process
    order.base_environment = environment
    own = [entry for entry in sys.path if not entry.endswith("thirdparty_files")]
    known = {os.path.realpath(entry) for entry in own}
    theirs = [entry for entry in order.sys_path or () if os.path.realpath(entry) not in known]
    order.sys_path = own + [entry for entry in theirs if Path(entry).exists()]
    if order.cwd is not None and not Path(order.cwd).is_dir():
        order.cwd = None
