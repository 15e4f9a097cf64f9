"""Metric curves as SVG images for reports, which are legible on light and dark backgrounds."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.report.curves import Curve, Source, shown_names
from notebook_accelerate.launch.report.markup import Markup, element, join, number, svg_drawing, svg_image, svg_text
from notebook_accelerate.telemetry import Store
from notebook_accelerate.telemetry.curves import FEW_RANKS
from notebook_accelerate.telemetry.store import SeriesTail

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

    from notebook_accelerate.telemetry import MetricSeries


WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 30, 26
DIGIT = 6.4
"""The width of a digit in a label, in pixels."""
POINTS = 400
MAX_IMAGES = 24
"""Maximum number of metrics to show as images. It is low, because a saved notebook stores every image."""
ALONE = 2.6
"""The radius of the mark for an isolated point, which would otherwise be invisible because no line leads to it."""
# These mid-tones have a contrast of at least 3:1 both with white and with #111, the background of dark notebooks,
# because an image cannot follow the theme. The live plot follows it, with the same hues in tones for each theme
# (PALETTE in ``widgets/static/looks.js``).
COLOURS = ("#3b82d6", "#d9662b", "#2a9a68", "#a85fd0", "#c4881c", "#1b98a6", "#d64f86", "#7f7f7f")
INK, GRID = "#7a7a7a", "#808080"


def image(title: str, curves: Sequence[Curve], alt: str) -> Markup:
    """Return a drawing of curves as an ``img`` element.

    Args:
        title: The title above the curves.
        curves: The curves to draw.
        alt: The alternative text for readers who do not see the image.
    """
    return svg_image(svg(title, curves), WIDTH, HEIGHT, alt)


def metric_image(sources: Sequence[Source], name: str) -> Markup:
    """Return the curves of one metric as an ``img`` element. The alt text describes them.

    Args:
        sources: The runs whose curves to draw.
        name: The name of the metric.
    """
    texts = []
    for source in sources:
        if (store := source.store_of(name)).ranks_of(name):
            run = f"{source.label}: " if source.label else ""
            texts.append(run + description(store.series(name)))
    return image(name, curves_of(sources, name), "; ".join(texts))


def metric_images(sources: Sequence[Source]) -> Markup:
    """Return the images of the first ``MAX_IMAGES`` metrics, or "" if there are no metrics.

    Args:
        sources: The runs to draw.
    """
    images = [metric_image(sources, name) for name in shown_names(sources)[:MAX_IMAGES]]
    return element("div", join(images, " ")) if images else Markup()


def curves_of(sources: Sequence[Source], name: str) -> list[Curve]:
    """Return the downsampled curves of one metric.

    Args:
        sources: The runs to draw.
        name: The name of the metric.
    """
    return [series.read(POINTS) for source in sources for series in source.series([name], FEW_RANKS)]


def description(series: MetricSeries) -> str:
    """Return the alt text of the drawing: the number of points, and the first, last, smallest and largest value."""
    import numpy as np

    ranks = len(set(series.ranks.tolist()))
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    finite = np.isfinite(series.values)
    text = f"Curve of {series.name}: {len(series.values):,} points of {count}"
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
    """Return labels for the numbers on an axis, with enough digits to distinguish neighbours."""
    if len(values) < 2:
        return [number(value) for value in values]
    largest, step = max(map(abs, values)), abs(values[1] - values[0])
    digits = max(4, 2 + math.ceil(math.log10(largest / step))) if step else 4
    return [number(value, digits) for value in values]


def ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Return round numbers from ``low`` to ``high``, approximately ``about`` of them, or only integers if ``whole``."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    steps = [factor * power for factor in (1, 2, 2.5, 5, 10)]
    step = next((step for step in steps if step >= raw * 0.999 and not (whole and step % 1)), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def svg(title: str, curves: Sequence[Curve]) -> Markup:
    """Return a drawing of curves as SVG source.

    Args:
        title: The title above the curves.
        curves: The curves to draw.
    """
    shown = _shortened(title, 34)
    legend, rows = _legend(curves, LEFT + BOLD * len(shown))
    frame = _Frame(curves, rows)
    heading = svg_text(frame.left, 16, shown, INK, font_weight=600, font_size=12.5)
    coloured = [(curve, COLOURS[index % len(COLOURS)]) for index, curve in enumerate(curves)]
    envelopes = [frame.envelope(curve, colour) for curve, colour in coloured]
    lines = [frame.line(curve, colour, id=f"c{i}", **_dashes(i)) for i, (curve, colour) in enumerate(coloured)]
    return svg_drawing(WIDTH, HEIGHT, heading, *legend, *frame.axes(), *envelopes, *lines, *_alternating(len(curves)))


class _Frame:
    """The frame of a drawing, which maps values to coordinates.

    Args:
        curves: The curves to draw.
        legend_rows: The number of rows of the legend below the title.
    """

    def __init__(self, curves: Sequence[Curve], legend_rows: int) -> None:
        # Seconds are practically never whole numbers.
        self.has_steps = all(bool((curve.x % 1 == 0).all()) for curve in curves)
        self.x0, self.x1 = _bounds([curve.x for curve in curves], 0.0, alone=1.0)
        self.top = TOP + ROW * legend_rows
        edges = [edge for curve in curves for edge in (curve.low, curve.high) if edge is not None]
        self.y0, self.y1 = _bounds([*(curve.y for curve in curves), *edges], 0.06)
        rows = ticks(self.y0, self.y1, 4)
        self.rows = list(zip(rows, labels(rows), strict=True))
        self.left = max(LEFT, 10 + math.ceil(DIGIT * max((len(label) for _, label in self.rows), default=0)))

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - self.top - BOTTOM)

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def axes(self) -> list[Markup]:
        parts = []
        for value, label in self.rows:
            y = self.y(value)
            parts.append(element("line", x1=self.left, x2=WIDTH - RIGHT, y1=y, y2=y, stroke=GRID, stroke_opacity=".22"))
            parts.append(svg_text(self.left - 7, y + 3.8, label, INK, "end"))
        below = HEIGHT - BOTTOM + 17
        columns = [value for value in ticks(self.x0, self.x1, 5, whole=self.has_steps) if value >= 0]
        unit = "" if self.has_steps else " s"
        return parts + [svg_text(self.x(value), below, f"{value:,.10g}{unit}", INK, "middle") for value in columns]

    def envelope(self, curve: Curve, colour: str) -> Markup:
        if curve.low is None or curve.high is None:
            return Markup()
        edges = zip(curve.x.tolist(), curve.low.tolist(), curve.high.tolist(), strict=True)
        inside = [(x, low, high) for x, low, high in edges if math.isfinite(low) and math.isfinite(high)]
        above, below = [(x, high) for x, _, high in inside], [(x, low) for x, low, _ in reversed(inside)]
        path = self._path(above + below) + "Z"
        return element("path", d=path, fill=colour, fill_opacity=".22") if inside else Markup()

    def line(self, curve: Curve, colour: str, **attributes: str) -> Markup:
        pieces: list[list[tuple[float, float]]] = [[]]
        for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True):
            if math.isfinite(y):
                pieces[-1].append((x, y))
            elif pieces[-1]:
                pieces.append([])
        path = "".join(self._path(piece) for piece in pieces if len(piece) > 1)
        stroke = {"stroke": colour, "stroke_width": 1.6, "stroke_linejoin": "round", "stroke_linecap": "round"}
        dots = [
            element("circle", cx=f"{self.x(x):.1f}", cy=f"{self.y(y):.1f}", r=ALONE, fill=colour)
            for ((x, y),) in (piece for piece in pieces if len(piece) == 1)
        ]
        line = element("path", d=path, fill="none", **stroke, **attributes) if path else Markup()
        return join([line, *dots])


def _bounds(columns: Sequence[np.ndarray], margin: float, alone: float | None = None) -> tuple[float, float]:
    """Return the ends of an axis.

    Args:
        columns: The numbers to show.
        margin: The space before and after them, as a share of their range.
        alone: The space before and after equal numbers, or None for a tenth of them.
    """
    import numpy as np

    values = np.concatenate(columns) if columns else np.empty(0)
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    # Limit values to half of the largest float64. Otherwise, the difference of two numbers could overflow.
    low, high = max(low, -8e307), min(high, 8e307)
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # The mean of equal numbers may be rounded.
        spread = alone or abs(low) * 0.1 or 1.0
        return low - spread, high + spread
    return low - margin * (high - low), high + margin * (high - low)


def _dashes(index: int) -> dict[str, str]:
    """Return the dash pattern of a curve. From the ninth curve on, the colours repeat, and the curves are dashed."""
    return {"stroke_dasharray": "5 3"} if index // len(COLOURS) % 2 else {}


MAX_NAMED = 8
"""Maximum number of curves in the legend."""
MAX_LABEL = 20
"""Maximum number of characters of a label in the legend."""
LETTER, BOLD = 6.2, 7.4
"""The width of a character in the legend and in the title, in pixels."""
ROW = 16
"""The height of a row of the legend, in pixels."""
DASH = 7
"""The length of the dashes of curves with the same values, in pixels."""


def _legend(curves: Sequence[Curve], begin: float) -> tuple[list[Markup], int]:
    """Return the legend, and the number of its rows below the title: 0 if it fits to the right of ``begin``."""
    enveloped = any(curve.low is not None for curve in curves)
    if len(curves) < 2 and not enveloped:
        return [], 0
    if len(curves) > MAX_NAMED:
        return [svg_text(WIDTH - RIGHT, 16, f"{len(curves)} runs", INK, "end")], 0
    labels = [_shortened("mean, range" if curve.low is not None else curve.label, MAX_LABEL) for curve in curves]
    all_ranks = not enveloped and all(label.startswith("rank ") for label in labels)
    labels = [label.removeprefix("rank ") if all_ranks else label for label in labels]
    widths = [LETTER * len(label) + 20 for label in labels]
    word = LETTER * len("rank ") if all_ranks else 0.0
    x, row = WIDTH - RIGHT - sum(widths) - word, 0
    if x < begin:
        x, row = float(LEFT), 1
    parts = [svg_text(x, 16 + ROW * row, "rank", INK)] if all_ranks else []
    x += word
    for index, (label, width) in enumerate(zip(labels, widths, strict=True)):
        if x + width > WIDTH - RIGHT + 1:
            x, row = float(LEFT), row + 1
        parts.append(element("circle", cx=x + 6, cy=12 + ROW * row, r=3.5, fill=COLOURS[index % len(COLOURS)]))
        parts.append(svg_text(x + 14, 16 + ROW * row, label, INK))
        x += width
    return parts, row


def _alternating(count: int) -> list[Markup]:
    """Return dashes of each curve over itself, so that curves with the same values show the colours of all of them."""
    if not 1 < count <= MAX_NAMED:
        return []
    gap = DASH * (count - 1)
    return [
        element("use", href=f"#c{index}", stroke_dasharray=f"{DASH} {gap}", stroke_dashoffset=-DASH * index)
        for index in range(count)
    ]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


# ---- plots of metrics, which matplotlib draws if it is installed

COLUMNS = 2
INCHES = (5.2, 2.9)
"""The width and height of the axes for one metric, in inches."""


@dataclass(frozen=True)
class CurveImages:
    """Images of curves like those in the static report, for environments without matplotlib.

    Attributes:
        html: An image for each metric.
        text: The text for front ends that do not show HTML.
    """

    html: Markup
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def plot(several: Sequence[MetricSeries], ax: Axes | None = None) -> Any:
    """Plot metrics, each with a line for each rank, or with the mean and the range if there are more than eight ranks.

    Args:
        several: The metrics to plot.
        ax: The matplotlib axes for a single metric, or None for a new figure.

    Returns:
        The matplotlib axes, or an array of axes. Without matplotlib, images like those in the static report.

    Raises:
        ImportError: ``ax`` is given, but matplotlib is not installed.
        ValueError: There are no metrics to plot.
    """
    if not several:
        raise ValueError("there is no metric to plot: log one with accelerator.log({...}, step=step)")
    if importlib.util.find_spec("matplotlib") is None and ax is None:
        images = [image(each.name, _curves(each), description(each)) for each in several]
        return CurveImages(element("div", join(images, " ")), "\n".join(map(description, several)))
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    if ax is not None or len(several) == 1:
        return _draw(several[0], ax or pyplot.subplots(figsize=INCHES, layout="constrained")[1])
    columns = min(COLUMNS, len(several))
    rows = math.ceil(len(several) / columns)
    size = (INCHES[0] * columns, INCHES[1] * rows)
    _, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for index, each in enumerate(axes.flat):
        if index < len(several):
            _draw(several[index], each)
        else:
            each.set_axis_off()
    return axes


def _draw(series: MetricSeries, ax: Axes) -> Axes:
    for curve, colour in zip(_curves(series), COLOURS, strict=False):
        label = curve.label
        if curve.low is not None and curve.high is not None:
            label = f"mean and range of {len(set(series.ranks.tolist()))} ranks"
            ax.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.22, linewidth=0)
        ax.plot(curve.x, curve.y, color=colour, linewidth=1.4, alpha=0.8, label=label)
    ax.set_title(series.name, loc="left", fontsize="medium")
    ax.set_xlabel("step" if _has_steps(series) else "seconds")
    ax.grid(alpha=0.3, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if len(ax.lines) > 1:
        ax.legend(frameon=False, fontsize="small")
    return ax


def _curves(series: MetricSeries) -> list[Curve]:
    """Return the curves of a series, which may contain only some of the points of a metric.

    If any point has no step, the x-axis of all points shows the seconds since the first point.
    """
    import numpy as np

    store, origin = Store(), float(series.times.min(initial=math.inf))
    steps = series.steps if _has_steps(series) else np.full_like(series.steps, -1)
    points = SeriesTail(steps, series.times, series.values, (0, 0), whole=True)
    for rank in np.unique(series.ranks).tolist():
        store.add_points(series.name, rank, points.where(series.ranks == rank))
    return curves_of([Source(store, origin)], series.name)


def _has_steps(series: MetricSeries) -> bool:
    return bool(len(series.steps) and (series.steps >= 0).all())
