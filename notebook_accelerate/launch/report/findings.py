"""Sentences about what a run has shown: numbers that are not finite, ranks that slow the others down, warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.rank_rows import own_seconds, step_time
from notebook_accelerate.telemetry.rank_devices import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.run_state import RunView

SLOW = 1.25
"""A rank whose own work takes this many times the others' median is a straggler."""
MAX_NAMED = 60
"""Characters of the ranks in one sentence."""
MAX_NAMES = 4
"""Metrics that are named in one sentence."""
MAX_WARNINGS = 5
"""Warnings of a run that are listed: the last ones."""


def findings(run: RunView) -> list[str]:
    """Return the findings of a run, the most important first."""
    own = {}
    for info in run.ranks:
        _, counted = step_time(run.store, info.rank)
        if counted:
            own[info.rank] = own_seconds(run.store, info.rank) / counted
    _, slow = stragglers(own) if len(own) == len(run.ranks) else (set(), "")
    return [text for text in (not_finite(run), slow, left_out(run), *latest_warnings(run)) if text]


def latest_warnings(run: RunView) -> Sequence[str]:
    """Return the last warnings of a run."""
    return run.warnings[-MAX_WARNINGS:]


def left_out(run: RunView) -> str:
    """Return a sentence about the metrics and lines that the run has not kept; "" if it has all of them."""
    lost = {rank: count for rank, count in list(run.store.dropped.items()) if count}
    if not lost:
        return ""
    text = f"{sum(lost.values()):,} metrics and lines of {rank_names(sorted(lost))} are missing"
    return f"{text}: there were too many of them, or they were not numbers. The newest were kept."


def not_finite(run: RunView) -> str:
    """Return a sentence about the metrics that are NaN or infinite now, and the step at which the first became so."""
    groups: dict[tuple[str, int], dict[str, list[int]]] = {}
    for (name, rank), (step, value) in list(run.store.not_finite.items()):
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


def stragglers(own: Mapping[int, float]) -> tuple[set[int], str]:
    """Return the ranks whose own work takes longer than the others', and a sentence with the evidence.

    Args:
        own: By rank, the seconds per step in which it cannot have waited for others.
    """
    if len(own) < 2:
        return set(), ""
    worst = max(own, key=lambda rank: own[rank])
    others = sorted(seconds for rank, seconds in own.items() if rank != worst)
    usual = others[len(others) // 2]
    if own[worst] <= SLOW * usual or own[worst] - usual <= 1e-3:
        return set(), ""
    mine, theirs = _milliseconds(own[worst]), _milliseconds(usual)
    found = {rank for rank, seconds in own.items() if seconds > SLOW * usual and seconds - usual > 1e-3}
    if len(found) == 1:
        return found, f"Rank {worst} is a straggler: {mine} of its own work per step, {theirs} on the other ranks."
    text = f"{few_names(found)} are stragglers: up to {mine} of their own work per step, {theirs} on the other ranks."
    return found, text


def few_names(ranks: Iterable[int]) -> str:
    """Return "Ranks 0–5, 8", or a shortened list such as "Ranks 3, 9, 17, 31 and 40 more"."""
    ordered = sorted(ranks)
    name = rank_names(ordered).capitalize()
    if len(name) <= MAX_NAMED:
        return name
    shown = ordered[: MAX_NAMED // 10]
    return f"{rank_names(shown).capitalize()} and {len(ordered) - len(shown)} more"


def _few(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:,.0f} ms"
