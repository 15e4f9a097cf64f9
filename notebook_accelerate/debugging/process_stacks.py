"""The stacks of a rank that cannot reply, read from another process on its machine.

The rank's signal handler writes them to a file, even while native code holds the GIL. py-spy reads the native frames
where it is installed and has permission.
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
"""Time limit of the signal handler."""
SETTLE_SECONDS = 0.05
"""A dump that has not grown for this long is complete."""
SLEEP_SECONDS = 0.2
"""A process in uninterruptible sleep for longer stays there."""

PY_SPY_SECONDS = 5.0
"""Time limit of py-spy, which stops the process while it runs: it reads the symbols of torch's libraries, which takes
0.8 s with a build for CUDA, and more if the main thread is inside them."""
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
        native = native_stack(self._pid)
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
            return read_new_bytes(dump, before, DUMP_SECONDS)

    def close(self) -> None:
        """Close the dump."""
        with self._lock:
            dump, self._dump = self._dump, None
        if dump is not None:
            os.close(dump)


# ---- what the rank's signal handler writes

_DUMPED_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])?.*:$")
_DUMPED_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')


def read_new_bytes(descriptor: int, before: int, timeout: float) -> str:
    """Return the bytes of a dump file after its first ``before`` ones, once the file has stopped growing.

    Args:
        descriptor: The rank's dump file, open for reading.
        before: Its size when the signal was sent.
        timeout: Seconds to wait for the first bytes.
    """
    deadline = time.monotonic() + timeout
    size, settled = before, False
    while not settled:
        time.sleep(SETTLE_SECONDS)
        over = time.monotonic() >= deadline  # read before the size: bytes that arrive in between count
        now = os.fstat(descriptor).st_size
        settled, size = over or now == size > before, now
    return os.pread(descriptor, size - before, before).decode(errors="replace")


def parse_dump(text: str) -> dict[str, tuple[FrameInfo, ...]]:
    """Return the stacks of a faulthandler dump by thread, first the signalled thread's, outermost frame first."""
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
    """Return the frames of a process's main thread as "name (file:line)", with native ones, outermost first.

    Args:
        pid: The process.

    Returns:
        The frames; empty where py-spy is missing or lacks permission (many containers forbid ptrace).
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
    """Return the path of py-spy; None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def parse_native(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread in the output of py-spy, outermost first."""
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
