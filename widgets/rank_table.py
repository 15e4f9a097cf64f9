"""The table of many ranks in the browser: a summary per node, the ranks that stand out, the others behind a fold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_accelerate.widgets import grouped_ranks
from notebook_accelerate.widgets.assets import script
from notebook_accelerate.widgets.plot import REFRESH_AGES

if TYPE_CHECKING:
    from notebook_accelerate.widgets.grouped_ranks import Part, Row
    from notebook_accelerate.widgets.run_summary import RunSnapshot

SEEN_SECONDS, OPEN_SECONDS, FOLDED_SECONDS = 0.5, 1.0, 5.0
"""Least seconds between two updates of what is seen, of what was unfolded, and of what is behind a fold."""


class RankTable(anywidget.AnyWidget):
    """Nodes and ranks as rows, of which only the cells that have changed are sent.

    A fold is opened in the browser, and a busy kernel does not hear of it: what is behind one is kept up to date too,
    only less often.
    """

    _esm = script("feed.js", "ranks.js")
    full: Any = traitlets.Dict().tag(sync=True)
    delta: Any = traitlets.Dict().tag(sync=True)
    unfolded: Any = traitlets.List([]).tag(sync=True)

    def __init__(self) -> None:
        super().__init__()
        self._seq = 0
        self._head: list[str] = []
        self._known: dict[str, dict[str, tuple[str, ...]]] = {}
        self._titles: dict[str, str] = {}
        self._due: dict[str, float] = {}
        self._asked = True
        self._born: float | None = None
        self._refreshes = 0
        self.on_msg(self._heard)

    def _heard(self, _: Any, content: Any, __: Any) -> None:
        # Comes on any thread: note it, nothing else.
        if isinstance(content, dict) and content.get("kind") == "hello":
            self._asked = True

    def update(self, now: float, seen: RunSnapshot, loss: str) -> None:
        """Send what has changed; everything where a view asked for it, or may have missed something.

        Args:
            now: Seconds, on any clock that goes forward.
            seen: The run.
            loss: The metric in the column of losses.
        """
        self._born = now if self._born is None else self._born
        if self._refreshes < len(REFRESH_AGES) and now >= self._born + REFRESH_AGES[self._refreshes]:
            self._refreshes += 1
            self._asked = True
        head = grouped_ranks.head(loss, gpu=grouped_ranks.has_gpu(seen.ranks))
        if self._asked or head != self._head:
            self._asked, self._head, self._known = False, head, {}
            parts = grouped_ranks.parts(seen)
            self._tell("full", {"head": head, "parts": [_whole(part) for part in parts]})
            self._remember(parts)
            return
        over = seen.status in ("succeeded", "failed", "stopped")
        parts = grouped_ranks.parts(seen, lambda key: over or self._is_due(key, now))
        changes = [change for part in parts if (change := self._change(part)) is not None]
        gone = [key for key in self._known if key not in {part.key for part in parts}]
        if changes or gone:
            self._tell("delta", {"parts": changes, "gone": gone})
            self._remember(parts)

    def _is_due(self, key: str, now: float) -> bool:
        """Whether it is time to send a part again; if so, plan the next time."""
        if now < self._due.get(key, 0.0):
            return False
        folded = key in ("more-nodes", "others")
        rest = OPEN_SECONDS if key in self.unfolded else FOLDED_SECONDS if folded else SEEN_SECONDS
        self._due[key] = now + 0.95 * rest
        return True

    def _change(self, part: Part) -> dict[str, Any] | None:
        """Return what is new in a part; None where nothing is."""
        known = self._known.get(part.key)
        if known is None:
            return _whole(part) if part.rows is not None else None
        change: dict[str, Any] = {}
        if part.title != self._titles.get(part.key):
            change["title"] = part.title
        if part.rows is not None:
            rows = {row.key: _values(row) for row in part.rows}
            if list(rows) != list(known):
                change["order"] = list(rows)
            if new := [[key, *values] for key, values in rows.items() if key not in known]:
                change["rows"] = new
            if cells := [[key, *pairs] for key, values in rows.items() if (pairs := _differences(known, key, values))]:
                change["cells"] = cells
        return {"key": part.key, **change} if change else None

    def _remember(self, parts: Sequence[Part]) -> None:
        there = {part.key for part in parts}
        self._known = {key: rows for key, rows in self._known.items() if key in there}
        for part in parts:
            self._titles[part.key] = part.title
            if part.rows is not None:
                self._known[part.key] = {row.key: _values(row) for row in part.rows}

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        self._seq += 1
        setattr(self, kind, {"seq": self._seq, "prev": self._seq - 1, **content})


def _values(row: Row) -> tuple[str, ...]:
    return (row.name, row.kind, row.badge, row.state, *row.cells)


def _whole(part: Part) -> dict[str, Any]:
    rows = [[row.key, *_values(row)] for row in part.rows or ()]
    return {"key": part.key, "title": part.title, "folded": part.folded, "whole": rows}


def _differences(known: dict[str, tuple[str, ...]], key: str, values: tuple[str, ...]) -> list[int | str]:
    """Return place and text of each cell that has changed, one after the other."""
    before = known.get(key)
    if before is None or before == values:
        return []
    pairs: list[int | str] = []
    for place, (old, new) in enumerate(zip(before, values, strict=True)):
        if old != new:
            pairs += [place, new]
    return pairs


__all__ = ["RankTable"]
