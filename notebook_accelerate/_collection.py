"""Work that makes many objects and no garbage, such as imports, without Python's automatic garbage collection."""

from __future__ import annotations

import gc
import os
from _thread import RLock
from collections.abc import Iterator
from contextlib import contextmanager


class _Blocks:
    """The blocks of all threads of this process that leave collections out now."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = RLock()  # a signal handler or a finalizer may come here again
        self._entered = 0
        self._switched_off = False

    def begin_again(self) -> None:
        """Switch collections on in a process forked meanwhile: the blocks of other threads end in the parent only."""
        if self._switched_off:
            gc.enable()
        self._begin()

    def enter(self) -> None:
        with self._lock:
            self._entered += 1
            if gc.isenabled():
                self._switched_off = True  # before it is: a fork may come in between
                gc.disable()

    def leave(self) -> None:
        with self._lock:
            self._entered -= 1
            if self._switched_off and not self._entered:
                gc.enable()
                self._switched_off = False


_blocks = _Blocks()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_blocks.begin_again)


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave automatic collections out, in all threads, inside the block, which makes objects and drops few.

    The collector runs after a number of new objects. A full collection then looks at all objects of the process: beside
    torch's, that takes 0.1 s. Where collections are off already they stay off; ``gc.disable()`` in another thread
    meanwhile ends with the block.
    """
    process = os.getpid()
    _blocks.enter()
    try:
        yield
    finally:
        if os.getpid() == process:  # else it was forked inside the block
            _blocks.leave()
