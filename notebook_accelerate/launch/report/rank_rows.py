"""The ranks of a run as rows of a report: one per rank, or with many ranks one per node and per state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from notebook_accelerate.launch.report.tables import Rows, byte_size
from notebook_accelerate.telemetry.rank_devices import rank_names
from notebook_accelerate.telemetry.step_time import PARTS

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.run_state import RankInfo, RunView
    from notebook_accelerate.telemetry import Store


MAX_NAMES = 72
"""Characters of the ranks in one row."""
SLOWEST = 8
"""Of many ranks, the step times of this many are listed."""


def tables(run: RunView) -> list[tuple[str, Rows]]:
    """Return the tables of the ranks, with their captions."""
    infos = run.ranks
    if len(infos) <= MANY:
        return [("Ranks", _rank_rows(run, infos))]
    return [("Nodes", _node_rows(run, infos)), (f"{len(infos):,} ranks, by state", _state_rows(run, infos))]


def _rank_rows(run: RunView, infos: Sequence[RankInfo]) -> Rows:
    several = len({info.node for info in infos}) > 1
    rows = [["rank", *(["node"] if several else []), "pid", "state", "last step", "peak memory", "exit"]]
    return rows + [_rank_row(run, info, several=several) for info in infos]


def _rank_row(run: RunView, info: RankInfo, *, several: bool) -> list[str]:
    node = [f"{info.node} {info.host}".rstrip()] if several else []
    peak = byte_size(run.store.peak_memory.get(info.rank), "")
    return [str(info.rank), *node, str(info.pid or ""), info.state, _range([_step(info)]), peak, info.exit]


def _node_rows(run: RunView, infos: Sequence[RankInfo]) -> Rows:
    groups = by_node(infos)
    rows = [["node", "ranks", "states", "slowest step", "sum of peak memory"]]
    for members in groups.values():
        peaks = [run.store.peak_memory.get(info.rank) for info in members]
        steps = [step for info in members if (step := _step(info)) is not None]
        rows.append([
            node_name(members, several=len(groups) > 1),
            short_names(info.rank for info in members),
            state_counts(members),
            str(min(steps)) if steps else "",
            byte_size(sum(peak or 0 for peak in peaks) or None, ""),
        ])  # fmt: skip
    return rows


def _state_rows(run: RunView, infos: Sequence[RankInfo]) -> Rows:
    """Return a row for each group of ranks with the same state and exit, the worst first."""
    groups: dict[tuple[str, str], list[RankInfo]] = {}
    for info in infos:
        groups.setdefault((info.state, info.exit), []).append(info)
    rows = [["ranks", "count", "state", "last step", "peak memory", "exit"]]
    for (state, exit_text), members in sorted(groups.items(), key=lambda group: severity(group[0][0])):
        peaks = [peak for info in members if (peak := run.store.peak_memory.get(info.rank)) is not None]
        memory = " to ".join(dict.fromkeys(byte_size(peak) for peak in (min(peaks), max(peaks)))) if peaks else ""
        names = short_names(info.rank for info in members)
        rows.append([names, f"{len(members):,}", state, _range(map(_step, members)), memory, exit_text])
    return rows


def step_time_rows(run: RunView) -> Rows:
    """Return, per rank, milliseconds per step and the share of each part; only the head before the first event.

    Of many ranks: the mean of all, and the ranks whose own work takes longest.
    """
    store, found = run.store, {info.rank: step_time(run.store, info.rank) for info in run.ranks}
    measured = {rank: (parts, steps) for rank, (parts, steps) in found.items() if steps and sum(parts.values()) > 0}
    rows = [["rank", "ms per step", *PARTS]]
    shown = list(measured)
    if len(measured) > MANY:
        own = {rank: own_seconds(store, rank) / measured[rank][1] for rank in measured}
        shown = sorted(measured, key=lambda rank: -own[rank])[:SLOWEST]
        together = {part: sum(parts[part] for parts, _ in measured.values()) for part in PARTS}
        rows.append(_step_time_row(f"all {len(measured):,}", together, sum(steps for _, steps in measured.values())))
    return rows + [_step_time_row(str(rank), *measured[rank]) for rank in shown]


def _step_time_row(name: str, seconds: dict[str, float], steps: int) -> list[str]:
    total = sum(seconds.values())
    shares = [f"{100 * seconds.get(part, 0.0) / total:.0f} %" for part in PARTS]
    return [name, f"{1000 * total / steps:.1f}", *shares]


def step_time(store: Store, rank: int) -> tuple[dict[str, float], int]:
    """Return the seconds by part of the rank's latest steps, and the number of those steps."""
    events = store.step_times(rank)
    measured = [event.parts for event in events]
    parts = {part: sum([seconds.get(part, 0.0) for seconds in measured]) for part in PARTS}
    return parts, sum([event.steps for event in events])


def own_seconds(store: Store, rank: int) -> float:
    """Return the seconds of the rank's latest steps in which it cannot have waited for other ranks."""
    return sum(event.own for event in store.step_times(rank))


def short_names(ranks: Iterable[int]) -> str:
    """Return "0–5, 8", cut after ``MAX_NAMES`` characters."""
    names = rank_names(ranks).partition(" ")[2]
    if len(names) <= MAX_NAMES:
        return names
    return names[: names.rindex(",", 0, MAX_NAMES) + 1] + " …"


def _step(info: RankInfo) -> int | None:
    return info.last_step if info.last_step is not None and info.last_step >= 0 else None


def _range(steps: Iterable[int | None]) -> str:
    known = [step for step in steps if step is not None]
    return "–".join(dict.fromkeys(str(step) for step in (min(known), max(known)))) if known else ""


# Ranks grouped by node, and their states in a few words.

MANY = 16
"""Of more ranks than this, views show a summary per node and the outliers; the other ranks are folded."""
SHOWN_NODES = 16
SHOWN_RANKS = 12
_STATES = ("failed", "stopped", "starting", "running", "succeeded")
"""In the order in which a summary lists them."""


class RankOnNode(Protocol):
    """The attributes of a rank that grouping reads."""

    @property
    def rank(self) -> int:
        """Global index."""

    @property
    def state(self) -> str:
        """Its state, such as running."""

    @property
    def node(self) -> int:
        """Index of its machine."""

    @property
    def host(self) -> str:
        """Name of that machine; "" for this one."""


Rank = TypeVar("Rank", bound=RankOnNode)


def by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """Return the ranks of each node, by its index."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return dict(sorted(found.items()))


def node_name(ranks: Sequence[RankOnNode], *, several: bool) -> str:
    """Return the name of a node, as "node 1 · worker-7".

    Args:
        ranks: The ranks of the node.
        several: Whether there are other nodes.
    """
    host = ranks[0].host or ("this machine" if several else "")
    number = f"node {ranks[0].node}" if several else "all ranks"
    return f"{number} · {host}" if host else number


def state_counts(ranks: Iterable[RankOnNode]) -> str:
    """Return the number of ranks in each state, the worst first, as "1 failed, 7 running"."""
    counts = Counter(rank.state for rank in ranks)
    return ", ".join(f"{counts[state]:,} {state}" for state in sorted(counts, key=lambda s: (severity(s), s)))


def severity(state: str) -> int:
    """Return a sort key for states: the worst is 0."""
    return _STATES.index(state) if state in _STATES else len(_STATES)
