"""Frames of threads that run meanwhile.

Python 3.11 makes the object of a frame when it is asked for, which may start a garbage collection. A finalizer may then
let the thread run on: its function returns, the new object refers to memory that other frames use, and reading it ends
the process with a segmentation fault. Collections are left out while frames are read. Python 3.10 has an object for
each frame from the beginning, and from 3.12 on collections start between bytecodes only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from notebook_accelerate._collection import uncollected

_FRAMES_ARE_MADE = sys.version_info[:2] == (3, 11)


def reading() -> AbstractContextManager[None]:
    """Return a context manager in which ``sys._current_frames()`` and ``frame.f_back`` are safe for other threads."""
    return uncollected() if _FRAMES_ARE_MADE else nullcontext()


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread that runs, by the thread's identity."""
    with reading():
        return sys._current_frames()


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return a thread's innermost frame; None where it does not run."""
    return current_frames().get(thread.ident or 0)


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return frame_of(threading.main_thread())


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Return ``frame`` and its callers, innermost first; of any thread."""
    found = []
    with reading():
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return iter(found)
