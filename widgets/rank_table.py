"""The ranks as rows: of few ranks one each; of many ranks nodes and outliers first, and the others behind a fold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import traitlets

from notebook_accelerate.launch.report.markup import byte_size, number
from notebook_accelerate.launch.report.rank_rows import (
    SHOWN_NODES,
    SHOWN_RANKS,
    by_node,
    few_names,
    node_title,
    state_counts,
    sum_known,
    use_text,
)
from notebook_accelerate.widgets.feed import Feed
from notebook_accelerate.widgets.panel_elements import script

if TYPE_CHECKING:
    from notebook_accelerate.widgets.run_summary import RankSnapshot, RunSnapshot

OPEN_SECONDS, FOLDED_SECONDS = 1.0, 5.0
"""The shortest time between two updates of the other ranks while their fold is open, and while it is closed."""

JUST_NOW_SECONDS = 2.0
"""A more recent message is shown as "just now": a number would only flicker."""


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
        head = column_titles(loss, gpu=has_gpu(run.ranks))
        if self._full_due(now) or head != self._head:
            self._head, self._known = head, {}
            sections = table_sections(run)
            self._send_message("full", {"head": head, "sections": [_complete(section) for section in sections]})
            self._remember(sections)
            return
        ended = run.status in ("succeeded", "failed", "stopped")
        sections = table_sections(run, with_others=ended or self._others_are_due(now))
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


# ---- sections and rows


@dataclass(frozen=True)
class TableRow:
    """One row of the table.

    Attributes:
        key: Identifies the row in later messages.
        name: The text of its first cell.
        kind: "node", "late", "dead" or "".
        badge: Shown beside the name: "straggler", "silent" or "".
        state: The rank's state; of a node, the number of its ranks in each state.
        cells: The other cells, as text.
    """

    key: str
    name: str
    kind: str
    badge: str
    state: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Rows under a heading.

    Attributes:
        key: Identifies the section in later messages.
        title: The heading; "": none.
        rows: The rows; None: not requested.
        folded: Whether they are behind a fold.
    """

    key: str
    title: str
    rows: list[TableRow] | None
    folded: bool = False


def table_sections(run: RunSnapshot, *, with_others: bool = True) -> list[Section]:
    """Return the sections of the table of many ranks: nodes, outliers, and all other ranks behind folds.

    Args:
        run: The run.
        with_others: Whether the rows of the last section, all other ranks, are needed.
    """
    gpu, groups = has_gpu(run.ranks), by_node(run.ranks)
    nodes = [node_row(ranks, gpu=gpu, several=len(groups) > 1) for ranks in groups.values()]
    if len(nodes) > SHOWN_NODES:
        nodes.sort(key=lambda row: ("dead", "late", "").index(row.kind))
    all_outliers = outliers(run.ranks)
    listed = all_outliers[:SHOWN_RANKS]
    numbers = {rank.rank for rank in listed}
    others = [rank for rank in run.ranks if rank.rank not in numbers]
    found = [Section("nodes", "", nodes[:SHOWN_NODES])]
    if more := nodes[SHOWN_NODES:]:
        found.append(Section("more-nodes", f"{len(more)} more nodes", more, folded=True))
    if listed:
        some = f"The first {len(listed)} of {len(all_outliers):,} outliers"
        title = "Outliers" if len(listed) == len(all_outliers) else some
        found.append(Section("outliers", title, [rank_row(rank, gpu=gpu) for rank in listed]))
    title = f"{'The other' if listed else 'All'} {len(others):,} ranks"
    rows = [rank_row(rank, gpu=gpu) for rank in others] if with_others else None
    return [*found, Section("others", title, rows, folded=True)]


def outliers(ranks: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    """Return failed, silent and late ranks, the worst first."""
    found = [rank for rank in ranks if rank.state == "failed" or rank.late]
    return sorted(found, key=lambda r: (r.state != "failed", not r.silent, -r.behind, -(r.own_seconds or 0.0), r.rank))


def has_gpu(ranks: Iterable[RankSnapshot]) -> bool:
    """Return whether any rank has reported an accelerator."""
    return any(rank.devices for rank in ranks)


def column_titles(loss: str, *, gpu: bool) -> list[str]:
    """Return the titles of the columns after name and state."""
    accelerator = ["GPU", "GPU memory"] if gpu else []
    return ["step", "behind", "steps/s", loss or "loss", "CPU", "memory", *accelerator, "last message"]


def rank_row(rank: RankSnapshot, *, gpu: bool) -> TableRow:
    """Return the row of one rank.

    Args:
        rank: The rank.
        gpu: Whether the table has columns for accelerators.
    """
    kind = "dead" if rank.state == "failed" else "late" if rank.late else ""
    badge = ("silent" if rank.silent else "straggler") if rank.late else ""
    last = rank.exit or _ago(rank.silence)
    behind = rank.behind if rank.step is not None else None
    cells = [_count(rank.step), _count(behind), rate(rank.rate), _figure(rank.loss)]
    cells += [use_text(rank.cpu), byte_size(rank.memory)]
    cells += [use_text(rank.gpu), byte_size(rank.gpu_memory)] if gpu else []
    return TableRow(f"r{rank.rank}", str(rank.rank), kind, badge, rank.state, (*cells, last))


def node_row(ranks: Sequence[RankSnapshot], *, gpu: bool, several: bool) -> TableRow:
    """Return the summary of one node: its slowest step and rate, mean loss and use, total memory.

    Args:
        ranks: The ranks of the node.
        gpu: Whether the table has columns for accelerators.
        several: Whether there are other nodes.
    """
    kind = "dead" if any(r.state == "failed" for r in ranks) else "late" if any(r.late for r in ranks) else ""
    step = min((rank.step for rank in ranks if rank.step is not None), default=None)
    slowest = min((rank.rate for rank in ranks if rank.rate is not None), default=None)
    silence = max((rank.silence for rank in ranks if rank.silence is not None), default=None)
    behind = max(rank.behind for rank in ranks) if step is not None else None
    cells = [_count(step), _count(behind), rate(slowest), _figure(_mean(rank.loss for rank in ranks))]
    cells += [use_text(_mean(rank.cpu for rank in ranks)), byte_size(sum_known(rank.memory for rank in ranks))]
    if gpu:
        cells += [use_text(_mean(rank.gpu for rank in ranks)), byte_size(sum_known(rank.gpu_memory for rank in ranks))]
    late = [rank.rank for rank in ranks if rank.late]
    badge = f"{few_names(late).lower()} late" if late else ""
    name, last = node_title(ranks, several=several), _ago(silence)
    return TableRow(f"n{ranks[0].node}", name, kind, badge, state_counts(ranks), (*cells, last))


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return "just now" if seconds < JUST_NOW_SECONDS else f"{seconds:.0f} s ago"


def rate(value: float | None) -> str:
    """Return steps per second as text."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _figure(value: float | None) -> str:
    return "–" if value is None else number(value)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
