"""The ranks and devices of a run as rows of tables, and sentences about what the run has shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from notebook_accelerate.launch.report.document import Rows, Table, table_of
from notebook_accelerate.launch.report.markup import byte_size
from notebook_accelerate.telemetry.rank_devices import rank_names
from notebook_accelerate.telemetry.step_time import PARTS

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.run_state import RankInfo, RunView
    from notebook_accelerate.telemetry import Store
    from notebook_accelerate.telemetry.rank_devices import RankDevice

MAX_RANKS_CHARS = 72
"""Characters of the ranks in one row."""
SLOWEST = 8
"""Of many ranks, the step times of this many are listed."""


def rank_tables(run: RunView) -> list[Table]:
    """Return the tables of the ranks."""
    infos = run.ranks
    if len(infos) <= MANY:
        return [table_of("ranks", _rank_rows(run, infos), caption="Ranks")]
    by_state = f"{len(infos):,} ranks, by state"
    return [
        table_of("nodes", _node_rows(run, infos), caption="Nodes"),
        table_of("ranks", _state_rows(run, infos), caption=by_state),
    ]


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
            node_title(members, several=len(groups) > 1),
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


def _step(info: RankInfo) -> int | None:
    return info.last_step if info.last_step is not None and info.last_step >= 0 else None


def _range(steps: Iterable[int | None]) -> str:
    known = [step for step in steps if step is not None]
    return "–".join(dict.fromkeys(str(step) for step in (min(known), max(known)))) if known else ""


# ---- step times


def step_time_table(run: RunView) -> Table:
    """Return, per rank, milliseconds per step and the share of each part.

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
    rows += [_step_time_row(str(rank), *measured[rank]) for rank in shown]
    return table_of("times", rows, caption="Step time")


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


# ---- devices

IN_USE = ("in use on the device", "in use on the devices")
DEVICE_HEAD = ("device", "model", "use", "allocated", "reserved", "peak", IN_USE[0], "uuid")
"""``allocated``, ``reserved`` and ``peak`` are the rank's; ``use`` and ``in use`` count all processes."""
UUID_CHARS = 8
"""Characters of an identity that tell the devices of a machine apart."""
_ACTIVE = ("starting", "running")


def device_table(
    ranks: Sequence[RankOnNode], devices: Mapping[int, Sequence[RankDevice]], caption: str = "Devices"
) -> Table:
    """Return a row per rank and device, or with many ranks one per node; see `_device_rows`.

    Args:
        ranks: The ranks.
        devices: The devices of each rank.
        caption: The caption of the table.
    """
    return table_of("devices", _device_rows(ranks, devices), caption=caption)


def _device_rows(ranks: Sequence[RankOnNode], devices: Mapping[int, Sequence[RankDevice]]) -> Rows:
    """Return a row per rank and device, or with many ranks one per node, below their titles; only the titles without.

    Columns of which nothing is known are left out, such as those of the present after the run.

    Args:
        ranks: The ranks.
        devices: The devices of each rank.
    """
    if len(ranks) > MANY:
        found = _device_node_rows(ranks, devices)
    else:
        found = [["rank", *DEVICE_HEAD]]
        found += [_device_row(rank, device) for rank in ranks for device in devices.get(rank.rank, ())]
    columns = [column for column in zip(*found, strict=True) if set(column[1:]) != {"–"}]
    return [list(row) for row in zip(*columns, strict=True)]


def _device_row(rank: RankOnNode, device: RankDevice) -> list[str]:
    now = rank.state in _ACTIVE
    sizes = [byte_size(size if now else None) for size in (device.allocated, device.reserved)]
    percent, used = use_text(device.percent if now else None), byte_size(device.used if now else None)
    uuid = device.uuid[:UUID_CHARS] or "–"
    return [str(rank.rank), device.device, _model(device), percent, *sizes, byte_size(device.peak), used, uuid]


def _device_node_rows(ranks: Sequence[RankOnNode], devices: Mapping[int, Sequence[RankDevice]]) -> Rows:
    groups = by_node(ranks)
    titles = ["node", "devices", "model", "mean use", "allocated", "reserved", "highest peak", IN_USE[1]]
    found: Rows = [titles]
    for members in groups.values():
        held = [device for rank in members for device in devices.get(rank.rank, ())]
        if not held:
            continue
        live = [device for rank in members if rank.state in _ACTIVE for device in devices.get(rank.rank, ())]
        distinct = list({device.uuid or index: device for index, device in enumerate(live)}.values())
        percents = [device.percent for device in distinct if device.percent is not None]
        found.append([
            node_title(members, several=len(groups) > 1),
            str(len({device.uuid or index for index, device in enumerate(held)})),
            ", ".join(dict.fromkeys(map(_model, held))),
            use_text(sum(percents) / len(percents) if percents else None),
            byte_size(sum_known(device.allocated for device in live)),
            byte_size(sum_known(device.reserved for device in live)),
            byte_size(max(device.peak for device in held)),
            byte_size(sum_known(device.used for device in distinct)),
        ])  # fmt: skip
    return found


def use_text(percent: float | None) -> str:
    """Return a utilisation in percent as text."""
    return "–" if percent is None else f"{percent:.0f} %"


def _model(device: RankDevice) -> str:
    return " · ".join(filter(None, (device.name, byte_size(device.total, "")))) or "–"


# ---- what a run has shown, in sentences

SLOW = 1.25
"""A rank whose own work takes this many times the others' median is a straggler."""
MAX_NAMED = 60
"""Characters of the ranks in one sentence."""
MAX_METRICS = 4
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


def _few(names: Sequence[str]) -> str:
    more = len(names) - MAX_METRICS
    return ", ".join(names[:MAX_METRICS]) + (f" and {more} more" if more > 0 else "")


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:,.0f} ms"


# ---- ranks by node, and their states in a few words

MANY = 16
"""Of more ranks than this, views show a summary per node and the outliers; the other ranks are folded."""
SHOWN_NODES = 16
SHOWN_RANKS = 12
_STATES = ("failed", "stopped", "starting", "running", "succeeded")
"""In the order in which a summary lists them."""


class RankOnNode(Protocol):
    """The attributes of a rank that grouping reads."""

    @property
    def rank(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def node(self) -> int: ...
    @property
    def host(self) -> str: ...


Rank = TypeVar("Rank", bound=RankOnNode)


def by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """Return the ranks of each node, by its index."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return dict(sorted(found.items()))


def node_title(ranks: Sequence[RankOnNode], *, several: bool) -> str:
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


def short_names(ranks: Iterable[int]) -> str:
    """Return "0–5, 8", cut after ``MAX_NAMES`` characters."""
    names = rank_names(ranks).partition(" ")[2]
    if len(names) <= MAX_RANKS_CHARS:
        return names
    return names[: names.rindex(",", 0, MAX_RANKS_CHARS) + 1] + " …"


def few_names(ranks: Iterable[int]) -> str:
    """Return "Ranks 0–5, 8", or a shortened list such as "Ranks 3, 9, 17, 31 and 40 more"."""
    ordered = sorted(ranks)
    name = rank_names(ordered).capitalize()
    if len(name) <= MAX_NAMED:
        return name
    shown = ordered[: MAX_NAMED // 10]
    return f"{rank_names(shown).capitalize()} and {len(ordered) - len(shown)} more"


def sum_known(values: Iterable[int | None]) -> int | None:
    """Return the sum of the values that are known; None if none of them is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
