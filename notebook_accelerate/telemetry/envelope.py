"""The envelope of one metric over all ranks: the smallest, the mean and the largest value of each range of steps.

The curves of many ranks are drawn as an envelope: hundreds of curves are illegible, and too many for a front end. The
store updates an envelope with every point, at the cost of one addition, in at most ``MAX_BUCKETS`` buckets: when more
are needed, neighbours are merged, and each bucket covers twice as many steps.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

FEW_RANKS = 8
"""Metrics of more ranks have an envelope."""
MAX_BUCKETS = 512
_PER_SECOND = 4.0
"""Initial buckets per second, for a metric that is logged without steps."""


class EnvelopeTail(NamedTuple):
    """The buckets of an envelope that changed since a cursor.

    Attributes:
        steps: Middle of each bucket, float64, shape (n,); NaN where no steps were given.
        times: Mean time of the points, in seconds since the epoch, float64, shape (n,).
        low: Smallest finite value, float64, shape (n,).
        mean: Mean, float64, shape (n,); not finite where a value was not.
        high: Largest finite value, float64, shape (n,).
        cut: Earlier results are valid only up to here, in ``steps`` or, without those, ``times``.
        cursor: The cursor for the next call.
    """

    steps: np.ndarray
    times: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    cut: float
    cursor: tuple[int, int]


class MetricEnvelope:
    """Buckets of equal width; the first one starts at the first point."""

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
            step: The step; -1 where none was given.
            time: Seconds since the epoch.
            value: Any float.
        """
        if self._begin is None:
            self._timed, self._origin = step < 0, time
            self._begin = 0 if self._timed else step
        key = int((time - self._origin) * _PER_SECOND) if self._timed else step
        index = (key - self._begin) // self._width
        if not 0 <= index < len(self._count):
            if key < 0 and not self._timed:  # no step, where other points have one
                return
            index = self._create_bucket(key)
        self._count[index] += 1
        self._changed[index] = self._version
        self._sum[index] += value
        self._time[index] += time
        if value - value == 0.0:  # finite; comparing is faster than min and max
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
        at = ((self._begin or 0) + (first + np.arange(len(counts)) + 0.5) * self._width - 0.5)[used]
        number = counts[used]
        low, high = (np.array(column[first:], dtype=float)[used] for column in (self._low, self._high))
        times = np.array(self._time[first:], dtype=float)[used] / number
        cut = (float("-inf") if not first else float(times[0] if self._timed else at[0])) if len(at) else float("inf")
        self._version += 1
        return EnvelopeTail(
            np.full(len(at), np.nan) if self._timed else at,
            times,
            np.where(np.isfinite(low), low, np.nan),
            np.array(self._sum[first:], dtype=float)[used] / number,
            np.where(np.isfinite(high), high, np.nan),
            cut,
            (self._merged, self._version - 1),
        )

    def _create_bucket(self, key: int) -> int:
        """Create the bucket of ``key`` and return its index."""
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
        """Merge pairs of buckets."""
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
