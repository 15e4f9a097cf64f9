"""The clock of a run's time limits: monotonic, and suspended while the run waits for its user or the machine sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable


class PausableClock:
    """Seconds on ``time.monotonic``, without those that do not count; safe from any thread.

    Attributes:
        started: The clock's time at its creation.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[Hashable] = set()
        self._held_at = self._left_out = 0.0
        self.started = self.now()

    def now(self) -> float:
        """Return the seconds that count so far."""
        with self._lock:
            return (self._held_at if self._holders else time.monotonic()) - self._left_out

    def pause(self, holder: Hashable) -> None:
        """Suspend the clock until ``holder``, such as a rank that waits for the user, resumes it."""
        with self._lock:
            if not self._holders:
                self._held_at = time.monotonic()
            self._holders.add(holder)

    def resume(self, holder: Hashable) -> None:
        """End the suspension by ``holder``, if there is one; the clock resumes when no holder is left."""
        with self._lock:
            if holder in self._holders:
                self._holders.discard(holder)
                if not self._holders:
                    self._left_out += time.monotonic() - self._held_at

    def leave_out(self, seconds: float) -> None:
        """Do not count the last ``seconds``: this process did not run."""
        with self._lock:
            if not self._holders:
                self._left_out += seconds

    @property
    def suspended(self) -> bool:
        """Whether the clock is suspended."""
        return bool(self._holders)
