"""Widgets with growing data: a message with everything, then messages with what is new."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

REFRESH_AGES = (0.4, 1.0, 2.0, 4.0, 8.0)
"""A view that is opened while the kernel is busy cannot ask for the messages it missed. Everything is therefore sent
again at these ages of a widget, in seconds."""


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


class Feed(anywidget.AnyWidget):
    """A widget that sends numbered messages; see ``static/feed.js``.

    ``full`` holds everything. ``delta`` continues the message whose number is its ``prev``. A view that missed one
    asks for a new ``full``.

    Args:
        period: Seconds between repetitions of everything, after ``REFRESH_AGES``.
        traits: Values of the traits.
    """

    full: Any = traitlets.Dict().tag(sync=True)
    delta: Any = traitlets.Dict().tag(sync=True)

    def __init__(self, period: float = math.inf, **traits: Any) -> None:
        super().__init__(**traits)
        self._seq = 0
        self._full_requested = True
        self._repeats = RepeatTimes(REFRESH_AGES, period)
        self.on_msg(self._on_message)

    def _on_message(self, _: Any, content: Any, __: Any) -> None:
        # Called on any thread: record the request, nothing else.
        if isinstance(content, dict) and content.get("kind") == "hello":
            self._full_requested = True

    def _full_due(self, now: float) -> bool:
        """Return whether everything has to be sent: a view asked for it, or may have missed a message."""
        requested, self._full_requested = self._full_requested, False
        return self._repeats.due(now) or requested

    def _send_message(self, kind: str, content: dict[str, Any]) -> None:
        """Send a message: ``kind`` is "full" or "delta"."""
        self._seq += 1
        setattr(self, kind, {"seq": self._seq, "prev": self._seq - 1, **content})
