"""Texts about a run and its ranks: findings, nodes, states and names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.markup import duration
from notebook_accelerate.launch.report.run_snapshot import stragglers
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.launch.report.run_snapshot import RankSnapshot, RunSnapshot
    from notebook_accelerate.launch.state.run_view import RunView

MAX_RANKS_CHARS = 72
"""Maximum number of characters for the names of a row's ranks."""


# ---- findings about a run, as sentences

MAX_METRICS = 4
"""Maximum number of metrics to name in a sentence."""
MAX_WARNINGS = 5
"""Maximum number of warnings to list. The latest ones are listed."""


def findings(run: RunView, seen: RunSnapshot) -> list[str]:
    """Return sentences about what went wrong in a run, most important first."""
    own = {rank.rank: rank.own_seconds for rank in seen.ranks if rank.own_seconds is not None}
    _, slow = stragglers(own) if len(own) == len(seen.ranks) else (set(), "")
    stalled = stuck(run, steady_time.now())
    return [text for text in (stalled, not_finite(run), slow, left_out(run), *latest_warnings(run)) if text]


def stuck(run: RunView, now: float) -> str:
    """Return how long no rank has made progress, why, and what to change, or "" if at least one makes progress."""
    if (stall := run.stall) is None:
        return ""
    text = f"Stuck for {duration(max(0.0, now - stall.since))}: {stall.cause or 'no rank makes progress'}"
    return f"{text}; {mistake}" if (mistake := _mistake(run)) else text


def _mistake(run: RunView) -> str:
    """Return the mistake that caused the current stall, or "" if it is unknown."""
    found = internals(run).journal.state.diagnoses
    return found[-1].mistake if run.stall is not None and found else ""


def latest_warnings(run: RunView) -> Sequence[str]:
    """Return the latest ``MAX_WARNINGS`` warnings of a run, except the one that `stuck` includes."""
    included = _mistake(run)
    return [text for text in run.warnings if text != included][-MAX_WARNINGS:]


def left_out(run: RunView) -> str:
    """Return a sentence about metrics and lines that were dropped, or "" if none were."""
    lost = {rank: count for rank, count in list(internals(run).store.dropped.items()) if count}
    if not lost:
        return ""
    text = f"{sum(lost.values()):,} metrics and lines of {rank_names(sorted(lost))} are missing"
    return f"{text}: there were too many of them, or they were not numbers. The newest were kept."


def not_finite(run: RunView) -> str:
    """Return a sentence that names the metrics that are NaN or infinite, and since which step, or "" if none are."""
    groups: dict[tuple[str, int], dict[str, list[int]]] = {}
    for (name, rank), (step, value) in list(internals(run).store.not_finite.items()):
        kind = "NaN" if math.isnan(value) else "Infinite"
        groups.setdefault((kind, step), {}).setdefault(name, []).append(rank)
    if not groups:
        return ""
    kind, step = min(groups, key=lambda group: group[1])
    found = groups[kind, step]
    ranks = sorted({rank for each in found.values() for rank in each})
    since = f" since step {step:,}" if step >= 0 else ""
    where = f" on {rank_names(ranks)}" if len(ranks) < len(run.ranks) else " on all ranks" if len(ranks) > 1 else ""
    return f"{kind}{since}{where}: {_few(sorted(found))}"


def _few(names: Sequence[str]) -> str:
    more = len(names) - MAX_METRICS
    return ", ".join(names[:MAX_METRICS]) + (f" and {more} more" if more > 0 else "")


# ---- ranks by node, and their states in a few words

MANY = 16
"""If there are more ranks than this, views show a summary of each node and the outliers, and fold all other ranks."""
_STATES = ("failed", "stopped", "starting", "running", "succeeded")
"""The states of ranks, in the order that summaries use."""


def by_node(ranks: Iterable[RankSnapshot]) -> dict[int, list[RankSnapshot]]:
    """Return the ranks of each node, by node index."""
    found: dict[int, list[RankSnapshot]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return dict(sorted(found.items()))


def node_title(ranks: Sequence[RankSnapshot], *, several: bool) -> str:
    """Return the name of a node, such as "node 1 · worker-7".

    Args:
        ranks: The ranks of the node.
        several: Whether the run has other nodes.
    """
    host = ranks[0].host or ("this machine" if several else "")
    number = f"node {ranks[0].node}" if several else "all ranks"
    return f"{number} · {host}" if host else number


def state_counts(ranks: Iterable[RankSnapshot]) -> str:
    """Return how many ranks are in each state, worst first, such as "1 failed, 7 running"."""
    counts = Counter(rank.state for rank in ranks)
    return ", ".join(f"{counts[state]:,} {state}" for state in sorted(counts, key=lambda s: (severity(s), s)))


def severity(state: str) -> int:
    """Return a sort key for a state. The worst state has 0."""
    return _STATES.index(state) if state in _STATES else len(_STATES)


def short_names(ranks: Iterable[int]) -> str:
    """Return the numbers of ranks, such as "0–5, 8", cut at a comma if longer than ``MAX_RANKS_CHARS``."""
    names = rank_names(ranks).partition(" ")[2]
    if len(names) <= MAX_RANKS_CHARS:
        return names
    return names[: names.rindex(",", 0, MAX_RANKS_CHARS) + 1] + " …"


def sum_known(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values, or None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
