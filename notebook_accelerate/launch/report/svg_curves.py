"""Curves as SVG pictures for reports: no script, no outside reference, legible on light and on dark paper."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from notebook_accelerate.telemetry.downsampling import m4

if TYPE_CHECKING:
    import numpy as np

    from notebook_accelerate.telemetry import MetricSeries, Store

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 30, 26
MAX_TRACKS = 8
"""Of more ranks than this the band is drawn, and at most four single ones: the eye could not tell them apart."""
POINTS = 400
# Mid-tones: at least 3:1 against white and against a dark notebook's #111.
COLOURS = ("#3b82d6", "#d9662b", "#2a9a68", "#a85fd0", "#c4881c", "#1b98a6", "#d64f86", "#7f7f7f")
INK, GRID = "#7a7a7a", "#808080"


@dataclass(frozen=True)
class Track:
    """One line of a picture.

    Attributes:
        label: What it is called in the legend.
        x: Steps or seconds, float64, shape (n,).
        y: Values, float64, shape (n,); those that are not finite are gaps.
        low: Lower edge of the band around the line, float64, shape (n,); None: there is none.
        high: Upper edge.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def tracks_of(store: Store, name: str, chosen: Sequence[int] = ()) -> list[Track]:
    """Return one track per rank that logged ``name``, thinned to what a picture can show; of many ranks their band.

    Args:
        store: Where they are.
        name: The metric.
        chosen: Ranks that are drawn over a band, at most four.
    """
    ranks, tracks = store.ranks_of(name), []
    band = store.band(name) if len(ranks) > MAX_TRACKS else None
    if band is not None:
        x = band.times - band.times[0] if math.isnan(band.steps[0]) else band.steps
        tracks.append(Track(f"mean and range of {len(ranks)} ranks", x, band.mean, band.low, band.high))
        ranks = [rank for rank in chosen if rank in ranks][: MAX_TRACKS // 2]
    for rank in ranks:
        tail = store.tail(name, rank)
        x = tail.times - tail.times[0] if tail.steps[0] < 0 else tail.steps.astype(float)
        kept = m4(tail.values, POINTS)
        tracks.append(Track(f"rank {rank}", x[kept], tail.values[kept]))
    return tracks


def image(title: str, tracks: Sequence[Track], alt: str) -> str:
    """Return an ``img`` element with the picture in a data URI."""
    data = base64.b64encode(svg(title, tracks).encode()).decode()
    source = f"data:image/svg+xml;base64,{data}"
    return f'<img alt="{escape(alt)}" width="{WIDTH}" height="{HEIGHT}" src="{source}" />'


def description(series: MetricSeries) -> str:
    """Return what a curve shows in words, for those who do not see it."""
    import numpy as np

    ranks = len(set(series.ranks.tolist()))
    of = "1 rank" if ranks == 1 else f"{ranks} ranks"
    finite = np.isfinite(series.values)
    text = f"Curve of {series.name}: {len(series.values):,} points of {of}"
    if not finite.any():
        return f"{text}, none of them finite"
    values, steps = series.values[finite], series.steps[finite]
    low, high = int(values.argmin()), int(values.argmax())
    text += f"; first {number(values[0])}, last {number(values[-1])}"
    text += f", smallest {number(values[low])}{_at(steps[low])}, largest {number(values[high])}{_at(steps[high])}"
    gaps = int((~finite).sum())
    return f"{text}; {gaps:,} not finite" if gaps else text


def _at(step: int) -> str:
    return f" at step {step:,}" if step >= 0 else ""


def labels(values: Sequence[float]) -> list[str]:
    """Return the numbers of an axis, with as many digits as it takes to tell neighbours apart."""
    if len(values) < 2:
        return [number(value) for value in values]
    largest, step = max(map(abs, values)), abs(values[1] - values[0])
    digits = max(4, 2 + math.ceil(math.log10(largest / step))) if step else 4
    return [number(value, digits) for value in values]


def number(value: float, digits: int = 4) -> str:
    """Return a number as an axis or a table shows it: so many digits at most, no trailing zeros."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size and (size >= 1e6 or size < 1e-3):
        mantissa, _, exponent = f"{value:.{digits - 2}e}".partition("e")
        return f"{float(mantissa):.{digits}g}e{int(exponent)}"
    return f"{value:.{digits}g}"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers from ``low`` to ``high``, about so many."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def svg(title: str, tracks: Sequence[Track]) -> str:
    """Return the picture itself."""
    frame = _Frame(tracks)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="11"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        _text(LEFT, 16, _shortened(title, 34), "start", "font-weight='600' font-size='12.5'"),
        *_legend(tracks),
        *frame.axes(),
    ]
    parts += [frame.band(track, COLOURS[index % len(COLOURS)]) for index, track in enumerate(tracks)]
    parts += [frame.line(track, COLOURS[index % len(COLOURS)]) for index, track in enumerate(tracks)]
    return "".join([*parts, "</svg>"])


class _Frame:
    """The mapping from numbers to the place they are drawn at."""

    def __init__(self, tracks: Sequence[Track]) -> None:
        self.x0, self.x1 = _bounds([track.x for track in tracks], 0.0)
        edges = [edge for track in tracks for edge in (track.low, track.high) if edge is not None]
        self.y0, self.y1 = _bounds([*(track.y for track in tracks), *edges], 0.06)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> list[str]:
        parts = []
        rows = ticks(self.y0, self.y1, 4)
        for value, label in zip(rows, labels(rows), strict=True):
            y = f"{self.y(value):.1f}"
            stroke = f'stroke="{GRID}" stroke-opacity=".22"'
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" {stroke}/>')
            parts.append(_text(LEFT - 7, self.y(value) + 3.8, label, "end"))
        below = HEIGHT - BOTTOM + 17
        parts += [_text(self.x(value), below, f"{value:,.10g}", "middle") for value in ticks(self.x0, self.x1, 5)]
        return parts

    def band(self, track: Track, colour: str) -> str:
        if track.low is None or track.high is None:
            return ""
        edges = zip(track.x.tolist(), track.low.tolist(), track.high.tolist(), strict=True)
        inside = [(x, low, high) for x, low, high in edges if math.isfinite(low) and math.isfinite(high)]
        above = [f"{self.x(x):.1f} {self.y(high):.1f}" for x, _, high in inside]
        below = [f"{self.x(x):.1f} {self.y(low):.1f}" for x, low, _ in reversed(inside)]
        return f'<path d="M{"L".join([*above, *below])}Z" fill="{colour}" fill-opacity=".22"/>' if inside else ""

    def line(self, track: Track, colour: str) -> str:
        pieces: list[list[str]] = [[]]
        for x, y in zip(track.x.tolist(), track.y.tolist(), strict=True):
            if math.isfinite(y):
                pieces[-1].append(f"{self.x(x):.1f} {self.y(y):.1f}")
            elif pieces[-1]:
                pieces.append([])
        path = "".join(f"M{'L'.join(piece)}" + ("h.01" if len(piece) == 1 else "") for piece in pieces if piece)
        return (
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round" '
            'stroke-linecap="round"/>'
        )


def _bounds(columns: Sequence[np.ndarray], margin: float) -> tuple[float, float]:
    import numpy as np

    values = np.concatenate(columns) if columns else np.empty(0)
    values = values[np.isfinite(values)]
    # Halves: the span of numbers near the largest that there are would overflow.
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low, high = max(low, -8e307), min(high, 8e307)
    if low == high:
        spread = abs(low) * 0.1 or 1.0
        return low - spread, high + spread
    return low - margin * (high - low), high + margin * (high - low)


def _legend(tracks: Sequence[Track]) -> list[str]:
    banded = any(track.low is not None for track in tracks)
    if len(tracks) < 2 and not banded:
        return []
    parts, right = [], float(WIDTH - RIGHT)
    for index in reversed(range(len(tracks))):
        label = _shortened("mean, range" if tracks[index].low is not None else tracks[index].label, 12)
        label = label if banded else label.removeprefix("rank ")
        right -= 6.2 * len(label)
        parts.append(_text(right, 16, label, "start"))
        parts.append(f'<circle cx="{right - 8:.1f}" cy="12" r="3.5" fill="{COLOURS[index % len(COLOURS)]}"/>')
        right -= 20
    if not banded and all(track.label.startswith("rank ") for track in tracks):
        parts.append(_text(right + 2, 16, "rank", "end"))
    return parts


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    visible = "".join(character if character.isprintable() else "�" for character in text)
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}" {more}>{escape(visible)}</text>'


__all__ = ["COLOURS", "MAX_TRACKS", "Track", "description", "image", "number", "svg", "ticks", "tracks_of"]
