"""Marks the processes of a kernel's ranks, so that all of them can be found when the kernel is gone.

A process that is started by a rank may leave the rank's process group and session, lose its parent and its
environment, and execute another program. It keeps its resource limits. The limit on file locks is not enforced since
Linux 2.4.25: its soft value serves as the mark. On other systems there are no marks.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from notebook_accelerate.hardware.process_stat import FLAGS, STARTED, STATE, read_stat

_RLIMIT_LOCKS = 10
_EXITING = 0x4  # PF_EXITING
KILL_SECONDS = 5.0
"""Seconds in which marked processes may start others before the search for them ends."""


def mark_of(pid: int) -> int:
    """Return the mark of a kernel: its process id and when it started; 0 where there are no marks."""
    fields = read_stat(Path(f"/proc/{pid}"))
    return (pid << 32) | (int(fields[STARTED]) & 0xFFFFFFFF) if fields else 0


def set_mark(mark: int, pid: int = 0) -> None:
    """Mark a process, and all that it will start; mark 0 removes the mark, and process 0 is this one."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError):  # the administrator has limited it
            hard = resource.prlimit(pid, _RLIMIT_LOCKS)[1]
            resource.prlimit(pid, _RLIMIT_LOCKS, (mark or hard, hard))


def is_ending(pid: int) -> bool:
    """Whether a process is ending or has ended."""
    fields = read_stat(Path(f"/proc/{pid}"))
    return not fields or fields[STATE] in ("Z", "X") or bool(int(fields[FLAGS]) & _EXITING)


def kill_marked(mark: int) -> None:
    """Kill all processes with a mark, also those that they start meanwhile."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := _marked(mark)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: int) -> list[int]:
    line = f"Max file locks {mark} "
    found = []
    for limits in Path("/proc").glob("[0-9]*/limits") if mark else ():
        with suppress(OSError):
            if line in " ".join(limits.read_text().split()):
                pid = int(limits.parent.name)
                if not is_ending(pid):
                    found.append(pid)
    return found
