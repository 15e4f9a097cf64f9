"""Show how the model is sharded across the ranks, as a table, as text, and as a drawing of the device mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.launch.report.document import Cell, Column, Drawing, Group, Row, Table, table_of
from notebook_accelerate.launch.report.markup import (
    Markup,
    element,
    join,
    percent,
    svg_drawing,
    svg_image,
    svg_text,
)
from notebook_accelerate.launch.report.rendering import text
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.sharding import KINDS, ShardReport, ShardSizes

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.run_view import RunView

ShardReports = Mapping[int, ShardReport]

CAPTION = "Sharding"
MAX_GROUPS = 6
"""Maximum number of groups of ranks. If there are more, some are merged, and their bytes are shown as a range."""

MAX_DRAWN = 64
"""Maximum number of ranks in the drawing. Only the first ones are drawn."""
MAX_COLUMNS = 16


def latest_reports(run: RunView) -> ShardReports:
    """Return the shard reports of a run's latest attempt, by rank.

    Args:
        run: The run whose ranks sent the reports.
    """
    reports = internals(run).store.shard_reports.copy()
    return {info.rank: reports[info.rank] for info in run.ranks if info.rank in reports} if reports else {}


def summary(reports: ShardReports) -> str:
    """Return a line with the strategy, the mesh and the units, or "" before the first report.

    Args:
        reports: The shard report of each rank.
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


def sharding(reports: ShardReports, *, inline: bool) -> tuple[Drawing, Table]:
    """Return a drawing of the mesh, and a table of the tensors that each group of ranks holds.

    Args:
        reports: The shard report of each rank, at least one.
        inline: See `rendering.html`.
    """
    picture = element("div", image(reports)) if inline else element("div", svg(reports), class_="na-scroll na-mesh")
    rows = tuple(map(_table_row, sharding_rows(reports)))
    table = Table(key="shards", label=CAPTION, columns=_COLUMNS, groups=(Group(rows=rows),))
    return Drawing(html=join([picture, element("p", _NOTE, class_="na-note")]), text=_mesh_text(reports)), table


_NOTE = (
    "A bar stands for the whole model, its filled part for what the rank holds between steps. Gradients exist from "
    "backward to step, optimizer state from the first step on."
)
_COLUMNS = (
    Column(title="ranks"),
    Column(title="tensors"),
    Column(title="total", numeric=True),
    Column(title="per rank", numeric=True),
    Column(title="share"),
    Column(title="layout", muted=True),
)
_PARTS = {"parameters": 1, "gradients": 0, "optimizer state": 3}
"""For each kind of tensor, the index of the part of a step that has the same colour."""


def _table_row(row: ShardingRow) -> Row:
    part = _PARTS.get(row.kind, -1)
    kind = Cell(text=row.kind, part=part)
    share = "" if row.share is None else Cell(text=percent(row.share), part=part, meter=row.share)
    return Row(cells=(row.ranks, kind, row.total, row.per_rank, share, row.layout), tone="sum" if part < 0 else "")


class ShardingRow(NamedTuple):
    """A row of the table that shows how the model is sharded.

    Attributes:
        ranks: The ranks, or "" if they are the same as in the row above.
        kind: "parameters", "gradients", "optimizer state" or "all".
        total: The size of the tensors of the whole model, or of the pipeline stage, as text.
        per_rank: The size of the part that each of these ranks holds, as text.
        share: ``per_rank`` as a share of ``total``, from 0 to 1, or None if unknown.
        layout: How the tensors are sharded, replicated and offloaded, as text.
    """

    ranks: str
    kind: str
    total: str
    per_rank: str
    share: float | None
    layout: str


def sharding_rows(reports: ShardReports) -> list[ShardingRow]:
    """Return a row for each group of ranks and kind of tensor, and a row with the sum for each group.

    Args:
        reports: The shard report of each rank.
    """
    return [row for group in groups(reports) for row in _group_rows(group, len(reports))]


def _group_rows(group: EqualRanks, world_size: int) -> list[ShardingRow]:
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
    """Return the sum of some sizes in bytes, or None if one of them is unknown.

    Args:
        parts: The size of each part in bytes, or None if unknown.
    """
    known = list(parts)
    return None if None in known else sum(part or 0 for part in known)


def _range(counts: Sequence[int | None]) -> str:
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return "unknown"
    low, high = size_text(min(known)), size_text(max(known))
    return high if low == high else f"{low} – {high}"


_DEVICES = {"cpu": "CPU memory", "nvme": "files (nvme)"}


def _layout_text(held: ShardSizes, report: ShardReport) -> str:
    copies = prod(size for name, size in report.axes.items() if name not in held.sharded and name != report.stages)
    parts = [f"sharded over {' × '.join(held.sharded)}"] if held.sharded else []
    parts += [f"replicated on {copies} ranks"] if copies > 1 else []
    parts += [f"layers over {report.stages}"] if report.stages else []
    parts += [held.note] if held.note else []
    parts += [f"offloaded to {_DEVICES.get(held.offloaded, held.offloaded)}"] if held.offloaded else []
    return ", ".join(parts)


# ---- ranks with equal reports


@dataclass(frozen=True)
class EqualRanks:
    """A group of ranks with equal reports or, if that would make too many groups, with equal layouts.

    Attributes:
        ranks: The numbers of the ranks.
        reports: The report of each of these ranks.
    """

    ranks: list[int]
    reports: list[ShardReport]

    def name(self, world_size: int) -> str:
        """Return the names of the ranks with their pipeline stage, such as "ranks 0–3 (pp 0)".

        Args:
            world_size: The total number of ranks in the run.
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


def groups(reports: ShardReports) -> list[EqualRanks]:
    """Group the ranks by equal reports. If there would be more than ``MAX_GROUPS`` groups, group by equal layouts.

    Args:
        reports: The shard report of each rank.
    """
    found: list[EqualRanks] = []
    for key in _GROUP_KEYS:
        members: dict[tuple[object, ...], list[int]] = {}
        for rank in sorted(reports):
            members.setdefault(key(reports[rank]), []).append(rank)
        found = [EqualRanks(ranks, [reports[rank] for rank in ranks]) for ranks in members.values()]
        if len(found) <= MAX_GROUPS:
            break
    return found


# ---- the mesh


def _mesh_text(reports: ShardReports) -> str:
    """Return the summary and the mesh as text."""
    rows = mesh_rows(reports)
    return "\n\n".join(filter(None, [summary(reports), text(table_of("mesh", rows)) if len(rows) > 1 else ""]))


def mesh_rows(reports: ShardReports) -> list[list[str]]:
    """Return the mesh as rows of text, or only the heading if the mesh has fewer than two axes or is too large.

    Args:
        reports: The shard report of each rank.
    """
    grid = Grid(reports)
    head = ["mesh", *(f"{grid.across} {column}" if grid.across else "" for column in range(grid.columns))]
    if len(grid.axes) < 2 or grid.columns > MAX_COLUMNS or len(reports) > MAX_DRAWN:
        return [head]
    lines = [[name, *(f"rank {rank}" if rank is not None else "" for rank in line)] for name, line in grid.lines()]
    return [head, *lines]


class Grid:
    """The positions of the ranks in the drawing. The innermost axis runs across, and the others run down.

    Args:
        reports: The shard report of each rank.
    """

    def __init__(self, reports: ShardReports) -> None:
        self.axes = dict(reports[min(reports)].axes) if reports else {}
        self.at = {tuple(one.place.get(name, 0) for name in self.axes): rank for rank, one in reports.items()}
        *self.down, self.across = self.axes or [""]
        self.columns = self.axes.get(self.across, 1)

    def lines(self) -> list[tuple[str, list[int | None]]]:
        """Return the name of each line and the ranks on it. Lines longer than ``MAX_COLUMNS`` are wrapped."""
        found: list[tuple[str, list[int | None]]] = []
        for position in product(*(range(self.axes[name]) for name in self.down)):
            name = " · ".join(f"{axis} {index}" for axis, index in zip(self.down, position, strict=True))
            line = [self.at.get((*position, *([column] if self.across else []))) for column in range(self.columns)]
            pieces = [line[begin : begin + MAX_COLUMNS] for begin in range(0, len(line), MAX_COLUMNS)]
            found += [(name if not index else "", piece) for index, piece in enumerate(pieces)]
        return found


# ---- the drawing


@dataclass(frozen=True)
class Palette:
    """The CSS colours of a drawing.

    Attributes:
        kinds: The colours of parameters, gradients and optimizer state.
        ink: The colour of text.
        muted: The colour of secondary text.
        line: The colour of borders.
        track: The colour behind the bars.
    """

    kinds: tuple[str, str, str]
    ink: str
    muted: str
    line: str
    track: str


# These mid-tones are legible both on white and on #111, the background of dark notebooks.
PAPER = Palette(("#3b82d6", "#d9662b", "#2a9a68"), "#7a7a7a", "#7a7a7a", "#80808066", "#80808033")
SCREEN = Palette(
    ("var(--na-part-1)", "var(--na-part-0)", "var(--na-part-3)"),
    "var(--na-ink)", "var(--na-muted-ink)", "var(--na-line)", "var(--na-soft)",
)  # fmt: skip
_WIDE, _NARROW, _GAP, _BLOCK_GAP, _BAR, _HEAD, _LEGEND = 108, 44, 6, 10, 8, 18, 26
_CELL = 18 + 3 * (_BAR + 3) + 4


def svg(reports: ShardReports, palette: Palette = SCREEN) -> Markup:
    """Return the drawing of the mesh as SVG source, with a cell for each rank and a bar for each kind of tensor.

    Args:
        reports: The shard report of each rank.
        palette: The colours of the drawing.
    """
    return _Drawing(reports, palette).svg() if reports else Markup()


def image(reports: ShardReports) -> Markup:
    """Return the drawing of the mesh as an ``img`` element, or "" before the first report.

    Args:
        reports: The shard report of each rank.
    """
    if not reports:
        return Markup()
    drawing = _Drawing(reports, PAPER)
    return svg_image(drawing.svg(), drawing.width, drawing.height, description(reports))


def description(reports: ShardReports) -> str:
    """Return the alt text of the drawing.

    Args:
        reports: The shard report of each rank.
    """
    rows = sharding_rows(reports)
    texts = [f"{row.ranks + ': ' if row.ranks else ''}{row.kind} {row.per_rank} of {row.total}" for row in rows]
    return f"{summary(reports)}. {'; '.join(texts)}"


class _Drawing:
    """Computes the layout of the drawing, and draws it as SVG."""

    def __init__(self, reports: ShardReports, palette: Palette) -> None:
        self.reports, self.palette, self.grid = reports, palette, Grid(reports)
        lines = self.grid.lines()
        columns = max(len(line) for _, line in lines)
        self.lines = lines[: max(1, MAX_DRAWN // columns)]
        self.cell = _WIDE if columns <= 8 else _NARROW
        labels = [name for name, _ in self.lines] + ([self.grid.across] if self.cell == _NARROW else [])
        self.left = 12 + round(6.2 * max(map(len, labels))) if any(labels) else 1
        self.top = _LEGEND + (_HEAD if self.grid.across else 0)
        self.totals = {kind: _stage_totals(reports, kind) for kind in KINDS}
        self.hidden = len(reports) - sum(rank is not None for _, line in self.lines for rank in line)
        self.width = max(self.left + columns * (self.cell + _GAP), 380)
        self.height = self._y(len(self.lines)) + (16 if self.hidden > 0 else 0)

    def _x(self, column: int) -> int:
        return self.left + column * (self.cell + _GAP)

    def _y(self, line: int) -> int:
        """Return the top of a line. With three axes, a gap separates the blocks of the outermost one."""
        block = math.prod(self.grid.axes[name] for name in self.grid.down[1:]) if len(self.grid.down) > 1 else 0
        gaps = (line - (line >= len(self.lines))) // block if block else 0
        return self.top + line * (_CELL + _GAP) + _BLOCK_GAP * gaps

    def svg(self) -> Markup:
        parts = [_hatch_patterns(self.palette), element("title", summary(self.reports))]
        parts += [*self._legend(), *self._column_names()]
        for index, (name, line) in enumerate(self.lines):
            y = self._y(index)
            if name:
                parts.append(svg_text(self.left - 10, y + _CELL / 2 + 4, name, self.palette.muted, "end"))
            parts += [self._rank(rank, self._x(column), y) for column, rank in enumerate(line) if rank is not None]
        if self.hidden > 0:
            more = f"and {self.hidden:,} more ranks"
            parts.append(svg_text(self.left, self.height - 4, more, self.palette.muted))
        return svg_drawing(self.width, self.height, *parts)

    def _legend(self) -> list[Markup]:
        parts, x = [], self.left
        for kind, colour in zip(KINDS, self.palette.kinds, strict=True):
            parts.append(element("rect", x=x, y=3, width=10, height=10, rx=2.5, fill=colour))
            parts.append(svg_text(x + 15, 12, kind, self.palette.muted))
            x += 30 + round(6.4 * len(kind))
        if any(held.offloaded for one in self.reports.values() for held in one.held.values()):
            hatched = {"fill": "url(#na-hatch-0)", "stroke": self.palette.kinds[0]}
            parts.append(element("rect", x=x + 0.5, y=3.5, width=9, height=9, rx=2.5, **hatched))
            parts.append(svg_text(x + 15, 12, "offloaded", self.palette.muted))
        return parts

    def _column_names(self) -> list[Markup]:
        if not self.grid.across:
            return []
        parts, wide = [], self.cell == _WIDE
        if not wide:
            parts.append(svg_text(self.left - 10, _LEGEND + 10, self.grid.across, self.palette.muted, "end"))
        for column in range(max(len(line) for _, line in self.lines) if self.grid.columns <= MAX_COLUMNS else 0):
            name = f"{self.grid.across} {column}" if wide else str(column)
            parts.append(svg_text(self._x(column) + 1, _LEGEND + 10, name, self.palette.muted))
        return parts

    def _rank(self, rank: int, x: int, y: int) -> Markup:
        report, palette, wide = self.reports[rank], self.palette, self.cell == _WIDE
        sizes = ", ".join(f"{kind} {_size(held)}" for kind, held in report.held.items())
        frame = {"width": self.cell - 1, "height": _CELL - 1, "rx": 6, "fill": "none", "stroke": palette.line}
        parts = [element("title", f"rank {rank}: {sizes}"), element("rect", x=x + 0.5, y=y + 0.5, **frame)]
        name = f"rank {rank}" if wide else str(rank)
        parts.append(svg_text(x + 8, y + 14, name, palette.ink, font_weight=600))
        held_bytes = total_bytes(held.here for held in report.held.values())
        if wide and held_bytes is not None:
            parts.append(svg_text(x + self.cell - 8, y + 14, size_text(held_bytes), palette.muted, "end"))
        for index, kind in enumerate(KINDS):
            if kind in report.held:
                parts += self._bar(report, kind, x + 8, y + 20 + index * (_BAR + 3), index)
        return element("g", *parts)

    def _bar(self, report: ShardReport, kind: str, x: int, y: int, index: int) -> list[Markup]:
        width, shape = self.cell - 16, {"y": y, "height": _BAR, "rx": 2.5}
        track = element("rect", x=x, width=width, fill=self.palette.track, **shape)
        part = slice_of(report, kind, self.totals[kind])
        if part is None:
            return [track]
        offloaded, colour = report.held[kind].offloaded, self.palette.kinds[index]
        fill, stroke = (f"url(#na-hatch-{index})", colour) if offloaded else (colour, None)
        length = max(1.5, part[1] * width) if part[1] else 0.0
        return [track, element("rect", x=x + part[0] * width, width=length, fill=fill, stroke=stroke, **shape)]


def _stage_totals(reports: ShardReports, kind: str) -> list[int | None]:
    """Return the size in bytes of each pipeline stage, or a single size for the model if there are no stages."""
    found: dict[int, int | None] = {}
    for report in reports.values():
        if kind in report.held:
            found.setdefault(report.place.get(report.stages, 0), report.held[kind].whole)
    return [found.get(stage, 0) for stage in range(max(found, default=-1) + 1)]


def slice_of(report: ShardReport, kind: str, totals: Sequence[int | None]) -> tuple[float, float] | None:
    """Return the part of the model's bytes that a rank holds, as an interval between 0 and 1.

    Args:
        report: The shard report of the rank.
        kind: One of ``KINDS``, the kinds of tensors.
        totals: The size in bytes of each pipeline stage, or a single size if there are no stages.

    Returns:
        The beginning and the length of the interval, or None if unknown.
    """
    held, model = report.held[kind], total_bytes(totals)
    if held.whole is None or held.here is None or model is None or not model:
        return None
    index, parts = 0, math.prod(report.axes[name] for name in held.sharded)
    # Axes that shard the parameters come first. Any other axis divides only the rank's own part of the parameters.
    first = report.held[KINDS[0]].sharded if KINDS[0] in report.held else ()
    for name in sorted(held.sharded, key=lambda axis: axis not in first):
        index = index * report.axes[name] + report.place[name]
    before = total_bytes(totals[: report.place.get(report.stages, 0)]) or 0
    share = min(1.0, held.here / model)
    return min((before + held.whole * index / parts) / model, 1.0 - share), share


def _size(held: ShardSizes) -> str:
    if held.whole is None or held.here is None:
        return "not known before the first step"
    return f"{size_text(held.here)} of {size_text(held.whole)}{f' in {held.offloaded}' if held.offloaded else ''}"


def _hatch_patterns(palette: Palette) -> Markup:
    units = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    patterns = [
        element("pattern", element("rect", width=2.6, height=5, fill=colour), id=f"na-hatch-{index}", width=5, height=5,
                **units)
        for index, colour in enumerate(palette.kinds)
    ]  # fmt: skip
    return element("defs", *patterns)
