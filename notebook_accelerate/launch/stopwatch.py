"""Time that stands still while a user is being asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable


class Stopwatch:
    """Seconds since the epoch, less the time during which somebody waited for the user; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused = 0.0
        self._since: dict[Hashable, float] = {}

    def now(self) -> float:
        """Return the time by this watch."""
        with self._lock:
            return (min(self._since.values()) if self._since else time.time()) - self._paused

    def pause(self, who: Hashable) -> None:
        """``who``, as a rank, begins to wait for the user."""
        with self._lock:
            self._since.setdefault(who, time.time())

    def resume(self, who: Hashable) -> None:
        """``who`` waits no longer; the watch goes on once nobody does."""
        with self._lock:
            began = min(self._since.values(), default=0.0)
            if self._since.pop(who, None) is not None and not self._since:
                self._paused += time.time() - began

    @property
    def standing(self) -> bool:
        """Whether somebody waits."""
        return bool(self._since)
