"""Waits for gloo's threads before the interpreter or their process group ends."""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

from notebook_accelerate.hardware.process_stat import read_stat

_NAME = "pt_gloo_runloop"
"""Name of the threads in torch 2.13 and later; torch 2.9 gives them none."""
_TASKS = Path("/proc/self/task")
_CHECK_PERIOD = 0.001
"""Seconds between two checks of the threads, during which they may take the interpreter's lock."""
_IDLE_CHECKS = 2
"""Number of consecutive checks that must find all threads asleep."""
LIMIT = 5.0
"""Seconds after which threads that are still busy are ignored."""
_GRACE = 0.02
"""Seconds to wait if no thread has the name: another system, an older torch, or no gloo."""


@functools.cache  # one registration per process
def wait_for_idle_at_exit() -> None:
    """Wait at the end of this process until gloo's threads are idle."""
    atexit.register(wait_for_idle)


def wait_for_idle(limit: float = LIMIT) -> None:
    """Wait until gloo's threads are idle; takes one to two milliseconds if they are.

    A thread that ran a collective frees the collective's tensors after `wait` has returned, which needs the
    interpreter's lock. If the interpreter is ending, Python ends the thread and with it the process ("terminate called
    without an active exception"); if the group's destructor joins the thread and holds the lock, both wait forever.
    See https://github.com/pytorch/pytorch/issues/190489 (torch 2.13 and before).

    Args:
        limit: Maximum seconds to wait.
    """
    end = time.monotonic() + limit
    threads = _threads()
    asleep = 0
    while threads and asleep < _IDLE_CHECKS and time.monotonic() < end:
        time.sleep(_CHECK_PERIOD)  # releases the interpreter's lock: a thread that waits for it runs now
        asleep = asleep + 1 if all(_is_asleep(thread) for thread in threads) else 0
    if not threads:
        time.sleep(_GRACE)


def _threads() -> list[Path]:
    tasks = _TASKS.iterdir() if _TASKS.exists() else ()
    return [task for task in tasks if _read(task / "comm").strip() == _NAME]


def _is_asleep(thread: Path) -> bool:
    return read_stat(thread)[:1] in ([], ["S"])  # [] when it has ended


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # the name of a thread may be any bytes
    except OSError:
        return ""
