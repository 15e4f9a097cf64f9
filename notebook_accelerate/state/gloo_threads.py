"""gloo's own threads: they finish with the interpreter before it ends, or before their process group does."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
"""What torch calls the threads (2.6 and later)."""
_TASKS = Path("/proc/self/task")
_LOOK = 0.001
"""Seconds between two looks at the threads, during which they may have the interpreter."""
_LOOKS = 2
"""So many looks have to find them asleep."""
LIMIT = 5.0
"""Seconds after which a thread that still works is left alone: nobody waits for what it does."""
_UNKNOWN = 0.02
"""Seconds given to the threads where none can be told by its name: another system, an older torch, no gloo."""

_registered = False


def settle_at_exit() -> None:
    """Have this process end only after gloo's threads have settled."""
    global _registered  # noqa: PLW0603 - one interpreter, one end
    if not _registered:
        _registered = True
        atexit.register(settle)


def settle(limit: float = LIMIT) -> None:
    """Wait until gloo's threads hold nothing of the interpreter any more; a millisecond or two where they rest.

    A thread that ran a collective gives the collective's tensors back after `wait` has returned, and needs the
    interpreter for it. Where that is ending, Python ends the thread and with it the process ("terminate called without
    an active exception"); where the group's destructor joins the thread and holds the interpreter, both wait for ever.
    See https://github.com/pytorch/pytorch/issues/190489 (torch 2.13 and before).

    Args:
        limit: Seconds to wait at most.
    """
    end = time.monotonic() + limit
    threads = _threads()
    asleep = 0
    while threads and asleep < _LOOKS and time.monotonic() < end:
        time.sleep(_LOOK)  # which lets go of the interpreter: a thread that waits for it has it now, and runs
        asleep = asleep + 1 if all(_is_asleep(thread) for thread in threads) else 0
    if not threads:
        time.sleep(_UNKNOWN)


def _threads() -> list[Path]:
    tasks = _TASKS.iterdir() if _TASKS.exists() else ()
    return [task for task in tasks if _read(task / "comm").strip() == _NAME]


def _is_asleep(thread: Path) -> bool:
    # "tid (name) state ...", and the name may hold anything; a thread that has ended has no such file.
    return _read(thread / "stat").rpartition(")")[2].split()[:1] in ([], ["S"])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
