"""Limits what a run sends to the front end: lines, progress bars and rich displays together."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accelerate.telemetry import DisplayEvent

BURST_BYTES, BYTES_PER_SECOND = 2_500_000, 300_000
"""Limits of what the front end receives: Jupyter's server drops output above 1 MB/s, and 100 MB crash a browser."""
MAX_WAITING_CHARS = BURST_BYTES
"""Most characters of the displays that wait; others are left out."""


class OutputBudget:
    """What may be sent now. One output may exceed it: the later ones wait until that is made up for."""

    def __init__(self) -> None:
        self._left, self._time = float(BURST_BYTES), time.monotonic()

    @property
    def left(self) -> int:
        """The characters that may be sent now; none are left at 0 or below."""
        now = time.monotonic()
        self._left = min(BURST_BYTES, self._left + (now - self._time) * BYTES_PER_SECOND)
        self._time = now
        return int(self._left)

    def spend(self, characters: int) -> None:
        """Count what was sent, or would have been."""
        self._left = max(-float(BURST_BYTES), self._left - characters)


class WaitingDisplays:
    """The displays that wait for the budget: of each display id the latest state."""

    def __init__(self) -> None:
        self._events: dict[str, DisplayEvent] = {}
        self._size = 0
        self._never_shown: set[str] = set()
        self.left_out = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: DisplayEvent) -> None:
        """Keep a display for later, instead of its earlier state; leave it out if too much waits."""
        identity, size = event.display_id, display_size(event)
        before = self._events.pop(identity or "", None)
        if before is not None:
            self._size -= display_size(before)
            event = replace(event, update=before.update)
        if identity is None or self._size + size > MAX_WAITING_CHARS:
            self.left_out += 1
            if identity is not None and not event.update:
                self._never_shown.add(identity)
            return
        self._events[identity] = event
        self._size += size

    def take(self) -> DisplayEvent:
        """Return the display that has waited longest."""
        event = self._events.pop(next(iter(self._events)))
        self._size -= display_size(event)
        return event

    def first_shown(self, event: DisplayEvent) -> DisplayEvent:
        """Return an event whose display exists: the update of one that was left out shows it."""
        if event.update and event.display_id in self._never_shown:
            self._never_shown.discard(event.display_id or "")
            return replace(event, update=False)
        return event

    def waits(self, event: DisplayEvent) -> bool:
        """Whether an earlier state of a display waits."""
        return event.display_id in self._events


def display_size(event: DisplayEvent) -> int:
    """Return about how many characters a display has as JSON."""
    return _size(event.data) + _size(event.metadata)


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(_size, value)) + len(value)
    return 8
