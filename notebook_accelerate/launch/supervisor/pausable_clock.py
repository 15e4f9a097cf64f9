"""Time that stands still while a user is being asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import NamedTuple


class Elsewhere(NamedTuple):
    """Somebody in another notebook, by the index of its node."""

    node: int


class PausableClock:
    """Seconds since the epoch, less the time during which somebody waited for the user; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses: list[tuple[float, float]] = []
        self._since: dict[Hashable, float] = {}

    def now(self) -> float:
        """Return the time by this watch."""
        return self.at(time.time())

    def at(self, moment: float) -> float:
        """Return what this watch showed, or will show if it goes on standing, at a ``time.time()``."""
        if not (self._pauses or self._since):  # asked for every message of every rank
            return moment
        with self._lock:
            open_one = [(min(self._since.values()), moment)] if self._since else []
            return moment - sum(max(0.0, min(moment, end) - begin) for begin, end in [*self._pauses, *open_one])

    def pause(self, who: Hashable) -> None:
        """``who``, as a rank, begins to wait for the user."""
        with self._lock:
            self._since.setdefault(who, time.time())

    def resume(self, who: Hashable) -> None:
        """``who`` waits no longer; the watch goes on once nobody does."""
        with self._lock:
            began = min(self._since.values(), default=0.0)
            if self._since.pop(who, None) is None:
                return
            until = min(self._since.values(), default=time.time())  # from then on the others' own pause counts
            if began < until:
                self._pauses.append((began, until))

    def waiting_here(self) -> list[Hashable]:
        """Return who waits, without those who do in other notebooks."""
        with self._lock:
            return [who for who in self._since if not isinstance(who, Elsewhere)]

    def forget_elsewhere(self) -> None:
        """Nobody waits in other notebooks any longer."""
        for who in [who for who in list(self._since) if isinstance(who, Elsewhere)]:
            self.resume(who)

    @property
    def standing(self) -> bool:
        """Whether somebody waits."""
        return bool(self._since)
