"""Plots of metrics: by matplotlib where it is installed, otherwise the curves of the static report."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.report import svg_curves
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.report.svg_curves import COLOURS, MAX_TRACKS, POINTS, Track
from notebook_accelerate.telemetry.downsampling import m4

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from notebook_accelerate.telemetry import MetricSeries

COLUMNS = 2
INCHES = (5.2, 2.9)
"""Width and height of one metric."""


@dataclass(frozen=True)
class CurveImages:
    """Curves of the static report, where matplotlib is not installed.

    Attributes:
        html: One image for each metric.
        text: What a front end without HTML shows.
    """

    html: Markup
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def plot(several: Sequence[MetricSeries], ax: Axes | None = None) -> Any:
    """Plot metrics, each with a line per rank; with more than eight ranks, their mean and range.

    Args:
        several: The metrics.
        ax: matplotlib's axes for a single metric; None: a new figure.

    Returns:
        matplotlib's axes, one or an array of them; images of the static report where it is not installed.

    Raises:
        ImportError: Axes are given, and matplotlib is not installed.
        ValueError: There is no metric.
    """
    if not several:
        raise ValueError("there is no metric to plot: log one with accelerator.log({...}, step=step)")
    if importlib.util.find_spec("matplotlib") is None and ax is None:
        images = [svg_curves.image(each.name, tracks(each), svg_curves.description(each)) for each in several]
        return CurveImages(element("div", join(images, " ")), "\n".join(map(svg_curves.description, several)))
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
    for track, colour in zip(tracks(series), COLOURS, strict=False):
        if track.low is not None and track.high is not None:
            ax.fill_between(track.x, track.low, track.high, color=colour, alpha=0.22, linewidth=0)
        ax.plot(track.x, track.y, color=colour, linewidth=1.4, label=track.label)
    ax.set_title(series.name, loc="left", fontsize="medium")
    ax.set_xlabel("step" if _has_steps(series) else "seconds")
    ax.grid(alpha=0.3, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if len(ax.lines) > 1:
        ax.legend(frameon=False, fontsize="small")
    return ax


def tracks(series: MetricSeries) -> list[Track]:
    """Return one downsampled track per rank of a series; with more than eight ranks, their mean and range.

    Args:
        series: One metric.
    """
    import numpy as np

    places = series.steps.astype(float) if _has_steps(series) else series.times - series.times.min(initial=math.inf)
    ranks = np.unique(series.ranks).tolist()
    if len(ranks) > MAX_TRACKS:
        x, where = np.unique(places, return_inverse=True)
        low, high = np.full(len(x), np.inf), np.full(len(x), -np.inf)
        np.minimum.at(low, where, series.values)
        np.maximum.at(high, where, series.values)
        mean = np.bincount(where, series.values) / np.bincount(where)
        return [Track(f"mean and range of {len(ranks)} ranks", x, mean, low, high)]
    found = []
    for rank in ranks:
        own = series.ranks == rank
        kept = m4(series.values[own], POINTS)
        found.append(Track(f"rank {rank}", places[own][kept], series.values[own][kept]))
    return found


def _has_steps(series: MetricSeries) -> bool:
    return bool(len(series.steps) and (series.steps >= 0).all())
