"""The curves of metrics: which ones a view draws, and their points.

The live plot, the images of reports and the plots of ``run.metrics`` read them here; they differ in the number of ranks
that have a curve each, and in the number of points.
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
"""Stands for the rank of an envelope."""
ENVELOPE_LABEL = "all ranks: min, mean, max"


class Curve(NamedTuple):
    """The points of one line.

    Attributes:
        label: Its name in the legend.
        x: Steps, float64, shape (n,); seconds for the points without a step.
        y: Values, float64, shape (n,); values that are not finite are gaps.
        low: Lower edge of the envelope around the line, float64, shape (n,); None: no envelope.
        high: Upper edge.
        seconds: Times since the origin of the source, float64, shape (n,); None: the same as ``x``.
        cursor: The cursor for the next points.
        whole: Whether these are all points; otherwise they continue earlier ones. The points of an envelope replace
            the earlier ones from their first ``x`` on.
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

    def read(self, points: int, cursor: tuple[int, int] = (0, 0)) -> Curve:
        """Return the points since ``cursor``, downsampled by M4.

        Args:
            points: Points of a rank that are kept, approximately; an envelope has a bounded number.
            cursor: From the last call; (0, 0) for all points.
        """
        import numpy as np

        if self.rank == ENVELOPE:
            return self._read_envelope(cursor)
        tail = self.store.tail(self.name, self.rank, cursor)
        steps, times, y = tail.steps, tail.times, tail.values
        if len(y) > points:
            kept = m4(y, points)
            steps, times, y = steps[kept], times[kept], y[kept]
        seconds = times - self.origin
        x = np.where(steps < 0, seconds, steps)
        return Curve(self.label, x, y, None, None, seconds, tail.cursor, tail.whole)

    def _read_envelope(self, cursor: tuple[int, int]) -> Curve:
        import numpy as np

        tail = self.store.envelope(self.name, cursor)
        assert tail is not None, "the store keeps one for fewer ranks than any view draws one by one"
        seconds = tail.times - self.origin
        x = np.where(np.isnan(tail.steps), seconds, tail.steps)
        return Curve(self.label, x, tail.mean, tail.low, tail.high, seconds, tail.cursor, not math.isfinite(tail.cut))


@dataclass
class Source:
    """A run whose metrics are drawn.

    Attributes:
        store: Its metrics.
        origin: Zero of the time axis, in seconds since the epoch.
        label: Begins the name of each curve; the rank follows if ``ranks``.
        ranks: Whether each rank has a curve; otherwise the lowest rank that logged a metric is drawn.
        chosen: Ranks drawn over an envelope.
        automatic: Whether the metrics that are sampled without logging are drawn, too.
    """

    store: Store
    origin: float
    label: str = ""
    ranks: bool = True
    chosen: Sequence[int] = ()
    automatic: bool = False

    def names(self) -> list[str]:
        """Return the metrics that are drawn."""
        more = self.store.automatic.metric_names() if self.automatic else []
        return list(dict.fromkeys([*self.store.metric_names(), *more]))

    def store_of(self, name: str) -> Store:
        """Return the store of a metric: a metric that was logged hides an automatic one of its name."""
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[Store, list[int]]:
        """Return the store of a metric, and the ranks that it has points of."""
        ranks = self.store.ranks_of(name)
        if ranks or not self.automatic:
            return self.store, ranks
        return self.store.automatic, self.store.automatic.ranks_of(name)

    def series(self, names: Sequence[str], few: int) -> Iterator[Series]:
        """Yield the curves of these metrics, those without points left out.

        Args:
            names: The metrics.
            few: Most ranks that have a curve each. More ranks have an envelope, and at most half as many of the chosen
                ranks are drawn over it: readers cannot distinguish more curves.
        """
        for name in names:
            store, ranks = self._find(name)
            if self.ranks and len(ranks) > few:
                yield Series(store, self.origin, name, ENVELOPE, ENVELOPE_LABEL)
                ranks = [rank for rank in self.chosen if rank in ranks][: few // 2]
            for rank in ranks if self.ranks else ranks[:1]:
                own = f"rank {rank}" if self.ranks else ""
                yield Series(store, self.origin, name, rank, " · ".join(filter(None, (self.label, own))))


def shown_names(sources: Sequence[Source]) -> list[str]:
    """Return the metrics that runs have logged; of runs that have logged none, the automatic ones."""
    names = dict.fromkeys(name for source in sources for name in source.store.metric_names())
    for source in sources:
        if source.automatic and not source.store.metric_names():
            automatic = source.store.automatic.metric_names()
            names.update(dict.fromkeys(name for name in automatic if name.startswith("auto/")))
    return list(names)
