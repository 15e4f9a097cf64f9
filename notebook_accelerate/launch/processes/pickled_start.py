"""What start methods share whose processes do not inherit the kernel's memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from notebook_accelerate.config.environ import inheritable
from notebook_accelerate.launch.processes.isolated_path import (
    existing_folder,
    isolated_interpreter,
    isolated_path,
    isolated_variables,
)
from notebook_accelerate.launch.processes.rank_process import ProcessBackend, own_mark
from notebook_accelerate.telemetry import notebook_settings, steady_time
from notebook_accelerate.telemetry.pickling import dump, dump_bytes, load_file
from notebook_accelerate.telemetry.tracebacks import cell_sources

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.call_arguments import Plain
    from notebook_accelerate.telemetry.results import WorkerOrder


def interpreter_command(call: str) -> list[str]:
    """Return the command line of a fresh interpreter that imports what this one imports and evaluates ``call``."""
    setup = f"import sys; sys.path[:] = {json.dumps(isolated_path(sys.path))}; "
    return [*isolated_interpreter(), "-c", setup + call]


def start_interpreter(call: str, descriptors: Sequence[int], log: int, **environment: str) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter in its own session that evaluates ``call``.

    Args:
        call: A Python expression or statements.
        descriptors: Descriptors that the interpreter inherits.
        log: Descriptor of a file for its output.
        environment: Variables that replace the kernel's.
    """
    return subprocess.Popen(
        interpreter_command(call),
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**isolated_variables(inheritable()), **environment},
        cwd=existing_folder(),
    )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Start processes with SIGINT blocked.

    Until a new process leads its own session, it is in the kernel's process group, where the front end's interrupt
    would end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def log_tail(log: IO[bytes]) -> str:
    """Return the last 2,000 bytes of a process's log, for an error message; "" when the log is empty."""
    log.seek(0)
    text = log.read()[-2000:].decode(errors="replace").strip()
    return f"; its output ends with:\n{text}" if text else ""


class PickledFunction:
    """A function and its arguments that another process has pickled; this one does not load them.

    Args:
        name: The function's name.
        payload: Descriptor of their file.
        arguments: The arguments by name, as plain values.
        settings: The settings of that process, from ``notebook_settings.capture``.
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
        self._settings = function.settings if isinstance(function, PickledFunction) else notebook_settings.capture()

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        """Add what a forked rank inherits from the kernel."""
        order.base_environment = inheritable()
        order.cwd = _working_directory()
        order.sys_path = list(sys.path)
        order.time_offset = steady_time.offset()
        order.sources = self._sources
        order.notebook_settings = self._settings
        order.mark = own_mark()
        if order.accelerator:
            order.accelerator = dump_bytes(order.accelerator, "LaunchConfig's accelerator", "launch")
        return order

    def close(self) -> None:
        """See ``ProcessBackend.close``."""
        super().close()
        os.close(self._payload)


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - it travels as text
    except OSError:
        return None
