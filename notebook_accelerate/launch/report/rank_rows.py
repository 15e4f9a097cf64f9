"""The ranks of a run as rows of a report: one by one where they are few, else by node and in groups that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.node_summary import MANY, by_node, node_name, states, worst_state
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.step_time import PARTS

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import RankInfo, Run
    from notebook_accelerate.telemetry import Store

Rows = list[list[str]]
MAX_NAMES = 72
"""Characters of ranks that a row names."""
SLOWEST = 8
"""Of many ranks, so many are listed by where their step's time went."""


def tables(run: Run) -> list[tuple[str, Rows]]:
    """Return the tables of the ranks, with their captions."""
    infos = run.ranks
    if len(infos) <= MANY:
        return [("Ranks", _each(run, infos))]
    return [("Nodes", _nodes(run, infos)), (f"The {len(infos):,} ranks, those alike together", _alike(run, infos))]


def _each(run: Run, infos: Sequence[RankInfo]) -> Rows:
    several = len({info.node for info in infos}) > 1
    rows = [["rank", *(["node"] if several else []), "pid", "state", "last step", "peak memory", "exit"]]
    return rows + [_row(run, info, several=several) for info in infos]


def _row(run: Run, info: RankInfo, *, several: bool) -> list[str]:
    node = [f"{info.node} {info.host}".rstrip()] if several else []
    peak = memory(run.store.peak_memory.get(info.rank))
    return [str(info.rank), *node, str(info.pid or ""), info.state, _range([_step(info)]), peak, info.exit]


def _nodes(run: Run, infos: Sequence[RankInfo]) -> Rows:
    groups = by_node(infos)
    rows = [["node", "ranks", "states", "slowest step", "peak memory of all"]]
    for members in groups.values():
        peaks = [run.store.peak_memory.get(info.rank) for info in members]
        steps = [step for info in members if (step := _step(info)) is not None]
        rows.append([
            node_name(members, several=len(groups) > 1),
            short_names(info.rank for info in members),
            states(members),
            str(min(steps)) if steps else "",
            memory(sum(peak or 0 for peak in peaks) or None),
        ])  # fmt: skip
    return rows


def _alike(run: Run, infos: Sequence[RankInfo]) -> Rows:
    """Return a row for all ranks that ended, or run, alike, the worst first."""
    groups: dict[tuple[str, str], list[RankInfo]] = {}
    for info in infos:
        groups.setdefault((info.state, info.exit), []).append(info)
    rows = [["ranks", "how many", "state", "last step", "peak memory", "exit"]]
    for (state, left), members in sorted(groups.items(), key=lambda group: worst_state(group[0][0])):
        peaks = [peak for info in members if (peak := run.store.peak_memory.get(info.rank)) is not None]
        held = " to ".join(dict.fromkeys(memory(peak) for peak in (min(peaks), max(peaks)))) if peaks else ""
        names = short_names(info.rank for info in members)
        rows.append([names, f"{len(members):,}", state, _range([_step(info) for info in members]), held, left])
    return rows


def step_time_rows(run: Run) -> Rows:
    """Return, per rank, milliseconds per step and the share of each part; only the head where nothing was measured.

    Of many ranks: all of them together, and those that take longest by themselves.
    """
    store, found = run.store, {info.rank: step_time(run.store, info.rank) for info in run.ranks}
    measured = {rank: (parts, steps) for rank, (parts, steps) in found.items() if steps and sum(parts.values()) > 0}
    rows = [["rank", "ms per step", *PARTS]]
    shown = list(measured)
    if len(measured) > MANY:
        own = {rank: sum(e.own for e in store.step_times(rank)) / measured[rank][1] for rank in measured}
        shown = sorted(measured, key=lambda rank: -own[rank])[:SLOWEST]
        everybody = {part: sum(parts[part] for parts, _ in measured.values()) for part in PARTS}
        rows.append(_times(f"all {len(measured):,}", everybody, sum(steps for _, steps in measured.values())))
    return rows + [_times(str(rank), *measured[rank]) for rank in shown]


def _times(name: str, seconds: dict[str, float], steps: int) -> list[str]:
    total = sum(seconds.values())
    shares = [f"{100 * seconds.get(part, 0.0) / total:.0f} %" for part in PARTS]
    return [name, f"{1000 * total / steps:.1f}", *shares]


def step_time(store: Store, rank: int) -> tuple[dict[str, float], int]:
    """Return the seconds by part of the rank's latest steps, and how many steps they were."""
    events = store.step_times(rank)
    parts = {part: sum(float(event.parts.get(part, 0.0)) for event in events) for part in PARTS}
    return parts, sum(event.steps for event in events)


def short_names(ranks: Iterable[int]) -> str:
    """Return "0–5, 8", or the beginning of it where there are too many."""
    names = rank_names(ranks).partition(" ")[2]
    if len(names) <= MAX_NAMES:
        return names
    return names[: names.rindex(",", 0, MAX_NAMES) + 1] + " …"


def memory(count: int | None) -> str:
    """Return bytes as "312 MiB"; "" for None."""
    return "" if count is None else f"{count / 2**20:,.0f} MiB"


def _step(info: RankInfo) -> int | None:
    return info.last_step if info.last_step is not None and info.last_step >= 0 else None


def _range(steps: Iterable[int | None]) -> str:
    known = [step for step in steps if step is not None]
    return "–".join(dict.fromkeys(str(step) for step in (min(known), max(known)))) if known else ""


__all__ = ["MAX_NAMES", "memory", "short_names", "step_time", "step_time_rows", "tables"]
