"""Dictionaries that all instances of a class share, and the function that does nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Slots = dict[str, Any]


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take anything, do nothing: what a function for one rank is on the others."""


class ThreadLocalSharedDict(threading.local):
    """A descriptor whose dictionary is another one in each thread (XLA runs one rank per thread).

    Args:
        thread_local: Kept for Accelerate's signature; the dictionary is always the thread's own.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: Slots = {}

    def __get__(self, instance: object, owner: type | None = None) -> Slots:
        return self._storage

    def __set__(self, instance: object, value: Slots) -> None:
        self._storage = value


SharedDict: Callable[[], Slots] = dict
"""The kind of dictionary that the state classes share: one per process."""
