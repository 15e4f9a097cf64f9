"""Tables of a run's ranks, of their devices, and of their step times.

If there are many ranks, the tables list nodes, outliers and sums, and the other ranks are folded or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.launch.report.document import Cell, Column, Drawing, Group, Row, Rows, Table, Text, table_of
from notebook_accelerate.launch.report.markup import Markup, element, join, number
from notebook_accelerate.launch.report.rank_rows import (
    MANY,
    by_node,
    node_title,
    severity,
    short_names,
    state_counts,
    sum_known,
)
from notebook_accelerate.launch.report.rendering import badge, swatch
from notebook_accelerate.launch.report.run_snapshot import few_names
from notebook_accelerate.telemetry.step_time import PARTS

if TYPE_CHECKING:
    from notebook_accelerate.launch.report.run_snapshot import RankSnapshot
    from notebook_accelerate.telemetry.rank_devices import RankDevice

SHOWN_NODES = 16
SHOWN_RANKS = 12
OTHERS = "others"
"""The key of the group for the ranks that are not outliers. There may be thousands of them."""
JUST_NOW_SECONDS = 2.0
"""If the last message is less than this many seconds old, "just now" is shown, because a number would flicker."""

Ranks = Sequence["RankSnapshot"]


# ---- the columns of ranks


@dataclass(frozen=True)
class RankColumn:
    """A column of a table of ranks.

    Attributes:
        title: The heading of the column.
        cell: A function that returns the cell for a rank, or one cell for several ranks.
        numeric: Whether the column contains numbers.
    """

    title: str
    cell: Callable[[Ranks], str | Cell]
    numeric: bool = True


def _known(ranks: Ranks, name: str) -> list[Any]:
    return [value for rank in ranks if (value := getattr(rank, name)) is not None]


def _mean(ranks: Ranks, name: str) -> float | None:
    known = _known(ranks, name)
    return sum(known) / len(known) if known else None


def _range(values: Sequence[int], text: Callable[[int], str], between: str) -> str:
    return between.join(dict.fromkeys(map(text, (min(values), max(values))))) if values else "–"


def _state(ranks: Ranks) -> str | Cell:
    return state_counts(ranks) if len(ranks) > 1 else Cell(text=ranks[0].state, state=ranks[0].state)


def _behind(ranks: Ranks) -> str:
    return f"{max(rank.behind for rank in ranks):,}" if _known(ranks, "step") else "–"


def _last_message(ranks: Ranks) -> str:
    """Return how long ago the rank that has been silent the longest sent a message, or how a single rank ended."""
    if len(ranks) == 1 and ranks[0].exit:
        return ranks[0].exit
    seconds = max(_known(ranks, "silence"), default=None)
    if seconds is None:
        return "–"
    return "just now" if seconds < JUST_NOW_SECONDS else f"{seconds:.0f} s ago"


def _exit(ranks: Ranks) -> str:
    exits = {rank.exit for rank in ranks}
    return exits.pop() if len(exits) == 1 else ""


COLUMNS: Mapping[str, RankColumn] = {
    "ranks": RankColumn("ranks", lambda ranks: short_names(rank.rank for rank in ranks), numeric=False),
    "pid": RankColumn("pid", lambda ranks: str(ranks[0].pid or "") if len(ranks) == 1 else ""),
    "state": RankColumn("state", _state, numeric=False),
    "step": RankColumn("step", lambda ranks: _count(min(_known(ranks, "step"), default=None))),
    "steps": RankColumn("last step", lambda ranks: _range(_known(ranks, "step"), str, "–")),
    "behind": RankColumn("behind", _behind),
    "rate": RankColumn("steps/s", lambda ranks: rate(min(_known(ranks, "rate"), default=None))),
    "loss": RankColumn("loss", lambda ranks: _figure(_mean(ranks, "loss"))),
    "cpu": RankColumn("CPU", lambda ranks: use_text(_mean(ranks, "cpu"))),
    "memory": RankColumn("memory", lambda ranks: size_text(sum_known(_known(ranks, "memory")))),
    "gpu": RankColumn("GPU", lambda ranks: use_text(_mean(ranks, "gpu"))),
    "gpu memory": RankColumn("GPU memory", lambda ranks: size_text(sum_known(_known(ranks, "gpu_memory")))),
    "peak": RankColumn("peak memory", lambda ranks: _range(_known(ranks, "peak"), size_text, " to ")),
    "peaks": RankColumn("sum of peak memory", lambda ranks: size_text(sum_known(_known(ranks, "peak")))),
    "last": RankColumn("last message", _last_message),
    "exit": RankColumn("exit", _exit, numeric=False),
}
"""All columns, by name. Each view selects some of them."""
LIVE = ("state", "step", "behind", "rate", "loss", "cpu", "memory", "gpu", "gpu memory", "last")
ENDED = ("pid", "state", "steps", "peak", "exit")
ENDED_MANY = ("ranks", "state", "steps", "peak", "peaks", "exit")


def has_gpu(ranks: Iterable[RankSnapshot]) -> bool:
    """Return whether any rank has reported an accelerator."""
    return any(rank.devices for rank in ranks)


def use_text(percent: float | None) -> str:
    """Return a utilisation in percent as text."""
    return "–" if percent is None else f"{percent:.0f} %"


def rate(value: float | None) -> str:
    """Return a number of steps per second as text."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _figure(value: float | None) -> str:
    return "–" if value is None else number(value)


# ---- the tables of ranks


def live_ranks(ranks: Ranks, loss: str, *, with_others: bool = True) -> Table:
    """Return a table of the ranks with their current figures.

    Args:
        ranks: All ranks of the run.
        loss: The name of the metric to show in the column for the loss, or "".
        with_others: Whether to include the rows of the group `OTHERS`.
    """
    names = LIVE if has_gpu(ranks) else [name for name in LIVE if not name.startswith("gpu")]
    columns = [replace(COLUMNS[name], title=loss) if name == "loss" and loss else COLUMNS[name] for name in names]
    if len(ranks) <= MANY:
        return _table("rank", columns, [_all_ranks(columns, ranks)], label="Ranks")
    groups = _outliers_first(columns, ranks, with_others=with_others)
    return _table("node, rank", columns, groups, label="Nodes and ranks")


def ended_ranks(ranks: Ranks) -> Table:
    """Return a table of the ranks with their final figures. If there are many, summarise them by node and state."""
    ranks = [replace(rank, late=False) for rank in ranks]  # The report names late ranks in a sentence instead.
    if len(ranks) <= MANY:
        return rank_table(ranks, ENDED, caption="Ranks")
    columns = [COLUMNS[name] for name in ENDED_MANY]
    return _table("", columns, _by_state(columns, ranks), caption="Ranks")


def rank_table(ranks: Ranks, names: Sequence[str], caption: str) -> Table:
    """Return a table with a row for each rank.

    Args:
        ranks: All ranks of the run.
        names: The names of the table's columns in `COLUMNS`.
        caption: The text above the table.
    """
    columns = [COLUMNS[name] for name in names]
    return _table("rank", columns, [_all_ranks(columns, ranks)], caption=caption)


def _table(
    name: str, columns: Sequence[RankColumn], groups: Sequence[Group], *, caption: str = "", label: str = ""
) -> Table:
    titles = [Column(title=name), *(Column(title=column.title, numeric=column.numeric) for column in columns)]
    return Table(key="ranks", columns=tuple(titles), groups=tuple(groups), caption=caption, label=label)


def _all_ranks(columns: Sequence[RankColumn], ranks: Ranks) -> Group:
    """Return a group with a row for each rank. If there are several nodes, each has a row above its ranks."""
    rows, nodes = [], by_node(ranks)
    for members in nodes.values():
        rows += [_node_row(columns, members, several=True)] if len(nodes) > 1 else []
        rows += [_rank_row(columns, rank) for rank in members]
    return Group(key="ranks", rows=tuple(rows))


def _node_rows(columns: Sequence[RankColumn], ranks: Ranks) -> list[Row]:
    nodes = by_node(ranks)
    return [_node_row(columns, members, several=len(nodes) > 1) for members in nodes.values()]


def _outliers_first(columns: Sequence[RankColumn], ranks: Ranks, *, with_others: bool) -> list[Group]:
    """Return groups with the nodes and the outliers, and a folded one with the other ranks."""
    nodes = _node_rows(columns, ranks)
    if len(nodes) > SHOWN_NODES:
        nodes.sort(key=lambda row: ("node dead", "node late", "node").index(row.tone))
    all_outliers = outliers(ranks)
    listed = all_outliers[:SHOWN_RANKS]
    numbers = {rank.rank for rank in listed}
    others = [rank for rank in ranks if rank.rank not in numbers]
    found = [Group(key="nodes", rows=tuple(nodes[:SHOWN_NODES]))]
    if more := nodes[SHOWN_NODES:]:
        found.append(Group(key="more-nodes", title=f"{len(more)} more nodes", rows=tuple(more), folded=True))
    if listed:
        some = f"The first {len(listed)} of {len(all_outliers):,} outliers"
        title = "Outliers" if len(listed) == len(all_outliers) else some
        found.append(Group(key="outliers", title=title, rows=tuple(_rank_row(columns, rank) for rank in listed)))
    title = f"{'The other' if listed else 'All'} {len(others):,} ranks"
    rows = tuple(_rank_row(columns, rank) for rank in others) if with_others else None
    return [*found, Group(key=OTHERS, title=title, rows=rows, folded=True)]


def _by_state(columns: Sequence[RankColumn], ranks: Ranks) -> list[Group]:
    """Return a group of nodes, and a group with one row for all ranks of the same state and exit, worst first."""
    states: dict[tuple[str, str], list[RankSnapshot]] = {}
    for rank in ranks:
        states.setdefault((rank.state, rank.exit), []).append(rank)
    rows = [
        Row(cells=(f"{len(members):,} ranks", *(column.cell(members) for column in columns)))
        for _, members in sorted(states.items(), key=lambda found: severity(found[0][0]))
    ]
    title = f"{len(ranks):,} ranks, by state"
    return [Group(rows=tuple(_node_rows(columns, ranks))), Group(title=title, rows=tuple(rows))]


def outliers(ranks: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    """Return the ranks that have failed, are silent or are late, worst first."""
    found = [rank for rank in ranks if rank.state == "failed" or rank.late]
    return sorted(found, key=lambda r: (r.state != "failed", not r.silent, -r.behind, -(r.own_seconds or 0.0), r.rank))


def _rank_row(columns: Sequence[RankColumn], rank: RankSnapshot) -> Row:
    alone, badge_text = (rank,), ("silent" if rank.silent else "straggler") if rank.late else ""
    cells = [column.cell(alone) for column in columns]
    return Row(key=f"r{rank.rank}", cells=(_name(str(rank.rank), badge_text), *cells), tone=_tone(alone))


def _node_row(columns: Sequence[RankColumn], ranks: Ranks, *, several: bool) -> Row:
    """Return a row that summarises a node: lowest step and rate, mean loss and utilisation, and total memory."""
    late = [rank.rank for rank in ranks if rank.late]
    name = _name(node_title(ranks, several=several), f"{few_names(late).lower()} late" if late else "")
    cells = [column.cell(ranks) for column in columns]
    return Row(key=f"n{ranks[0].node}", cells=(name, *cells), tone=f"node {_tone(ranks)}".rstrip())


def _name(text: str, badge_text: str) -> str | Cell:
    return Cell(text=text, badge=badge_text) if badge_text else text


def _tone(ranks: Ranks) -> str:
    return "dead" if any(r.state == "failed" for r in ranks) else "late" if any(r.late for r in ranks) else ""


# ---- step times

SLOWEST_RANKS, SLOWEST_NODES = 8, 8
"""If there are many ranks, how many of the slowest ranks and nodes are shown in addition to the mean."""
_NO_TIMES = "No step times yet: the steps of prepared optimizers are timed."
_TIMES_NOTE = "Own work leaves out collectives and backward: a rank may wait for other ranks there."


@dataclass(frozen=True)
class StepTime:
    """The step time of a rank, or the mean of several ranks, and the share of each part."""

    name: str
    parts: Mapping[str, float]
    seconds: float
    own: float
    late: bool = False


def step_times(ranks: Ranks) -> list[StepTime]:
    """Return the step time of each rank, or if there are many, the mean, the slowest ranks and the slowest nodes."""
    measured = [rank for rank in ranks if rank.step_seconds]
    if len(measured) <= MANY:
        return [_rank_time(rank) for rank in measured]
    groups = by_node(measured)
    nodes = [_mean_time(node_title(members, several=True), members) for members in groups.values()]
    slowest = sorted(measured, key=lambda rank: -(rank.own_seconds or 0.0))[:SLOWEST_RANKS]
    nodes = sorted(nodes if len(groups) > 1 else [], key=lambda time: -time.own)[:SLOWEST_NODES]
    return [_mean_time(f"mean of {len(measured):,} ranks", measured), *map(_rank_time, slowest), *nodes]


def _rank_time(rank: RankSnapshot) -> StepTime:
    return _mean_time(f"rank {rank.rank}", [rank], late=rank.late)


def _mean_time(name: str, ranks: Ranks, *, late: bool = False) -> StepTime:
    total = sum(sum(rank.parts.values()) for rank in ranks) or 1.0
    shares = {part: sum(rank.parts.get(part, 0.0) for rank in ranks) / total for part in PARTS}
    seconds, own = ([getattr(rank, field) or 0.0 for rank in ranks] for field in ("step_seconds", "own_seconds"))
    return StepTime(name, shares, sum(seconds) / len(ranks), sum(own) / len(ranks), late)


def step_time_table(times: Sequence[StepTime]) -> Table:
    """Return a table of the milliseconds per step and the share of each part."""
    rows = [["rank", "ms per step", *PARTS]]
    for time in times:
        shares = [f"{100 * time.parts[part]:.0f} %" for part in PARTS]
        rows.append([time.name.removeprefix("rank "), f"{1000 * time.seconds:,.1f}", *shares])
    return table_of("times", rows, caption="Step time")


def step_time_bars(times: Sequence[StepTime]) -> Drawing | Text:
    """Return a stacked bar for each step time, in the colours of the parts."""
    if not times:
        return Text(lines=(_NO_TIMES,), tone="empty")
    longest = max(time.seconds for time in times)
    legend = [element("li", swatch(index), part) for index, part in enumerate(PARTS)]
    bars = element("div", *(_bar(time, longest) for time in times), class_="na-stacks")
    note = element("p", _TIMES_NOTE, class_="na-note") if any(time.own for time in times) else ""
    return Drawing(html=join([element("ul", *legend, class_="na-legend"), bars, note]))


def _bar(time: StepTime, longest: float) -> Markup:
    pieces = []
    for index, part in enumerate(PARTS):
        width = 100 * time.parts[part] * time.seconds / longest
        label = f"{100 * time.parts[part]:.0f} %" if width > 7 else ""
        title = f"{part}: {1000 * time.parts[part] * time.seconds:.1f} ms"
        style = f"width:{width:.2f}%;background:var(--na-part-{index})"
        pieces.append(element("span", label, style=style, title=title))
    shares = ", ".join(f"{part} {100 * time.parts[part]:.0f} %" for part in PARTS)
    own = [" · ", element("b", f"{1000 * time.own:,.1f} ms"), " own work"] if time.own else []
    return join([
        element("span", time.name, badge("straggler" if time.late else "")),
        element("div", *pieces, class_="na-stack", role="img", aria_label=f"{time.name}: {shares}"),
        element("span", f"{1000 * time.seconds:,.1f} ms/step", *own),
    ])  # fmt: skip


# ---- devices

_DEVICES = (
    "Devices: allocated, reserved and peak allocated count the rank's own memory; use and in use count all processes"
)
_SIZES = ("allocated", "reserved", "peak allocated")
UUID_CHARS = 8
"""How many characters of a UUID are enough to distinguish the devices of a machine."""


def device_table(ranks: Ranks) -> Table:
    """Return a table with a row for each device of each rank, or for each node if there are many ranks.

    Columns without any known value are left out, such as the current figures of a run that has finished.
    """
    rows = _node_devices(ranks) if len(ranks) > MANY else _devices(ranks)
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"–"}]
    return table_of("devices", list(zip(*columns, strict=True)), caption=_DEVICES)


def _devices(ranks: Ranks) -> Rows:
    rows = [["rank", "device", "model", "use", *_SIZES, "in use on the device", "uuid"]]
    for rank in ranks:
        for device in rank.devices:
            uuid = device.uuid[:UUID_CHARS] or "–"
            rows.append([str(rank.rank), device.device, *_device_figures([device], [rank]), uuid])
    return rows


def _node_devices(ranks: Ranks) -> Rows:
    rows = [["node", "devices", "model", "mean use", *_SIZES, "in use on the devices"]]
    nodes = by_node(ranks)
    for members in nodes.values():
        if held := [device for rank in members for device in rank.devices]:
            count = str(len({device.uuid or index for index, device in enumerate(held)}))
            rows.append([node_title(members, several=len(nodes) > 1), count, *_device_figures(held, members)])
    return rows


def _device_figures(held: Sequence[RankDevice], ranks: Ranks) -> list[str]:
    """Return the model, the utilisation, the allocated, reserved and peak memory, and the memory in use on the devices.

    For the utilisation and the memory in use, a device that ranks share counts only once.

    Args:
        held: The devices that the ranks use.
        ranks: The ranks to summarise. Only active ones contribute to the current figures.
    """
    active = [rank for rank in ranks if rank.active]
    live = held if len(active) == len(ranks) else [device for rank in active for device in rank.devices]
    distinct = list({device.uuid or index: device for index, device in enumerate(live)}.values())
    percents = [device.percent for device in distinct if device.percent is not None]
    return [
        ", ".join(dict.fromkeys(map(_model, held))),
        use_text(sum(percents) / len(percents) if percents else None),
        size_text(sum_known(device.allocated for device in live)),
        size_text(sum_known(device.reserved for device in live)),
        size_text(max(device.peak for device in held)),
        size_text(sum_known(device.used for device in distinct)),
    ]


def _model(device: RankDevice) -> str:
    return " · ".join(filter(None, (device.name, size_text(device.total, "")))) or "–"
