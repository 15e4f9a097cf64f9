"""The table of runs in the browser: sorted and filtered there, with Stop and Open in each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from notebook_accelerate.widgets.assets import asset, script
from notebook_accelerate.widgets.front_end import front_end


class RunsGrid(anywidget.AnyWidget):
    """A table of texts; see ``static/runs.js``.

    The trait ``table`` holds ``columns``, each [title, kind], and ``rows``, each {key, cells, order, colour, stops,
    opened}: the texts, what they are sorted by, the place of the run's colour (-1: it has no curves), whether it can
    be stopped, and whether its panel is open.

    Args:
        clicked: Called with "stop" or "open" and the key of a row, on any thread.
    """

    _esm = script("feed.js", "looks.js", "runs.js")
    _css = asset("runs.css")
    table: Any = traitlets.Dict().tag(sync=True)

    def __init__(self, clicked: Callable[[str, int], None]) -> None:
        super().__init__()
        self._clicked = clicked
        self.on_msg(self._on_message)

    def _on_message(self, _: Any, content: Any, __: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "drawn":
            front_end.drawn = True
        elif kind in ("stop", "open") and isinstance(content.get("key"), int):
            self._clicked(kind, content["key"])
