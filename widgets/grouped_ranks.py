"""The rows of the table of ranks: one per rank, or with many ranks one per node and one per outlier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.markup import byte_size, number
from notebook_accelerate.launch.report.rank_rows import (
    SHOWN_NODES,
    SHOWN_RANKS,
    by_node,
    few_names,
    node_name,
    state_counts,
    sum_known,
    use_text,
)

if TYPE_CHECKING:
    from notebook_accelerate.widgets.run_summary import RankSnapshot, RunSnapshot

JUST_NOW_SECONDS = 2.0
"""A more recent message is shown as "just now": a number would only flicker."""


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


def has_gpu(ranks: Iterable[RankSnapshot]) -> bool:
    """Return whether any rank has reported an accelerator."""
    return any(rank.devices for rank in ranks)


def head(loss: str, *, gpu: bool) -> list[str]:
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
    cells = [_count(rank.step), _count(behind), rate(rank.rate), _number(rank.loss)]
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
    cells = [_count(step), _count(behind), rate(slowest), _number(_mean(rank.loss for rank in ranks))]
    cells += [use_text(_mean(rank.cpu for rank in ranks)), byte_size(sum_known(rank.memory for rank in ranks))]
    if gpu:
        cells += [use_text(_mean(rank.gpu for rank in ranks)), byte_size(sum_known(rank.gpu_memory for rank in ranks))]
    late = [rank.rank for rank in ranks if rank.late]
    badge = f"{few_names(late).lower()} late" if late else ""
    name, last = node_name(ranks, several=several), _ago(silence)
    return TableRow(f"n{ranks[0].node}", name, kind, badge, state_counts(ranks), (*cells, last))


def sections(run: RunSnapshot, *, with_others: bool = True) -> list[Section]:
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


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
