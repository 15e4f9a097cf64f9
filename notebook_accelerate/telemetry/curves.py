"""The curves of metrics: the series that users read and plot, the envelope of many ranks, and downsampling."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes


class MetricSeries(NamedTuple):
    """The points of one metric on all ranks, in chronological order.

    Attributes:
        name: The name of the metric.
        steps: The step of each point, or -1 for a point without a step. int64, shape (n,).
        times: The time of each point, in seconds since the epoch. float64, shape (n,).
        ranks: The rank that logged each point. int64, shape (n,).
        values: The value of each point. float64, shape (n,).
        thinned: Whether points were removed to stay within the store's bounds. Extremes are kept.
    """

    name: str
    steps: np.ndarray
    times: np.ndarray
    ranks: np.ndarray
    values: np.ndarray
    thinned: bool

    def rank(self, rank: int) -> MetricSeries:
        """Return only the points that ``rank`` logged."""
        mask = self.ranks == rank
        return MetricSeries(
            self.name, self.steps[mask], self.times[mask], self.ranks[mask], self.values[mask], self.thinned
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with the columns step, time, rank and value. This needs pandas."""
        import pandas as pd

        columns = {"step": self.steps, "time": self.times, "rank": self.ranks, "value": self.values}
        return pd.DataFrame(columns)

    def plot(self, ax: Axes | None = None) -> Any:
        """Plot the values against steps, or against seconds if points have no step.

        Each rank has a line. For more than eight ranks, the plot shows their mean and range.

        Args:
            ax: The matplotlib axes to draw into. By default, a new figure is created.

        Returns:
            The matplotlib axes, or, if matplotlib is not installed, the image that reports show.

        Raises:
            ImportError: ``ax`` is passed, but matplotlib is not installed.
        """
        return plot_series([self], ax)


Plotter = Callable[[Sequence[MetricSeries], "Axes | None"], Any]
_plotter: Plotter | None = None


def plot_with(plotter: Plotter) -> None:
    """Set the function that plots metrics. It is not imported here, because ranks import this module too."""
    global _plotter  # noqa: PLW0603 - a kernel has one kind of chart
    _plotter = plotter


def plot_series(several: Sequence[MetricSeries], ax: Axes | None = None) -> Any:
    """Plot metrics with the function that was passed to `plot_with`."""
    assert _plotter is not None, "call plot_with() first, as Run.metrics does"
    return _plotter(several, ax)


# ---- the envelope of many ranks: the smallest, the mean and the largest value in each range of steps
#
# Hundreds of curves are illegible, and too many for a front end. Instead, the store keeps an envelope of at most
# `MAX_BUCKETS` buckets, and adds every point to its bucket. When more buckets would be needed, pairs of neighbours are
# merged, so that each bucket covers twice as many steps.

FEW_RANKS = 8
"""A metric has an envelope if more than this many ranks log it."""
MAX_BUCKETS = 512
_PER_SECOND = 4.0
"""Number of buckets per second at the beginning, for a metric that is logged without steps."""


class EnvelopeTail(NamedTuple):
    """The buckets of an envelope that changed since a cursor.

    Attributes:
        steps: The step in the middle of each bucket, or NaN if the metric has no steps. float64, shape (n,).
        times: The mean time of each bucket's points, in seconds since the epoch. float64, shape (n,).
        low: The smallest finite value in each bucket. float64, shape (n,).
        mean: The mean of each bucket, which is not finite if one of the values is not finite. float64, shape (n,).
        high: The largest finite value in each bucket. float64, shape (n,).
        cut: The step up to which the results of earlier calls remain valid, or the time if there are no steps.
        cursor: The cursor to pass to the next call.
    """

    steps: np.ndarray
    times: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    cut: float
    cursor: tuple[int, int]


class MetricEnvelope:
    """The smallest, mean and largest value of a metric across all ranks, in buckets of equal width."""

    def __init__(self) -> None:
        self._begin: int | None = None
        self._origin = 0.0
        self._timed = False
        self._width = 1
        self._merged = 0
        self._version = 1
        self._count, self._changed = array("q"), array("q")
        self._sum, self._time, self._low, self._high = (array("d") for _ in range(4))

    def add(self, step: int, time: float, value: float) -> None:
        """Add a point.

        Args:
            step: The step, or -1 for a point without a step.
            time: Seconds since the epoch.
            value: The value, which may be NaN or infinite.
        """
        if self._begin is None:
            self._timed, self._origin = step < 0, time
            self._begin = 0 if self._timed else step
        key = int((time - self._origin) * _PER_SECOND) if self._timed else step
        index = (key - self._begin) // self._width
        if not 0 <= index < len(self._count):
            if key < 0 and not self._timed:  # Ignore a point without a step if the metric's other points have one.
                return
            index = self._create_bucket(key)
        self._count[index] += 1
        self._changed[index] = self._version
        self._sum[index] += value
        self._time[index] += time
        if value - value == 0.0:  # The value is finite. Comparisons are faster than min and max.
            if value < self._low[index]:  # noqa: PLR1730
                self._low[index] = value
            if value > self._high[index]:  # noqa: PLR1730
                self._high[index] = value

    def since(self, cursor: tuple[int, int] = (0, 0)) -> EnvelopeTail:
        """Return the buckets from the first one that has changed since ``cursor``."""
        import numpy as np

        changed = np.frombuffer(self._changed, dtype=np.int64) > (cursor[1] if cursor[0] == self._merged else 0)
        first = int(changed.argmax()) if changed.any() else len(changed)
        counts = np.array(self._count[first:], dtype=np.int64)
        used = counts > 0
        at = ((self._begin or 0) + (first + np.arange(len(counts))) * self._width + (self._width - 1) // 2)[used]
        number = counts[used]
        low, high = (np.array(column[first:], dtype=float)[used] for column in (self._low, self._high))
        times = np.array(self._time[first:], dtype=float)[used] / number
        mean = np.array(self._sum[first:], dtype=float)[used] / number
        # Rounding may place the mean of equal values outside their range.
        mean = np.where(np.isfinite(mean), np.clip(mean, low, high), mean)
        cut = (float("-inf") if not first else float(times[0] if self._timed else at[0])) if len(at) else float("inf")
        self._version += 1
        return EnvelopeTail(
            np.full(len(at), np.nan) if self._timed else at.astype(float),
            times,
            np.where(np.isfinite(low), low, np.nan),
            mean,
            np.where(np.isfinite(high), high, np.nan),
            cut,
            (self._merged, self._version - 1),
        )

    def _create_bucket(self, key: int) -> int:
        """Create the bucket that contains ``key``, and return its index."""
        assert self._begin is not None
        while key < self._begin:
            missing = -(-(self._begin - key) // self._width)
            if missing <= MAX_BUCKETS:
                self._extend(missing, front=True)
                self._begin -= missing * self._width
            else:
                self._merge()
        while (index := (key - self._begin) // self._width) >= MAX_BUCKETS or len(self._count) > MAX_BUCKETS:
            self._merge()
        if index >= len(self._count):
            self._extend(index + 1 - len(self._count), front=False)
        return index

    def _extend(self, count: int, *, front: bool) -> None:
        for name, kind, empty in _COLUMNS:
            more, column = array(kind, [empty]) * count, getattr(self, name)
            setattr(self, name, more + column if front else column + more)

    def _merge(self) -> None:
        """Merge pairs of neighbouring buckets, which doubles their width."""
        if len(self._count) % 2:
            self._extend(1, front=False)
        joins = {"_low": min, "_high": max, "_changed": max}
        for name, kind, _ in _COLUMNS:
            column, join = getattr(self, name), joins.get(name, lambda a, b: a + b)
            setattr(self, name, array(kind, map(join, column[::2], column[1::2])))
        self._width *= 2
        self._merged += 1


_COLUMNS = (
    ("_count", "q", 0),
    ("_changed", "q", 0),
    ("_sum", "d", 0.0),
    ("_time", "d", 0.0),
    ("_low", "d", math.inf),
    ("_high", "d", -math.inf),
)


# ---- downsampling
#
# M4 keeps the first, the last, the smallest and the largest value of every group of neighbours, so that a line through
# the kept points has the same extremes, and the same segments between groups, as the complete line
# (Jugel, Jerzak, Hackenbroich and Markl, "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014). A
# group with NaN also keeps one NaN, because readers look for it.


def m4(values: np.ndarray, points: int) -> np.ndarray:
    """Return the indices of the values that M4 keeps.

    Args:
        values: The values in drawing order. float64, shape (n,).
        points: The approximate number of points to keep, at least 4. NaN values may add a quarter of this number.

    Returns:
        The indices in ascending order, int64. If n is at most ``points``, all indices.
    """
    import numpy as np

    count = len(values)
    if count <= points:
        return np.arange(count)
    size = -(-count // max(1, points // 4))
    full = count // size * size
    base = np.arange(0, full, size)
    kept = [base, base + size - 1, *extremes(values[:full], size)]
    if full < count:  # The last group may be shorter.
        kept.append(full + m4(values[full:], 4) if count - full > 4 else np.arange(full, count))
    return np.unique(np.concatenate(kept))


def extremes(values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of each group's smallest and largest value, and of one NaN for each group that has any.

    Args:
        values: The values in drawing order. float64, shape (n,), where n is a multiple of ``size``.
        size: The number of neighbouring values in each group.
    """
    import numpy as np

    groups = values.reshape(-1, size)
    first = np.arange(0, len(values), size)
    missing = np.isnan(groups)
    rows = missing.any(axis=1)
    return (
        first + np.where(missing, np.inf, groups).argmin(axis=1),
        first + np.where(missing, -np.inf, groups).argmax(axis=1),
        first[rows] + missing[rows].argmax(axis=1),
    )
