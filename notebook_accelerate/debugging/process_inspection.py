"""Inspection of a rank that cannot reply, from another process on its machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from notebook_accelerate.debugging import native_stacks, stack_dumps

DUMP_SECONDS = 0.5
SLEEP_SECONDS = 0.2
IN_KERNEL = (
    "in uninterruptible sleep (state D): a driver or a file system does not answer, and signals do not end the process "
    "until it does; the kernel's messages (dmesg) may say why"
)


class ProcessStacks(NamedTuple):
    """The stacks of a process.

    Attributes:
        dump: The output of faulthandler; "" where the rank has not installed it.
        native: The main thread's frames by py-spy; empty where py-spy is missing or lacks permission.
        suspended: Why the process cannot run, as after SIGSTOP, and what to do; "" otherwise.
        problem: Why the stacks were not read; "" if they were.
    """

    dump: str = ""
    native: tuple[str, ...] = ()
    suspended: str = ""
    problem: str = ""


class ProcessInspector:
    """Reads the stacks of one process.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._dump: int | None = None
        self._lock = threading.Lock()

    def open_dump(self, path: str) -> None:
        """Open ``path``, to which the rank writes its stacks; early, because the signal for that may end the rank."""
        with suppress(OSError), self._lock:
            if self._dump is not None:
                os.close(self._dump)
            self._dump = os.open(path, os.O_RDONLY)

    def read_stacks(self, send_signal: Callable[[int], None]) -> ProcessStacks:
        """Let the rank's signal handler write its stacks, and read the native stack."""
        if self._sleeps_in_kernel():  # its handler would not run, and py-spy would wait for it
            return ProcessStacks("", (), IN_KERNEL)
        native = native_stacks.stack(self._pid)
        if self._status() == "stopped":
            return ProcessStacks("", native, f"suspended (SIGSTOP); kill -CONT {self._pid} resumes it")
        return ProcessStacks(self._read_dump(send_signal), native)

    def _sleeps_in_kernel(self) -> bool:
        """Return whether the process stays in uninterruptible sleep; each read from a disk causes a short one."""
        if self._status() != "disk-sleep":
            return False
        time.sleep(SLEEP_SECONDS)
        return self._status() == "disk-sleep"

    def _status(self) -> str:
        import psutil

        with suppress(psutil.Error, OSError):  # it has ended, or this system has no /proc
            return str(psutil.Process(self._pid).status())
        return ""

    def _read_dump(self, send_signal: Callable[[int], None]) -> str:
        with self._lock:
            dump = None if self._dump is None else os.dup(self._dump)
        if dump is None:
            return ""
        with os.fdopen(dump, "rb"):
            before = os.fstat(dump).st_size
            send_signal(signal.SIGUSR1)
            return stack_dumps.read_new(dump, before, DUMP_SECONDS)

    def close(self) -> None:
        """Close the dump."""
        with self._lock:
            dump, self._dump = self._dump, None
        if dump is not None:
            os.close(dump)
