"""Native stacks of a rank that cannot reply, read by py-spy where it is installed and has permission."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from notebook_accelerate.debugging import stack_dumps

# Native stacks of a rank that cannot reply, read by py-spy where it is installed and has permission.

SECONDS = 5.0
"""Time limit of py-spy, which stops the process while it runs: it reads the symbols of torch's libraries, which takes
0.8 s with a build for CUDA, and more if the main thread is inside them."""
_FRAME = re.compile(r"^\s+.+ \(.*\)$")


def command() -> str | None:
    """Return the path of py-spy; None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def stack(pid: int) -> tuple[str, ...]:
    """Return the frames of a process's main thread as "name (file:line)", with native ones, outermost first.

    Args:
        pid: The process.

    Returns:
        The frames; empty where py-spy is missing or lacks permission (many containers forbid ptrace).
    """
    spy = command()
    if spy is None:
        return ()
    try:
        done = subprocess.run(
            [spy, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse(done.stdout) if done.returncode == 0 else ()


def parse(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread in the output of py-spy, outermost first."""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            inside = "MainThread" in line or not frames
            if inside:
                frames.clear()
        elif inside and _FRAME.match(line):
            frames.append(line.strip())
    return tuple(reversed(frames))


# Inspection of a rank that cannot reply, from another process on its machine.

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
        native = stack(self._pid)
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
