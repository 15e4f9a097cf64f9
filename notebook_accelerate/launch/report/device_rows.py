"""The devices of a run's ranks as rows: what each rank holds, and the use of the device by all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.rank_rows import MANY, RankOnNode, by_node, node_name
from notebook_accelerate.launch.report.tables import Rows, byte_size

if TYPE_CHECKING:
    from notebook_accelerate.telemetry.rank_devices import RankDevice

IN_USE = ("in use on the device", "in use on the devices")
HEAD = ("device", "model", "use", "allocated", "reserved", "peak", IN_USE[0], "uuid")
"""``allocated``, ``reserved`` and ``peak`` are the rank's; ``use`` and ``in use`` count all processes."""
UUID_CHARS = 8
"""Characters of an identity that tell the devices of a machine apart."""
_ACTIVE = ("starting", "running")


def rows(ranks: Sequence[RankOnNode], devices: Mapping[int, Sequence[RankDevice]]) -> Rows:
    """Return a row per rank and device, or with many ranks one per node, below their titles; only the titles without.

    Columns of which nothing is known are left out, such as those of the present after the run.

    Args:
        ranks: The ranks.
        devices: The devices of each rank.
    """
    if len(ranks) > MANY:
        found = _node_rows(ranks, devices)
    else:
        found = [["rank", *HEAD]]
        found += [_rank_row(rank, device) for rank in ranks for device in devices.get(rank.rank, ())]
    columns = [column for column in zip(*found, strict=True) if set(column[1:]) != {"–"}]
    return [list(row) for row in zip(*columns, strict=True)]


def _rank_row(rank: RankOnNode, device: RankDevice) -> list[str]:
    now = rank.state in _ACTIVE
    sizes = [byte_size(size if now else None) for size in (device.allocated, device.reserved)]
    percent, used = use_text(device.percent if now else None), byte_size(device.used if now else None)
    uuid = device.uuid[:UUID_CHARS] or "–"
    return [str(rank.rank), device.device, _model(device), percent, *sizes, byte_size(device.peak), used, uuid]


def _node_rows(ranks: Sequence[RankOnNode], devices: Mapping[int, Sequence[RankDevice]]) -> Rows:
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
            node_name(members, several=len(groups) > 1),
            str(len({device.uuid or index for index, device in enumerate(held)})),
            ", ".join(dict.fromkeys(map(_model, held))),
            use_text(sum(percents) / len(percents) if percents else None),
            byte_size(_total(device.allocated for device in live)),
            byte_size(_total(device.reserved for device in live)),
            byte_size(max(device.peak for device in held)),
            byte_size(_total(device.used for device in distinct)),
        ])  # fmt: skip
    return found


def use_text(percent: float | None) -> str:
    """Return a utilisation in percent as text."""
    return "–" if percent is None else f"{percent:.0f} %"


def _model(device: RankDevice) -> str:
    return " · ".join(filter(None, (device.name, byte_size(device.total, "")))) or "–"


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
