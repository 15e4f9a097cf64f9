"""The mesh of ranks, as text and as a picture of which part of the model each rank holds."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import product

from notebook_accelerate.launch.report.sharding_table import Ranks, amount, sentence, table, total
from notebook_accelerate.telemetry.sharding_events import KINDS, ShardReport, ShardSizes

MAX_DRAWN = 64
"""Ranks in the picture; of more, the first ones."""
MAX_COLUMNS = 16


def mesh_rows(ranks: Ranks) -> list[list[str]]:
    """Return which rank stands where in the mesh, as rows of text; the head alone where there is nothing to see.

    Args:
        ranks: What each rank holds.
    """
    grid = Grid(ranks)
    head = ["mesh", *(f"{grid.across} {column}" if grid.across else "" for column in range(grid.columns))]
    if len(grid.axes) < 2 or grid.columns > MAX_COLUMNS or len(ranks) > MAX_DRAWN:
        return [head]
    lines = [[name, *(f"rank {rank}" if rank is not None else "" for rank in line)] for name, line in grid.lines()]
    return [head, *lines]


class Grid:
    """Where ranks stand: the innermost axis goes across, the others go down.

    Args:
        ranks: What each rank holds.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.axes = dict(ranks[min(ranks)].axes) if ranks else {}
        self.at = {tuple(one.place.get(name, 0) for name in self.axes): rank for rank, one in ranks.items()}
        *self.down, self.across = self.axes or [""]
        self.columns = self.axes.get(self.across, 1)

    def lines(self) -> list[tuple[str, list[int | None]]]:
        """Return each line's name and ranks; long ones are broken."""
        found: list[tuple[str, list[int | None]]] = []
        for place in product(*(range(self.axes[name]) for name in self.down)):
            name = " · ".join(f"{axis} {index}" for axis, index in zip(self.down, place, strict=True))
            line = [self.at.get((*place, *([column] if self.across else []))) for column in range(self.columns)]
            pieces = [line[begin : begin + MAX_COLUMNS] for begin in range(0, len(line), MAX_COLUMNS)]
            found += [(name if not index else "", piece) for index, piece in enumerate(pieces)]
        return found


@dataclass(frozen=True)
class Palette:
    """The colours of a picture, as CSS says them.

    Attributes:
        parts: For parameters, gradients and optimizer state.
        ink: Of text.
        muted: Of text that says less.
        line: Of borders.
        track: Behind the bars.
    """

    parts: tuple[str, str, str]
    ink: str
    muted: str
    line: str
    track: str


# Mid-tones: legible on white and on a dark notebook's #111.
PAPER = Palette(("#3b82d6", "#d9662b", "#2a9a68"), "#7a7a7a", "#7a7a7a", "#80808066", "#80808033")
SCREEN = Palette(
    ("var(--na-part-1)", "var(--na-part-0)", "var(--na-part-3)"),
    "var(--na-ink)", "var(--na-muted-ink)", "var(--na-line)", "var(--na-soft)",
)  # fmt: skip
_WIDE, _NARROW, _GAP, _APART, _BAR, _HEAD, _LEGEND = 108, 44, 6, 10, 8, 18, 26
_CELL = 18 + 3 * (_BAR + 3) + 4


def picture(ranks: Ranks, palette: Palette = SCREEN) -> str:
    """Return the mesh as SVG: a cell for each rank, and in it which part it holds of each kind.

    Args:
        ranks: What each rank holds.
        palette: The colours.
    """
    if not ranks:
        return ""
    return _Picture(ranks, palette).svg()


def image(ranks: Ranks) -> str:
    """Return the picture as an ``img`` element that needs nothing else; "" where nobody has told anything.

    Args:
        ranks: What each rank holds.
    """
    if not ranks:
        return ""
    drawn = _Picture(ranks, PAPER)
    data = base64.b64encode(drawn.svg().encode()).decode()
    size = f'width="{drawn.width}" height="{drawn.height}"'
    return f'<img alt="{escape(described(ranks))}" {size} src="data:image/svg+xml;base64,{data}" />'


def described(ranks: Ranks) -> str:
    """Return what the picture shows in words.

    Args:
        ranks: What each rank holds.
    """
    said = [f"{row.who + ': ' if row.who else ''}{row.what} {row.here} of {row.whole}" for row in table(ranks)]
    return f"{sentence(ranks)}. {'; '.join(said)}"


class _Picture:
    """The places of a picture's parts."""

    def __init__(self, ranks: Ranks, palette: Palette) -> None:
        self.ranks, self.palette, self.grid = ranks, palette, Grid(ranks)
        lines = self.grid.lines()
        columns = max(len(line) for _, line in lines)
        self.lines = lines[: max(1, MAX_DRAWN // columns)]
        self.cell = _WIDE if columns <= 8 else _NARROW
        labels = [name for name, _ in self.lines] + ([self.grid.across] if self.cell == _NARROW else [])
        self.left = 12 + round(6.2 * max(map(len, labels))) if any(labels) else 1
        self.top = _LEGEND + (_HEAD if self.grid.across else 0)
        self.wholes = {kind: _wholes(ranks, kind) for kind in KINDS}
        shown = sum(rank is not None for _, line in self.lines for rank in line)
        self.more = len(ranks) - shown
        self.width = max(self.left + columns * (self.cell + _GAP), 380)
        self.height = self._y(len(self.lines)) + (16 if self.more > 0 else 0)

    def _y(self, line: int) -> int:
        """Return where a line begins: blocks of the outermost of three axes stand apart."""
        block = math.prod(self.grid.axes[name] for name in self.grid.down[1:]) if len(self.grid.down) > 1 else 0
        return (
            self.top + line * (_CELL + _GAP) + (_APART * ((line - (line >= len(self.lines))) // block) if block else 0)
        )

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="11"'
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {font}>', _hatches(self.palette)]
        parts.append(f"<title>{escape(sentence(self.ranks))}</title>")
        parts += [*self._legend(), *self._columns()]
        for index, (name, line) in enumerate(self.lines):
            y = self._y(index)
            if name:
                parts.append(_text(self.left - 10, y + _CELL / 2 + 4, name, self.palette.muted, "end"))
            for column, rank in enumerate(line):
                if rank is not None:
                    parts.append(self._rank(rank, self.left + column * (self.cell + _GAP), y))
        if self.more > 0:
            parts.append(_text(self.left, self.height - 4, f"and {self.more:,} more ranks", self.palette.muted))
        return "".join([*parts, "</svg>"])

    def _legend(self) -> list[str]:
        parts, x = [], self.left
        for kind, colour in zip(KINDS, self.palette.parts, strict=True):
            parts.append(f'<rect x="{x}" y="3" width="10" height="10" rx="2.5" fill="{colour}"/>')
            parts.append(_text(x + 15, 12, kind, self.palette.muted))
            x += 30 + round(6.4 * len(kind))
        if any(held.offloaded for one in self.ranks.values() for held in one.held.values()):
            hatched = f'fill="url(#na-hatch-0)" stroke="{self.palette.parts[0]}"'
            parts.append(f'<rect x="{x + 0.5}" y="3.5" width="9" height="9" rx="2.5" {hatched}/>')
            parts.append(_text(x + 15, 12, "offloaded", self.palette.muted))
        return parts

    def _columns(self) -> list[str]:
        if not self.grid.across:
            return []
        parts, wide = [], self.cell == _WIDE
        if not wide:
            parts.append(_text(self.left - 10, _LEGEND + 10, self.grid.across, self.palette.muted, "end"))
        for column in range(max(len(line) for _, line in self.lines) if self.grid.columns <= MAX_COLUMNS else 0):
            name = f"{self.grid.across} {column}" if wide else str(column)
            x = self.left + column * (self.cell + _GAP)
            parts.append(_text(x + 1, _LEGEND + 10, name, self.palette.muted))
        return parts

    def _rank(self, rank: int, x: float, y: float) -> str:
        one, palette = self.ranks[rank], self.palette
        said = ", ".join(f"{kind} {_of(held)}" for kind, held in one.held.items())
        frame = (
            f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{self.cell - 1}" height="{_CELL - 1}" rx="6" fill="none" '
            f'stroke="{palette.line}"/>'
        )
        parts = [
            f"<g><title>rank {rank}: {escape(said)}</title>",
            frame,
            _text(x + 8, y + 14, f"rank {rank}" if self.cell == _WIDE else str(rank), palette.ink, weight=600),
        ]
        bytes_here = total(held.here for held in one.held.values())
        if self.cell == _WIDE and bytes_here is not None:
            parts.append(_text(x + self.cell - 8, y + 14, amount(bytes_here), palette.muted, "end"))
        for index, kind in enumerate(KINDS):
            if kind in one.held:
                parts.append(self._bar(one, kind, x + 8, y + 20 + index * (_BAR + 3), index))
        return "".join([*parts, "</g>"])

    def _bar(self, one: ShardReport, kind: str, x: float, y: float, index: int) -> str:
        width, held = self.cell - 16, one.held[kind]
        track = f'<rect x="{x}" y="{y}" width="{width}" height="{_BAR}" rx="2.5" fill="{self.palette.track}"/>'
        part = slice_of(one, kind, self.wholes[kind])
        if part is None:
            return track
        colour = self.palette.parts[index]
        fill = f"url(#na-hatch-{index})" if held.offloaded else colour
        edge = f' stroke="{colour}"' if held.offloaded else ""
        begin, share = x + part[0] * width, max(1.5, part[1] * width) if part[1] else 0.0
        return (
            f'{track}<rect x="{begin:.1f}" y="{y}" width="{share:.1f}" height="{_BAR}" rx="2.5" fill="{fill}"{edge}/>'
        )


def _wholes(ranks: Ranks, kind: str) -> list[int | None]:
    """Return the bytes of each pipeline stage; without stages, of the model."""
    found: dict[int, int | None] = {}
    for one in ranks.values():
        if kind in one.held:
            found.setdefault(one.place.get(one.stages, 0), one.held[kind].whole)
    return [found.get(stage, 0) for stage in range(max(found, default=-1) + 1)]


def slice_of(one: ShardReport, kind: str, wholes: Sequence[int | None]) -> tuple[float, float] | None:
    """Return which part of the whole model's bytes a rank holds: where it begins and how long it is, from 0 to 1.

    Args:
        one: What the rank holds.
        kind: Of what.
        wholes: Bytes of each pipeline stage; one number without stages.

    Returns:
        Beginning and length; None: not known.
    """
    held, model = one.held[kind], total(wholes)
    if held.whole is None or held.here is None or model is None or not model:
        return None
    index, parts = 0, math.prod(one.axes[name] for name in held.sharded)
    # What is cut once more is cut inside the rank's own part of the parameters.
    first = one.held[KINDS[0]].sharded if KINDS[0] in one.held else ()
    for name in sorted(held.sharded, key=lambda axis: axis not in first):
        index = index * one.axes[name] + one.place[name]
    before = total(wholes[: one.place.get(one.stages, 0)]) or 0
    share = min(1.0, held.here / model)
    return min((before + held.whole * index / parts) / model, 1.0 - share), share


def _of(held: ShardSizes) -> str:
    if held.whole is None or held.here is None:
        return "not known before the first step"
    return f"{amount(held.here)} of {amount(held.whole)}{f' in {held.offloaded}' if held.offloaded else ''}"


def _hatches(palette: Palette) -> str:
    patterns = "".join(
        f'<pattern id="na-hatch-{index}" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="2.6" height="5" fill="{colour}"/></pattern>'
        for index, colour in enumerate(palette.parts)
    )
    return f"<defs>{patterns}</defs>"


def _text(x: float, y: float, words: str, colour: str, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}">'
        f"{escape(words)}</text>"
    )


__all__ = ["PAPER", "SCREEN", "Grid", "Palette", "described", "image", "mesh_rows", "picture", "slice_of"]
