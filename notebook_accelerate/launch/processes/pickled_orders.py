"""What the start methods whose processes inherit nothing share."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from notebook_accelerate.config.environ import inheritable
from notebook_accelerate.launch.processes.rank_process import ProcessBackend
from notebook_accelerate.telemetry.payload import cell_sources, dump, dump_bytes

if TYPE_CHECKING:
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


def interpreter_command(call: str) -> list[str]:
    """Return the command line of a fresh interpreter that has this one's import path and evaluates ``call``."""
    setup = f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
    return [sys.executable, "-c", setup + call]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have a process that is started in a with block begin with SIGINT blocked.

    Until it leads a session of its own it is in the kernel's process group, where the front end's interrupt ends it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def last_words(log: IO[bytes]) -> str:
    """Return the end of what a process printed to its log, for an error message; "" when it printed nothing."""
    log.seek(0)
    text = log.read()[-2000:].decode(errors="replace").strip()
    return f"; it said:\n{text}" if text else ""


class PickledBackend(ProcessBackend):
    """Base of the methods whose processes inherit nothing: the function and its arguments travel in one file."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__(function, arguments)
        self._payload = dump((function, arguments), "the function or its arguments").to_file()
        self._sources = cell_sources()

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        """Fill in what a forked rank would have inherited."""
        order.base_environment = inheritable()
        order.cwd = _working_directory()
        order.sys_path = list(sys.path)
        order.sources = self._sources
        if order.accelerator:
            order.accelerator = dump_bytes(order.accelerator, "LaunchConfig's accelerator")
        return order

    def close(self) -> None:
        """See ``ProcessBackend.close``."""
        os.close(self._payload)


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - it crosses to another process as text
    except OSError:
        return None
