"""Dictionaries that all instances of a class share, and a function that does nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Slots = dict[str, Any]


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any arguments and do nothing: a function for one rank, on the other ranks."""


class ThreadLocalSharedDict(threading.local):
    """A descriptor with one dictionary per thread (XLA runs one rank per thread).

    Args:
        thread_local: Accepted for compatibility; the dictionary is always the thread's own.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: Slots = {}

    def __get__(self, instance: object, owner: type | None = None) -> Slots:
        return self._storage

    def __set__(self, instance: object, value: Slots) -> None:
        self._storage = value


SharedDict: Callable[[], Slots] = dict
"""The dictionary that the instances of a state class share: one per process."""
