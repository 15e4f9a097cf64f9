"""The table of ranks as rows of words: ranks one by one where they are few, else nodes and those that stand out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report import svg_curves
from notebook_accelerate.launch.report.node_summary import MANY, SHOWN_NODES, SHOWN_RANKS, by_node, node_name, states
from notebook_accelerate.widgets.run_summary import few_names, size

if TYPE_CHECKING:
    from notebook_accelerate.widgets.run_summary import RankNow, RunSnapshot

QUIET_SECONDS = 2.0
"""A rank that was heard of less long ago was heard of just now: a number would only flicker."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        key: Names it from one moment to the next.
        name: What its first cell says.
        kind: "node", "late", "dead" or "".
        badge: What stands beside the name: "straggler", "silent", "".
        state: A rank's state; of a node, its ranks' states in words.
        cells: What follows, as text.
    """

    key: str
    name: str
    kind: str
    badge: str
    state: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Some rows under a heading.

    Attributes:
        key: Names it from one moment to the next.
        title: The heading; "" without one.
        rows: The rows; None where nobody wanted them now.
        folded: Whether they are behind a fold.
    """

    key: str
    title: str
    rows: list[Row] | None
    folded: bool = False


def has_gpu(ranks: Iterable[RankNow]) -> bool:
    """Whether any rank has said something of an accelerator."""
    return any(rank.gpu is not None or rank.gpu_memory is not None for rank in ranks)


def head(loss: str, *, gpu: bool) -> list[str]:
    """Return the titles of the columns behind name and state."""
    accelerator = ["GPU", "GPU memory"] if gpu else []
    return ["step", "behind", "steps/s", loss or "loss", "CPU", "memory", *accelerator, "last heard"]


def rank_row(rank: RankNow, *, gpu: bool) -> Row:
    """Return the row of one rank."""
    kind = "dead" if rank.state == "failed" else "late" if rank.late else ""
    badge = ("silent" if rank.silent else "straggler") if rank.late else ""
    cells = [
        "–" if rank.step is None else f"{rank.step:,}",
        f"{rank.behind:,}" if rank.behind else "0" if rank.step is not None else "–",
        rate(rank.rate),
        "–" if rank.loss is None else svg_curves.number(rank.loss),
        percent(rank.cpu),
        size(rank.memory),
    ]
    cells += [percent(rank.gpu), size(rank.gpu_memory)] if gpu else []
    cells.append(rank.exit or ("–" if rank.silence is None else f"{rank.silence:.0f} s ago"))
    return Row(f"r{rank.rank}", str(rank.rank), kind, badge, rank.state, tuple(cells))


def node_row(ranks: Sequence[RankNow], *, gpu: bool, several: bool) -> Row:
    """Return the summary of one node: its slowest step and rate, mean loss and use, memory in all.

    Args:
        ranks: The ranks of the node.
        gpu: Whether the table has columns for accelerators.
        several: Whether there are other nodes.
    """
    kind = "dead" if any(r.state == "failed" for r in ranks) else "late" if any(r.late for r in ranks) else ""
    steps = [rank.step for rank in ranks if rank.step is not None]
    silences = [rank.silence for rank in ranks if rank.silence is not None]
    late = [rank.rank for rank in ranks if rank.late]
    cells = [
        f"{min(steps):,}" if steps else "–",
        f"{max(rank.behind for rank in ranks):,}" if steps else "–",
        rate(min((rank.rate for rank in ranks if rank.rate is not None), default=None)),
        _mean_text([rank.loss for rank in ranks]),
        percent(_mean([rank.cpu for rank in ranks])),
        size(_total([rank.memory for rank in ranks])),
    ]
    if gpu:
        cells += [percent(_mean([rank.gpu for rank in ranks])), size(_total([rank.gpu_memory for rank in ranks]))]
    cells.append("–" if not silences else _heard(max(silences)))
    badge = f"{few_names(late).lower()} late" if late else ""
    return Row(f"n{ranks[0].node}", node_name(ranks, several=several), kind, badge, states(ranks), tuple(cells))


def parts(now: RunSnapshot, wanted: Callable[[str], bool] = lambda _: True) -> list[Part]:
    """Return the parts of the table of many ranks: nodes, ranks that stand out, and all others behind folds.

    Args:
        now: The run.
        wanted: Whether the rows of a part are wanted: "nodes", "more-nodes", "outstanding" or "others".
    """
    gpu, groups = has_gpu(now.ranks), by_node(now.ranks)
    nodes = [node_row(ranks, gpu=gpu, several=len(groups) > 1) for ranks in groups.values()]
    if len(nodes) > SHOWN_NODES:
        nodes.sort(key=lambda row: ("dead", "late", "").index(row.kind))
    outstanding = standing_out(now.ranks)
    listed = outstanding[:SHOWN_RANKS]
    some = {rank.rank for rank in listed}
    others = [rank for rank in now.ranks if rank.rank not in some]
    found = [Part("nodes", "", nodes[:SHOWN_NODES])]
    if nodes[SHOWN_NODES:]:
        found.append(Part("more-nodes", f"{len(nodes) - SHOWN_NODES} more nodes", nodes[SHOWN_NODES:], folded=True))
    if listed:
        title = "Ranks that stand out" if len(listed) == len(outstanding) else (
            f"The first {len(listed)} of {len(outstanding):,} ranks that stand out")  # fmt: skip
        found.append(Part("outstanding", title, [_quiet(rank, gpu=gpu) for rank in listed]))
    title = f"{'The other' if some else 'All'} {len(others):,} ranks"
    rows = [_quiet(rank, gpu=gpu) for rank in others] if wanted("others") else None
    found.append(Part("others", title, rows, folded=True))
    return found


def standing_out(ranks: Iterable[RankNow]) -> list[RankNow]:
    """Return failed, silent and late ranks, the worst first."""
    found = [rank for rank in ranks if rank.state == "failed" or rank.late]
    return sorted(found, key=lambda r: (r.state != "failed", not r.silent, -r.behind, -(r.own_seconds or 0.0), r.rank))


def many(now: RunSnapshot) -> bool:
    """Whether there are more ranks than a table shows one by one."""
    return len(now.ranks) > MANY


def _quiet(rank: RankNow, *, gpu: bool) -> Row:
    """Return a rank's row without numbers that flicker: of hundreds of ranks only what has changed is sent."""
    row = rank_row(rank, gpu=gpu)
    heard = rank.exit or ("–" if rank.silence is None else _heard(rank.silence))
    return Row(row.key, row.name, row.kind, row.badge, row.state, (*row.cells[:-1], heard))


def _heard(silence: float) -> str:
    return "just now" if silence < QUIET_SECONDS else f"{silence:.0f} s ago"


def rate(value: float | None) -> str:
    """Return steps per second."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Return percent as a whole number."""
    return "–" if value is None else f"{value:.0f} %"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean_text(values: Iterable[float | None]) -> str:
    mean = _mean(values)
    return "–" if mean is None else svg_curves.number(mean)


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


__all__ = ["Part", "Row", "has_gpu", "head", "many", "node_row", "parts", "percent", "rank_row", "rate", "standing_out"]
