"""Metric curves in the browser, drawn by uPlot; new points are sent as bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import traitlets

from notebook_accelerate.telemetry.curves import m4
from notebook_accelerate.widgets.feed import Feed
from notebook_accelerate.widgets.panel_elements import asset, script

if TYPE_CHECKING:
    from notebook_accelerate.telemetry import Store
    from notebook_accelerate.telemetry.curves import EnvelopeTail
    from notebook_accelerate.widgets.compared_run import ComparedRun

SCRIPTS = ("uPlot.iife.min.js", "feed.js", "looks.js", "plot.js")
MAX_METRICS = 200
"""Metrics that are sent at a time; the filter selects others."""
MAX_BROWSER_POINTS = 400_000
MAX_SERIES_POINTS = 2_000
"""Points of a curve in its first message, after M4; the browser keeps up to three times as many, then downsamples."""
MAX_NEW_POINTS = 400
"""Points of one series in one update, after M4."""
ENVELOPE_RANKS = 16
"""With more ranks the envelope is drawn: minimum, mean and maximum. Single ranks are drawn over it."""
ENVELOPE_LABEL = "all ranks: min, mean, max"
MAX_CHOSEN, MAX_OUTLIERS = 8, 2
"""Ranks drawn over an envelope: at most as many as there are colours if the user chose them, else the outliers."""
ENVELOPE = -1
"""Stands for the rank of an envelope."""
REFRESH_SECONDS = 30.0
"""Seconds between messages with everything, after ``REFRESH_AGES``."""


@dataclass
class Source:
    """A store whose metrics are drawn.

    Attributes:
        store: The metrics.
        origin: Zero of the time axis, in seconds since the epoch.
        label: Begins the name of each curve; the rank follows if ``ranks``.
        ranks: Whether each rank has a curve; otherwise the first rank that logged a metric is drawn.
        chosen: Ranks drawn over an envelope.
    """

    store: Store
    origin: float
    label: str = ""
    ranks: bool = True
    chosen: tuple[int, ...] = ()
    cursors: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict, repr=False)

    def series(self, names: Sequence[str]) -> Iterator[tuple[str, int, str]]:
        """Yield metric, rank and label of each curve; the rank of an envelope is `ENVELOPE`."""
        for name in names:
            ranks = self.store.ranks_of(name)
            if self.ranks and len(ranks) > ENVELOPE_RANKS:
                yield name, ENVELOPE, ENVELOPE_LABEL
                ranks = [rank for rank in self.chosen if rank in ranks]
            for rank in ranks if self.ranks else ranks[:1]:
                own = f"rank {rank}" if self.ranks else ""
                yield name, rank, " · ".join(part for part in (self.label, own) if part)


def run_sources(run: ComparedRun) -> list[Source]:
    """Return what a run's plot draws: the metrics that its ranks log, and the automatic ones."""
    logged = Source(run.store, run.started)
    return [logged, Source(run.store.automatic, run.started)] if run.config.automatic_metrics else [logged]


def _fits(wanted: str, name: str) -> bool:
    """Return whether a metric matches a user's regular expression, or contains the text if it is none."""
    try:
        return re.search(wanted, name, re.IGNORECASE) is not None
    except re.error:
        return wanted.lower() in name.lower()


def chosen_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a user's text such as "0, 5-7"; other words are ignored."""
    found: list[int] = []
    for part in re.split(r"[,;\s]+", re.sub(r"\s*[-–]\s*", "-", text.strip())):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found += range(int(first), min(int(last or first), int(first) + MAX_CHOSEN) + 1)
    return tuple(dict.fromkeys(found))


class _Packet:
    """Collects series for one message."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self._columns: list[np.ndarray] = []

    def add(self, metric: str, label: str, tail: Any, origin: float, points: int) -> None:
        kept = m4(tail.values, points)
        times = tail.times[kept] - origin
        # A metric logged without steps is drawn over time on both axes.
        steps = np.where(tail.steps[kept] < 0, times, tail.steps[kept])
        self.entries.append((metric, label, len(kept)))
        self._columns += [steps, times, tail.values[kept]]

    def add_envelope(self, metric: str, tail: EnvelopeTail, origin: float) -> None:
        times = tail.times - origin
        x = np.where(np.isnan(tail.steps), times, tail.steps)
        first = float(x[0]) if math.isfinite(tail.cut) else None
        self.entries.append((metric, ENVELOPE_LABEL, len(x), first))
        self._columns += [x, times, tail.mean, tail.low, tail.high]

    def message(self) -> dict[str, Any]:
        data = np.concatenate(self._columns).astype("<f8").tobytes() if self._columns else b""
        return {"series": self.entries, "data": data}


class Plot(Feed):
    """One chart per metric, one curve per rank; its controls work while the kernel is busy.

    Args:
        sources: The stores to draw.
        empty_text: Shown before the first metric that is logged.

    The trait ``order`` lists labels of curves in the order of their colours, for a table beside the plot.
    """

    _esm = script(*SCRIPTS)
    _css = asset("uPlot.min.css") + asset("plot.css")
    wanted: Any = traitlets.Unicode("").tag(sync=True)
    chosen: Any = traitlets.Unicode("").tag(sync=True)
    hidden_metrics: Any = traitlets.Int(0).tag(sync=True)
    empty_text: Any = traitlets.Unicode("").tag(sync=True)
    order: Any = traitlets.List().tag(sync=True)

    def __init__(self, sources: Sequence[Source], empty_text: str = "No metric has been logged yet.") -> None:
        super().__init__(REFRESH_SECONDS, empty_text=empty_text)
        self._sources = list(sources)
        self._filter = ""
        self._outliers: tuple[int, ...] = ()

    def draw(self, sources: Sequence[Source]) -> None:
        """Draw other stores from now on.

        Args:
            sources: The stores to draw.
        """
        self._sources = list(sources)
        self._full_requested = True

    def draw_outliers(self, ranks: Iterable[int]) -> None:
        """Draw the curves of these ranks over the envelopes, unless the user has chosen others.

        Args:
            ranks: The outliers. A rank stays once it is drawn, so that curves do not appear and disappear.
        """
        self._outliers = tuple(dict.fromkeys([*self._outliers, *ranks]))[:MAX_OUTLIERS]

    def _apply_choice(self) -> None:
        """Set which ranks are drawn over the envelopes."""
        chosen = chosen_ranks(self.chosen)[:MAX_CHOSEN] if self.chosen.strip() else self._outliers
        for source in self._sources:
            if source.ranks and source.chosen != chosen:
                source.chosen = chosen
                self._full_requested = True

    def update(self, now: float) -> None:
        """Send the new points, or everything if a view asked for it or may have missed a message.

        Args:
            now: Seconds, on any clock that does not go back.
        """
        names = self._names()
        self._apply_choice()
        # The first points are sent as everything: a view could not ask a busy kernel for the message they continue.
        if self._full_due(now) or self._filter != self.wanted or not self.full:
            self._filter = self.wanted
            self._send_full(names)
        elif not self._send_new(names):
            self._send_full(names)

    def _names(self) -> list[str]:
        names = list(dict.fromkeys(name for source in self._sources for name in source.store.metric_names()))
        if len(names) > MAX_METRICS and self.wanted:
            names = [name for name in names if _fits(self.wanted, name)]
        self.hidden_metrics = max(0, len(names) - MAX_METRICS)
        return names[:MAX_METRICS]

    def _send_full(self, names: Sequence[str]) -> None:
        wanted = [(source, *series) for source in self._sources for series in source.series(names)]
        points = max(100, min(MAX_SERIES_POINTS, MAX_BROWSER_POINTS // max(1, len(wanted))))
        packet = _Packet()
        for source in self._sources:
            source.cursors.clear()
        for source, name, rank, label in wanted:
            if rank == ENVELOPE:
                self._add_envelope(packet, source, name, (0, 0))
                continue
            tail = source.store.tail(name, rank)
            source.cursors[name, rank] = tail.cursor
            packet.add(name, label, tail, source.origin, points)
        if packet.entries or self.full:
            self._send_message("full", packet.message())

    def _add_envelope(self, packet: _Packet, source: Source, name: str, cursor: tuple[int, int]) -> None:
        envelope = source.store.envelope(name, cursor)
        assert envelope is not None, "the store keeps one for fewer ranks than ENVELOPE_RANKS"
        source.cursors[name, ENVELOPE] = envelope.cursor
        if len(envelope.times):
            packet.add_envelope(name, envelope, source.origin)

    def _send_new(self, names: Sequence[str]) -> bool:
        """Send the points since the last message; return False if the store has moved its points."""
        packet = _Packet()
        for source in self._sources:
            for name, rank, label in source.series(names):
                known = source.cursors.get((name, rank))
                if rank == ENVELOPE:
                    if known is None:  # each rank had a curve until now
                        return False
                    self._add_envelope(packet, source, name, known)
                    continue
                tail = source.store.tail(name, rank, known or (0, 0))
                if known is not None and tail.whole and known[1]:
                    return False
                source.cursors[name, rank] = tail.cursor
                if len(tail.values):
                    packet.add(name, label, tail, source.origin, MAX_NEW_POINTS)
        if packet.entries:
            self._send_message("delta", packet.message())
        return True
