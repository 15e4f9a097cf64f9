"""The ranks as rows: of few ranks one each; of many ranks nodes and outliers first, and the others behind a fold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.document import Cell, Column, Group, Row, Table
from notebook_accelerate.launch.report.markup import byte_size, number
from notebook_accelerate.launch.report.rank_rows import (
    MANY,
    SHOWN_NODES,
    SHOWN_RANKS,
    by_node,
    few_names,
    node_title,
    state_counts,
    sum_known,
    use_text,
)

if TYPE_CHECKING:
    from notebook_accelerate.widgets.run_summary import RankSnapshot, RunSnapshot

JUST_NOW_SECONDS = 2.0
"""A more recent message is shown as "just now": a number would only flicker."""
OTHERS = "others"
"""The key of the group of all ranks that are not outliers. There may be thousands."""


def ranks_table(run: RunSnapshot, loss: str, *, with_others: bool = True) -> Table:
    """Return the table of the ranks.

    Args:
        run: The run.
        loss: The metric in the column of losses.
        with_others: Whether the rows of the group `OTHERS` are needed.
    """
    gpu = has_gpu(run.ranks)
    name, state, *figures = column_titles(loss, gpu=gpu)
    many = len(run.ranks) > MANY
    columns = [Column(title=name if many else "rank"), Column(title=state)]
    columns += [Column(title=title, numeric=True) for title in figures]
    groups = _groups(run, gpu=gpu, with_others=with_others) if many else [_few(run, gpu=gpu)]
    return Table(
        key="ranks", columns=tuple(columns), groups=tuple(groups), label="Nodes and ranks" if many else "Ranks"
    )


def _few(run: RunSnapshot, *, gpu: bool) -> Group:
    """Return all ranks, below their nodes if there are several."""
    rows, nodes = [], by_node(run.ranks)
    for ranks in nodes.values():
        rows += [node_row(ranks, gpu=gpu, several=True)] if len(nodes) > 1 else []
        rows += [rank_row(rank, gpu=gpu) for rank in ranks]
    return Group(key="ranks", rows=tuple(rows))


def _groups(run: RunSnapshot, *, gpu: bool, with_others: bool) -> list[Group]:
    """Return nodes, outliers, and all other ranks behind folds."""
    by_index = by_node(run.ranks)
    nodes = [node_row(ranks, gpu=gpu, several=len(by_index) > 1) for ranks in by_index.values()]
    if len(nodes) > SHOWN_NODES:
        nodes.sort(key=lambda row: ("node dead", "node late", "node").index(row.tone))
    all_outliers = outliers(run.ranks)
    listed = all_outliers[:SHOWN_RANKS]
    numbers = {rank.rank for rank in listed}
    others = [rank for rank in run.ranks if rank.rank not in numbers]
    found = [Group(key="nodes", rows=tuple(nodes[:SHOWN_NODES]))]
    if more := nodes[SHOWN_NODES:]:
        found.append(Group(key="more-nodes", title=f"{len(more)} more nodes", rows=tuple(more), folded=True))
    if listed:
        some = f"The first {len(listed)} of {len(all_outliers):,} outliers"
        title = "Outliers" if len(listed) == len(all_outliers) else some
        found.append(Group(key="outliers", title=title, rows=tuple(rank_row(rank, gpu=gpu) for rank in listed)))
    title = f"{'The other' if listed else 'All'} {len(others):,} ranks"
    rows = tuple(rank_row(rank, gpu=gpu) for rank in others) if with_others else None
    return [*found, Group(key=OTHERS, title=title, rows=rows, folded=True)]


def outliers(ranks: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    """Return failed, silent and late ranks, the worst first."""
    found = [rank for rank in ranks if rank.state == "failed" or rank.late]
    return sorted(found, key=lambda r: (r.state != "failed", not r.silent, -r.behind, -(r.own_seconds or 0.0), r.rank))


def has_gpu(ranks: Iterable[RankSnapshot]) -> bool:
    """Return whether any rank has reported an accelerator."""
    return any(rank.devices for rank in ranks)


def column_titles(loss: str, *, gpu: bool) -> list[str]:
    """Return the titles of the columns."""
    accelerator = ["GPU", "GPU memory"] if gpu else []
    return [
        "node, rank",
        "state",
        "step",
        "behind",
        "steps/s",
        loss or "loss",
        "CPU",
        "memory",
        *accelerator,
        "last message",
    ]


def rank_row(rank: RankSnapshot, *, gpu: bool) -> Row:
    """Return the row of one rank.

    Args:
        rank: The rank.
        gpu: Whether the table has columns for accelerators.
    """
    tone = "dead" if rank.state == "failed" else "late" if rank.late else ""
    badge = ("silent" if rank.silent else "straggler") if rank.late else ""
    last = rank.exit or _ago(rank.silence)
    behind = rank.behind if rank.step is not None else None
    cells = [_count(rank.step), _count(behind), rate(rank.rate), _figure(rank.loss)]
    cells += [use_text(rank.cpu), byte_size(rank.memory)]
    cells += [use_text(rank.gpu), byte_size(rank.gpu_memory)] if gpu else []
    name = Cell(text=str(rank.rank), badge=badge) if badge else str(rank.rank)
    return Row(key=f"r{rank.rank}", tone=tone, cells=(name, Cell(text=rank.state, state=rank.state), *cells, last))


def node_row(ranks: Sequence[RankSnapshot], *, gpu: bool, several: bool) -> Row:
    """Return the summary of one node: its slowest step and rate, mean loss and use, total memory.

    Args:
        ranks: The ranks of the node.
        gpu: Whether the table has columns for accelerators.
        several: Whether there are other nodes.
    """
    failed, late = any(rank.state == "failed" for rank in ranks), [rank.rank for rank in ranks if rank.late]
    step = min((rank.step for rank in ranks if rank.step is not None), default=None)
    slowest = min((rank.rate for rank in ranks if rank.rate is not None), default=None)
    silence = max((rank.silence for rank in ranks if rank.silence is not None), default=None)
    behind = max(rank.behind for rank in ranks) if step is not None else None
    cells = [_count(step), _count(behind), rate(slowest), _figure(_mean(rank.loss for rank in ranks))]
    cells += [use_text(_mean(rank.cpu for rank in ranks)), byte_size(sum_known(rank.memory for rank in ranks))]
    if gpu:
        cells += [use_text(_mean(rank.gpu for rank in ranks)), byte_size(sum_known(rank.gpu_memory for rank in ranks))]
    title = node_title(ranks, several=several)
    name = Cell(text=title, badge=f"{few_names(late).lower()} late") if late else title
    tone = "node dead" if failed else "node late" if late else "node"
    return Row(key=f"n{ranks[0].node}", tone=tone, cells=(name, state_counts(ranks), *cells, _ago(silence)))


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
