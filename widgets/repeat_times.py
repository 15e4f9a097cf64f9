"""The times at which something is repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence


class RepeatTimes:
    """The times at which something is repeated: at some ages, then once per period.

    Args:
        ages: Seconds after the start.
        period: Seconds between later repetitions.
    """

    def __init__(self, ages: Sequence[float], period: float = math.inf) -> None:
        self._ages, self._period = ages, period
        self._start: float | None = None
        self._next = math.inf

    def start(self, now: float) -> None:
        """Begin at ``now``, in seconds on any clock."""
        self._start = now
        self.plan(now)

    def plan(self, now: float) -> None:
        """Set the next time, after something was repeated at ``now``."""
        assert self._start is not None, "call start() first"
        later = (self._start + age for age in self._ages if self._start + age > now)
        self._next = next(later, now + self._period)

    def due(self, now: float) -> bool:
        """Return whether a repetition is due, and plan the next one. The first call is the start."""
        if self._start is None:
            self.start(now)
        if now < self._next:
            return False
        self.plan(now)
        return True
