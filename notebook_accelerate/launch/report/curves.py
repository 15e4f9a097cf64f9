"""The curves of metrics: which curves a view draws, and their points.

The live plot, the images in reports and the plots of ``run.metrics`` all use this module. They differ in the number of
points, and in how many ranks have a separate curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from notebook_accelerate.telemetry.curves import m4

if TYPE_CHECKING:
    import numpy as np

    from notebook_accelerate.telemetry import Store

ENVELOPE = -1
"""The number that stands for the envelope of all ranks, in place of a rank."""
ENVELOPE_LABEL = "all ranks: min, mean, max"


class Curve(NamedTuple):
    """The points of one line.

    Attributes:
        label: The name of the line in the legend.
        x: The steps, or seconds for points without a step, float64, shape (n,).
        y: The values, float64, shape (n,). Values that are not finite are drawn as gaps.
        low: The lower edge of the envelope around the line, float64, shape (n,), or None if there is no envelope.
        high: The upper edge of the envelope, like ``low``.
        seconds: The seconds since the origin of the source, float64, shape (n,), or None if they are the same as ``x``.
        cursor: The cursor for reading the points that follow.
        whole: Whether this is the whole curve, rather than only the points after the cursor. In an envelope, new points
            replace all earlier points from their first ``x`` on.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    seconds: np.ndarray | None = None
    cursor: tuple[int, int] = (0, 0)
    whole: bool = True


class Series(NamedTuple):
    """One metric of one rank, or the envelope of all ranks."""

    store: Store
    origin: float
    name: str
    rank: int
    label: str
    since: float = 0.0

    def read(self, points: int, cursor: tuple[int, int] = (0, 0)) -> Curve:
        """Return the points since ``cursor``, downsampled by M4.

        Args:
            points: The approximate number of points to keep. Ignored for envelopes, whose size is always limited.
            cursor: The cursor of the curve that the last call returned, or (0, 0) for all points.
        """
        import numpy as np

        if self.rank == ENVELOPE:
            return self._read_envelope(cursor)
        tail = self.store.tail(self.name, self.rank, cursor)
        # A branch starts at its last point before `since`, so that its curve leaves that of the earlier run there.
        first = max(0, int(np.searchsorted(tail.times, self.since, "right")) - 1) if tail.whole else 0
        steps, times, y = tail.steps[first:], tail.times[first:], tail.values[first:]
        if len(y) > points:
            kept = m4(y, points)
            steps, times, y = steps[kept], times[kept], y[kept]
        seconds = times - self.origin
        x = np.where(steps < 0, seconds, steps)
        return Curve(self.label, x, y, None, None, seconds, tail.cursor, tail.whole)

    def _read_envelope(self, cursor: tuple[int, int]) -> Curve:
        import numpy as np

        tail = self.store.envelope(self.name, cursor)
        assert tail is not None, "the store keeps an envelope for any number of ranks that no view draws individually"
        seconds = tail.times - self.origin
        x = np.where(np.isnan(tail.steps), seconds, tail.steps)
        return Curve(self.label, x, tail.mean, tail.low, tail.high, seconds, tail.cursor, not math.isfinite(tail.cut))


@dataclass
class Source:
    """A run whose metrics are drawn.

    Attributes:
        store: The store with the run's metrics.
        origin: The time where the time axis starts, in seconds since the epoch.
        label: The first part of each curve's name. If ``ranks`` is set, the rank follows.
        ranks: Whether each rank has a curve. If not, only the lowest rank that logged a metric is drawn.
        chosen: The ranks to draw on top of an envelope.
        automatic: Whether to include the metrics that are recorded without logging.
        since: The time before which no points are drawn, except the last one, in seconds since the epoch.
    """

    store: Store
    origin: float
    label: str = ""
    ranks: bool = True
    chosen: Sequence[int] = ()
    automatic: bool = False
    since: float = 0.0

    def names(self) -> list[str]:
        """Return the names of the metrics to draw."""
        more = self.store.automatic.metric_names() if self.automatic else []
        return list(dict.fromkeys([*self.store.metric_names(), *more]))

    def store_of(self, name: str) -> Store:
        """Return the store that holds a metric. A logged metric hides an automatic one with the same name."""
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[Store, list[int]]:
        """Return the store that holds a metric, and the ranks that have points."""
        ranks = self.store.ranks_of(name)
        if ranks or not self.automatic:
            return self.store, ranks
        return self.store.automatic, self.store.automatic.ranks_of(name)

    def series(self, names: Sequence[str], few: int) -> Iterator[Series]:
        """Yield the curves to draw for some metrics. Curves without points are left out.

        Args:
            names: The names of the metrics.
            few: Maximum number of ranks with separate curves. If there are more, they are drawn as an envelope, and
                at most half as many chosen ranks on top, because readers cannot distinguish more curves.
        """
        for name in names:
            store, ranks = self._find(name)
            if self.ranks and len(ranks) > few:
                yield Series(store, self.origin, name, ENVELOPE, ENVELOPE_LABEL)
                ranks = [rank for rank in self.chosen if rank in ranks][: few // 2]
            for rank in ranks if self.ranks else ranks[:1]:
                own = f"rank {rank}" if self.ranks else ""
                yield Series(store, self.origin, name, rank, " · ".join(filter(None, (self.label, own))), self.since)


def shown_names(sources: Sequence[Source]) -> list[str]:
    """Return the names of the logged metrics, and of the automatic ones of runs that have logged nothing."""
    names = dict.fromkeys(name for source in sources for name in source.store.metric_names())
    for source in sources:
        if source.automatic and not source.store.metric_names():
            automatic = source.store.automatic.metric_names()
            names.update(dict.fromkeys(name for name in automatic if name.startswith("auto/")))
    return list(names)
