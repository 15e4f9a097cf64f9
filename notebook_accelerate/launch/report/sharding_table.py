"""The shard reports of all ranks as the rows of one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from notebook_accelerate.launch.report.number_format import byte_size, percent
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.sharding_events import KINDS, ShardReport, ShardSizes

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.run_view import RunView

ShardReports = Mapping[int, ShardReport]

CAPTION = "Sharding"
HEAD = ("ranks", "tensors", "total", "per rank", "share", "layout")
MAX_GROUPS = 6
"""More groups of ranks are merged, and their bytes shown as a range."""


def latest_reports(run: RunView) -> ShardReports:
    """Return the shard reports of a run's latest attempt, by rank.

    Args:
        run: The run.
    """
    reports = run.store.shard_reports.copy()
    return {info.rank: reports[info.rank] for info in run.ranks if info.rank in reports} if reports else {}


@dataclass(frozen=True)
class RankGroup:
    """Ranks with equal reports.

    Attributes:
        ranks: Their numbers.
        reports: The report of each.
    """

    ranks: list[int]
    reports: list[ShardReport]

    def name(self, world_size: int) -> str:
        """Return the ranks and their stage, as "ranks 0–3 (pp 0)".

        Args:
            world_size: The number of all ranks.
        """
        first = self.reports[0]
        stages = {report.place.get(report.stages, -1) for report in self.reports if report.stages}
        stage = f" ({first.stages} {stages.pop()})" if len(stages) == 1 else ""
        return f"{'each rank' if 1 < world_size == len(self.ranks) else rank_names(self.ranks)}{stage}"


def _layout(report: ShardReport) -> tuple[object, ...]:
    kinds = tuple((kind, held.sharded, held.offloaded, held.note) for kind, held in report.held.items())
    return report.strategy, report.variant, tuple(report.axes.items()), kinds


def _layout_and_stage(report: ShardReport) -> tuple[object, ...]:
    return (*_layout(report), report.place.get(report.stages), report.units, report.unit)


def _everything(report: ShardReport) -> tuple[object, ...]:
    return (*_layout_and_stage(report), *((held.whole, held.here) for held in report.held.values()))


_GROUP_KEYS: tuple[Callable[[ShardReport], tuple[object, ...]], ...] = (_everything, _layout_and_stage, _layout)


def groups(reports: ShardReports) -> list[RankGroup]:
    """Group the ranks with equal reports; if there are more than ``MAX_GROUPS``, those with the same layout.

    Args:
        reports: By rank.
    """
    found: list[RankGroup] = []
    for key in _GROUP_KEYS:
        members: dict[tuple[object, ...], list[int]] = {}
        for rank in sorted(reports):
            members.setdefault(key(reports[rank]), []).append(rank)
        found = [RankGroup(ranks, [reports[rank] for rank in ranks]) for ranks in members.values()]
        if len(found) <= MAX_GROUPS:
            break
    return found


def summary(reports: ShardReports) -> str:
    """Return strategy, mesh and units in one line; "" before the first report.

    Args:
        reports: By rank.
    """
    if not reports:
        return ""
    first = reports[min(reports)]
    parts = [" ".join(part for part in (first.strategy, first.variant) if part)]
    parts.append(" × ".join(f"{name} {size}" for name, size in first.axes.items()) or "one rank holds everything")
    units = sorted({report.units for report in reports.values()})
    if units[0] < units[-1]:
        parts.append(f"{units[0]}–{units[-1]} {first.unit}")
    elif units[-1]:
        parts.append(f"{units[-1]} {first.unit.removesuffix('s') if units[-1] == 1 else first.unit}")
    return " · ".join(parts)


# ---- the table


class ShardingRow(NamedTuple):
    """A row of the table.

    Attributes:
        ranks: The ranks; "" for the same as in the row above.
        kind: parameters, gradients, optimizer state, or all.
        total: Bytes over all ranks, as text.
        per_rank: Bytes of each of these ranks, as text.
        share: ``per_rank`` as a share of ``total``, from 0 to 1; None: not known.
        layout: The axes over which it is sharded, and the device it is offloaded to.
    """

    ranks: str
    kind: str
    total: str
    per_rank: str
    share: float | None
    layout: str


def sharding_rows(reports: ShardReports) -> list[ShardingRow]:
    """Return a row for each kind of tensor of each group of ranks, and one for their sum.

    Args:
        reports: By rank.
    """
    return [row for group in groups(reports) for row in _group_rows(group, len(reports))]


def _group_rows(group: RankGroup, world_size: int) -> list[ShardingRow]:
    kinds = [kind for kind in KINDS if all(kind in report.held for report in group.reports)]
    rows = []
    for kind in kinds:
        held = [report.held[kind] for report in group.reports]
        rows.append(_row(kind, [[sizes] for sizes in held], _layout_text(held[0], group.reports[0])))
    rows.append(_row("all", [[report.held[kind] for kind in kinds] for report in group.reports], ""))
    return [row._replace(ranks="" if index else group.name(world_size)) for index, row in enumerate(rows)]


def _row(kind: str, held: Sequence[Sequence[ShardSizes]], layout: str) -> ShardingRow:
    totals = [total_bytes(sizes.whole for sizes in parts) for parts in held]
    here = [total_bytes(sizes.here for sizes in parts) for parts in held]
    shares = [part / total for part, total in zip(here, totals, strict=True) if part is not None and total]
    share = sum(shares) / len(shares) if shares and len(shares) == len(held) else None
    return ShardingRow("", kind, _range(totals), _range(here), share, layout)


def total_bytes(parts: Iterable[int | None]) -> int | None:
    """Return a sum of bytes; None if a part is not known.

    Args:
        parts: Bytes.
    """
    known = list(parts)
    return None if None in known else sum(part or 0 for part in known)


def _range(counts: Sequence[int | None]) -> str:
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return "unknown"
    low, high = byte_size(min(known)), byte_size(max(known))
    return high if low == high else f"{low} – {high}"


def _layout_text(held: ShardSizes, report: ShardReport) -> str:
    copies = prod(size for name, size in report.axes.items() if name not in held.sharded and name != report.stages)
    parts = [f"sharded over {' × '.join(held.sharded)}"] if held.sharded else []
    parts += [f"replicated on {copies} ranks"] if copies > 1 else []
    parts += [f"layers over {report.stages}"] if report.stages else []
    parts += [held.note] if held.note else []
    parts += [f"offloaded to {_DEVICES.get(held.offloaded, held.offloaded)}"] if held.offloaded else []
    return ", ".join(parts)


_DEVICES = {"cpu": "main memory (cpu)", "nvme": "files (nvme)"}


def report_rows(reports: ShardReports) -> list[list[str]]:
    """Return the table as rows of text, the head first; only the head before the first report.

    Args:
        reports: By rank.
    """
    rows = sharding_rows(reports)
    return [list(HEAD), *([*row[:4], percent(row.share), row.layout] for row in rows)]
