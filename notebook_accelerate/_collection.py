"""Pause Python's garbage collector, and list objects that it tracks."""

from __future__ import annotations

import gc
import os
from _thread import RLock
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, compress, repeat
from typing import Any


class _Blocks:
    """Counts the blocks that currently pause garbage collection, in all threads of this process."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = RLock()  # The lock is reentrant, because a signal handler or finalizer may enter a block.
        self._entered = 0
        self._switched_off = False

    def resume_in_child(self) -> None:
        """Resume garbage collection after a fork inside a block, because other threads do not exist in the child."""
        if self._switched_off:
            gc.enable()
        self._reset()

    def enter(self) -> None:
        with self._lock:
            self._entered += 1
            if gc.isenabled():
                self._switched_off = True  # Set this first, because a fork may happen in between.
                gc.disable()

    def exit(self) -> None:
        with self._lock:
            self._entered -= 1
            if self._switched_off and not self._entered:
                gc.enable()
                self._switched_off = False


_blocks = _Blocks()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_blocks.resume_in_child)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause automatic garbage collection in all threads inside a block that creates many objects, but drops few.

    The collector runs whenever there is a certain number of new objects, and a full collection inspects all objects of
    the process, which takes 0.1 s once torch is imported. If collection is already off, it stays off. If another thread
    calls ``gc.disable()`` inside the block, collection is nevertheless on after the block.
    """
    process = os.getpid()
    _blocks.enter()
    try:
        yield
    finally:
        if os.getpid() == process:  # Skip this in a process that was forked inside the block.
            _blocks.exit()


def instances(*kinds: type, generation: int | None = None) -> list[Any]:
    """Return the objects of any of these classes, and of their subclasses, that the garbage collector tracks.

    Do not loop over ``gc.get_objects()`` while other threads may run. Its list may contain a tuple that another thread
    is still filling. If so, ``tuple(...)`` raises SystemError in that thread, because a tuple with a second reference
    cannot be resized (bpo-15108). Here, the list exists only while a single C function runs, and the interpreter does
    not switch threads until it returns. This function never reads ``__class__``, which could raise an error if the
    object is a proxy, or import a lazy module.

    Args:
        kinds: The classes. Their metaclasses must not define ``__subclasscheck__``, which would run Python code while
            the list exists.
        generation: Return only objects of this generation of the collector. Frozen objects belong to none.
    """
    lists = map(gc.get_objects, [generation])  # noqa: TID251 - called only when `list` asks for the first object
    objects = chain.from_iterable(lists)
    with gc_paused():  # Before Python 3.12, a collection could start inside the call and run Python code.
        return list(_matching(chain.from_iterable(map(repeat, objects, repeat(2))), kinds))


def _matching(twice: Iterator[Any], kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yield the objects that are instances of the classes.

    Each object arrives twice: ``compress`` takes the first as the result, then ``type`` takes the second for the check.
    """
    return compress(twice, map(issubclass, map(type, twice), repeat(kinds)))
