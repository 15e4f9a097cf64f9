"""The table of many ranks in the browser: nodes, outliers, and the other ranks behind a fold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from notebook_accelerate.widgets import grouped_ranks
from notebook_accelerate.widgets.assets import script
from notebook_accelerate.widgets.plot import Feed

if TYPE_CHECKING:
    from notebook_accelerate.widgets.grouped_ranks import Section, TableRow
    from notebook_accelerate.widgets.run_summary import RunSnapshot

OPEN_SECONDS, FOLDED_SECONDS = 1.0, 5.0
"""The shortest time between two updates of the other ranks while their fold is open, and while it is closed."""


class RankTable(Feed):
    """Nodes and ranks as rows, of which only the changed cells are sent.

    A fold is opened in the browser, and a busy kernel does not receive that: closed sections are kept up to date too,
    only less often.
    """

    _esm = script("feed.js", "ranks.js")
    unfolded: Any = traitlets.List([]).tag(sync=True)

    def __init__(self) -> None:
        super().__init__()
        self._head: list[str] = []
        self._known: dict[str, dict[str, tuple[str, ...]]] = {}
        self._titles: dict[str, str] = {}
        self._others_due = 0.0

    def update(self, now: float, run: RunSnapshot, loss: str) -> None:
        """Send what has changed, or everything if a view asked for it or may have missed a message.

        Args:
            now: Seconds, on any clock that does not go back.
            run: The run.
            loss: The metric in the column of losses.
        """
        head = grouped_ranks.head(loss, gpu=grouped_ranks.has_gpu(run.ranks))
        if self._full_due(now) or head != self._head:
            self._head, self._known = head, {}
            sections = grouped_ranks.sections(run)
            self._send_message("full", {"head": head, "sections": [_complete(section) for section in sections]})
            self._remember(sections)
            return
        ended = run.status in ("succeeded", "failed", "stopped")
        sections = grouped_ranks.sections(run, with_others=ended or self._others_are_due(now))
        changes = [change for section in sections if (change := self._change(section)) is not None]
        removed = [key for key in self._known if key not in {section.key for section in sections}]
        if changes or removed:
            self._send_message("delta", {"sections": changes, "removed": removed})
            self._remember(sections)

    def _others_are_due(self, now: float) -> bool:
        """Return whether it is time to send the other ranks again, and plan the next time."""
        if now < self._others_due:
            return False
        self._others_due = now + 0.95 * (OPEN_SECONDS if "others" in self.unfolded else FOLDED_SECONDS)
        return True

    def _change(self, section: Section) -> dict[str, Any] | None:
        """Return what is new in a section; None: nothing."""
        known = self._known.get(section.key)
        if known is None:
            return _complete(section) if section.rows is not None else None
        change: dict[str, Any] = {}
        if section.title != self._titles.get(section.key):
            change["title"] = section.title
        if section.rows is not None:
            rows = {row.key: _values(row) for row in section.rows}
            if list(rows) != list(known):
                change["order"] = list(rows)
            if new := [[key, *values] for key, values in rows.items() if key not in known]:
                change["rows"] = new
            if cells := [[key, *pairs] for key, values in rows.items() if (pairs := _differences(known, key, values))]:
                change["cells"] = cells
        return {"key": section.key, **change} if change else None

    def _remember(self, sections: Sequence[Section]) -> None:
        present = {section.key for section in sections}
        self._known = {key: rows for key, rows in self._known.items() if key in present}
        for section in sections:
            self._titles[section.key] = section.title
            if section.rows is not None:
                self._known[section.key] = {row.key: _values(row) for row in section.rows}


def _values(row: TableRow) -> tuple[str, ...]:
    return (row.name, row.kind, row.badge, row.state, *row.cells)


def _complete(section: Section) -> dict[str, Any]:
    rows = [[row.key, *_values(row)] for row in section.rows or ()]
    return {"key": section.key, "title": section.title, "folded": section.folded, "all": rows}


def _differences(known: dict[str, tuple[str, ...]], key: str, values: tuple[str, ...]) -> list[int | str]:
    """Return the index and the text of each changed cell, alternating."""
    before = known.get(key)
    if before is None or before == values:
        return []
    pairs: list[int | str] = []
    for index, (old, new) in enumerate(zip(before, values, strict=True)):
        if old != new:
            pairs += [index, new]
    return pairs
