"""The base class of widgets with growing data, which send everything once, and then only new data."""

from __future__ import annotations

import math
from typing import Any

import anywidget
import traitlets

from notebook_accelerate.widgets.front_end import front_end
from notebook_accelerate.widgets.panel_output import RepeatTimes

REFRESH_AGES = (0.4, 1.0, 2.0, 4.0, 8.0)
"""The ages of a widget, in seconds, at which everything is sent again, because a view that is opened while the kernel
is busy cannot ask for the messages that it missed."""


class Feed(anywidget.AnyWidget):
    """A widget that sends numbered messages; see ``static/feed.js``.

    ``full`` holds everything. ``delta`` continues the message whose number is its ``prev``. A view that has missed a
    message asks for a new ``full``, and a view that has been drawn reports this; see ``front_end``.

    Args:
        period: Seconds between messages with everything, after those at ``REFRESH_AGES``.
        traits: The initial values of the widget's traits, by name.
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
        # Only record the message, because this may be called on any thread.
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "hello":
            self._full_requested = True
        elif kind == "drawn":
            front_end.drawn = True

    def _full_due(self, now: float) -> bool:
        """Return whether everything has to be sent: a view asked for it, or may have missed a message."""
        requested, self._full_requested = self._full_requested, False
        return self._repeats.due(now) or requested

    def _send_message(self, kind: str, content: dict[str, Any]) -> None:
        """Send a message. Its kind is "full" or "delta"."""
        self._seq += 1
        setattr(self, kind, {"seq": self._seq, "prev": self._seq - 1, **content})
