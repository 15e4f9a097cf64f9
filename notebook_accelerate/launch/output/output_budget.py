"""Limit how much output a run sends to the front end and leaves in the notebook's file."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accelerate.telemetry import DisplayEvent

BURST_BYTES, BYTES_PER_SECOND = 2_500_000, 300_000
"""Limits for output to the front end. Jupyter's server drops output above 1 MB/s, and 100 MB can crash a browser."""
HEAD_BYTES, TAIL_BYTES = 120_000, 40_000
"""How many bytes of a run's first lines, and how many of its last lines, stay in the notebook's file."""
MAX_TAIL_CHARS = 2_000
"""Maximum length of a line among the last lines. Longer ones are truncated."""
_BYTES_PER_LINE = 12
"""Bytes that the quotes, the comma and the indentation of each line add to the notebook's file."""
MAX_WAITING_CHARS = BURST_BYTES
"""Maximum number of characters in queued displays. Displays beyond that are dropped."""


class OutputBudget:
    """Tracks how much output may be sent now. A single output may exceed that amount, but later ones have to wait."""

    def __init__(self) -> None:
        self._left, self._time = float(BURST_BYTES), time.monotonic()

    @property
    def left(self) -> int:
        """The number of characters that may be sent now. At 0 or below, nothing may be sent."""
        now = time.monotonic()
        self._left = min(BURST_BYTES, self._left + (now - self._time) * BYTES_PER_SECOND)
        self._time = now
        return int(self._left)

    def spend(self, characters: int) -> None:
        """Subtract characters that were sent or dropped."""
        self._left = max(-float(BURST_BYTES), self._left - characters)


class HeadAndTail:
    """Divides a run's text into its first lines, its last lines, and the omitted lines between them.

    Attributes:
        changed: Whether there are new last lines since `tail` was called.
    """

    def __init__(self) -> None:
        self._left = HEAD_BYTES
        self._lines: deque[str] = deque()
        self._size = self._left_out = 0
        self.changed = False

    def head(self, text: str) -> str:
        """Return the lines of ``text`` that still count as first lines. The others are kept for `tail`.

        Args:
            text: One or more complete lines.
        """
        size = notebook_bytes(text) if self._left > 0 else 0
        if 0 < size <= self._left:
            self._left -= size
            return text
        first, rest = self._cut(text) if self._left > 0 else ("", text)
        self._left = 0
        self._add(rest)
        return first

    def tail(self) -> str:
        """Return a line with the number of omitted lines, followed by the last lines, or "" if there are none."""
        self.changed = False
        if not self._lines:
            return ""
        missing = f"… {self._left_out:,} lines not shown here: run.logs() returns them …\n" if self._left_out else ""
        return missing + "\n".join(self._lines)

    def _cut(self, text: str) -> tuple[str, str]:
        end, left = 0, self._left
        while (line_end := text.find("\n", end) + 1) and (left := left - notebook_bytes(text[end:line_end])) >= 0:
            end = line_end
        return text[:end], text[end:]

    def _add(self, text: str) -> None:
        self.changed = True
        recent = text[-TAIL_BYTES:]
        if len(recent) < len(text):
            # The first line of this part is cut off, so start with the next one. If there is none, keep the whole line.
            begin = text.find("\n", len(text) - len(recent), -1) + 1 or text.rfind("\n", 0, -1) + 1
            recent = text[begin:]
            self._left_out += text.count("\n", 0, begin)
        for line in recent.removesuffix("\n").split("\n"):
            shown = line if len(line) <= MAX_TAIL_CHARS else line[:MAX_TAIL_CHARS] + " …"
            self._lines.append(shown)
            self._size += notebook_bytes(shown) + _BYTES_PER_LINE
        while self._size > TAIL_BYTES and len(self._lines) > 1:
            self._size -= notebook_bytes(self._lines.popleft()) + _BYTES_PER_LINE
            self._left_out += 1


def notebook_bytes(text: str) -> int:
    """Return the approximate size of ``text`` in a notebook's file, in bytes."""
    return len(json.dumps(text, ensure_ascii=False).encode(errors="replace")) + _BYTES_PER_LINE * text.count("\n")


class WaitingDisplays:
    """The displays that wait until the budget allows sending them. Only the latest state of each one is kept."""

    def __init__(self) -> None:
        self._events: dict[str, DisplayEvent] = {}
        self._size = 0
        self._never_shown: set[str] = set()
        self.left_out = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: DisplayEvent) -> None:
        """Queue a display in place of its earlier state, or drop the display if too much is queued."""
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

    def pop(self) -> DisplayEvent:
        """Remove and return the display that has waited the longest."""
        event = self._events.pop(next(iter(self._events)))
        self._size -= display_size(event)
        return event

    def first_shown(self, event: DisplayEvent) -> DisplayEvent:
        """Return the event. An update of a display that was dropped is changed to show the display instead."""
        if event.update and event.display_id in self._never_shown:
            self._never_shown.discard(event.display_id or "")
            return replace(event, update=False)
        return event

    def waits(self, event: DisplayEvent) -> bool:
        """Return whether an earlier state of a display is queued."""
        return event.display_id in self._events


def display_size(event: DisplayEvent) -> int:
    """Return the approximate size of a display as JSON, in characters."""
    return _size(event.data) + _size(event.metadata)


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(_size, value)) + len(value)
    return 8
