"""Read the stacks of a rank that cannot reply, from another process on the same machine.

The rank's signal handler writes the stacks to a file, even while native code holds the GIL. The native frames are read
with py-spy, if it is installed and has permission.
"""

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

from notebook_accelerate.telemetry import FrameInfo

DUMP_SECONDS = 0.5
"""Time limit in seconds for the signal handler to write the stacks."""
SETTLE_SECONDS = 0.05
"""A dump is considered complete if it has not grown for this many seconds."""
SLEEP_SECONDS = 0.2
"""A process is considered stuck if it is still in uninterruptible sleep after this many seconds."""

PY_SPY_SECONDS = 5.0
"""Time limit in seconds for py-spy, which stops the process while it reads.

py-spy reads the symbols of torch's libraries. This takes 0.8 s with a CUDA build, and longer if the main thread is
inside these libraries.
"""
IN_KERNEL = (
    "in uninterruptible sleep (state D): a driver or a file system does not answer, and signals do not end the process "
    "until it does; the kernel's messages (dmesg) may say why"
)


class ProcessStacks(NamedTuple):
    """The stacks of a process.

    Attributes:
        dump: The output of faulthandler, or "" if the rank has not installed it.
        native: The main thread's frames as read by py-spy. Empty if py-spy is missing or lacks permission.
        suspended: The reason why the process cannot run, such as SIGSTOP, and the remedy, or "" if it can run.
        problem: The reason why the stacks could not be read, or "" if they were read.
    """

    dump: str = ""
    native: tuple[str, ...] = ()
    suspended: str = ""
    problem: str = ""


class ProcessInspector:
    """Reads the stacks of one process.

    Args:
        pid: The process id.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._dump: int | None = None
        self._lock = threading.Lock()

    def open_dump(self, path: str) -> None:
        """Open the rank's dump file.

        Call this as soon as the rank has sent ``path``, because the file cannot be opened once the rank has ended.
        """
        with suppress(OSError), self._lock:
            if self._dump is not None:
                os.close(self._dump)
            self._dump = os.open(path, os.O_RDONLY)

    def read_stacks(self, send_signal: Callable[[int], None]) -> ProcessStacks:
        """Make the rank's signal handler write its stacks, and return them together with the native stack."""
        if self._sleeps_in_kernel():  # In this state, the handler does not run, and py-spy waits.
            return ProcessStacks("", (), IN_KERNEL)
        native = native_stack(self._pid)
        if self._status() == "stopped":
            return ProcessStacks("", native, f"suspended (SIGSTOP); kill -CONT {self._pid} resumes it")
        return ProcessStacks(self._read_dump(send_signal), native)

    def _sleeps_in_kernel(self) -> bool:
        """Return whether the process is stuck in uninterruptible sleep, and not just reading from a disk."""
        if self._status() != "disk-sleep":
            return False
        time.sleep(SLEEP_SECONDS)
        return self._status() == "disk-sleep"

    def _status(self) -> str:
        import psutil

        with suppress(psutil.Error, OSError):  # The process may have exited, or the system may have no /proc.
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
            return read_new_bytes(dump, before, DUMP_SECONDS)

    def close(self) -> None:
        """Close the dump file."""
        with self._lock:
            dump, self._dump = self._dump, None
        if dump is not None:
            os.close(dump)


# ---- parse the output of the rank's signal handler

_DUMPED_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])?.*:$")
_DUMPED_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')


def read_new_bytes(descriptor: int, before: int, timeout: float) -> str:
    """Wait until a dump file stops growing, and return its bytes after the first ``before`` bytes.

    Args:
        descriptor: The rank's dump file, open for reading.
        before: The size of the file when the signal was sent.
        timeout: The maximum number of seconds to wait for the first bytes.
    """
    deadline = time.monotonic() + timeout
    size, settled = before, False
    while not settled:
        time.sleep(SETTLE_SECONDS)
        # Read the clock before the size, so that bytes that arrive in between are not missed.
        over = time.monotonic() >= deadline
        now = os.fstat(descriptor).st_size
        settled, size = over or now == size > before, now
    return os.pread(descriptor, size - before, before).decode(errors="replace")


def parse_dump(text: str) -> dict[str, tuple[FrameInfo, ...]]:
    """Return the stacks of a faulthandler dump by thread, starting with the signalled one, outermost frame first."""
    threads: dict[str, list[FrameInfo]] = {}
    current: list[FrameInfo] = []
    first = ""
    for line in text.splitlines():
        if head := _DUMPED_THREAD.match(line):
            name = head["name"] or head[1]
            first = name if line.startswith("Current") else first
            current = threads.setdefault(name, [])
        elif frame := _DUMPED_FRAME.match(line):
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            current.append(FrameInfo(frame["file"], number, frame["name"], ""))
    order = sorted(threads, key=lambda name: name != first)
    return {name: tuple(reversed(threads[name])) for name in order}


# ---- native frames

_NATIVE_FRAME = re.compile(r"^\s+.+ \(.*\)$")


def native_stack(pid: int) -> tuple[str, ...]:
    """Return the frames of a process's main thread, including native ones, as "name (file:line)", outermost first.

    Args:
        pid: The process id.

    Returns:
        The frames. Empty if py-spy is missing or lacks permission. (Many containers forbid ptrace.)
    """
    spy = py_spy_path()
    if spy is None:
        return ()
    try:
        command = [spy, "dump", "--native", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_native(done.stdout) if done.returncode == 0 else ()


def py_spy_path() -> str | None:
    """Return the path of py-spy, or None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def parse_native(text: str) -> tuple[str, ...]:
    """Return the main thread's frames from the output of py-spy, outermost first."""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            inside = "MainThread" in line or not frames
            if inside:
                frames.clear()
        elif inside and _NATIVE_FRAME.match(line):
            frames.append(line.strip())
    return tuple(reversed(frames))
