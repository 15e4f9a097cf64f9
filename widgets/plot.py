"""Curves in the browser: an anywidget on uPlot, fed with what is new as bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from notebook_accelerate.launch.report import svg_curves
from notebook_accelerate.telemetry.downsampling import m4
from notebook_accelerate.widgets.assets import asset, script

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.telemetry import Store
    from notebook_accelerate.telemetry.envelope import EnvelopeTail

MAX_METRICS = 200
"""Metrics that are sent at a time; the filter reaches the others."""
MAX_BROWSER_POINTS = 400_000
MAX_SERIES_POINTS = 2_000
"""Points that a curve begins with, after M4; the browser lets it grow to three times that, then thins again."""
MAX_NEW_POINTS = 400
"""Points of one series in one update, after M4."""
BAND_RANKS = 16
"""Of more ranks than this the band is drawn: smallest, mean and largest. Single ranks are laid over it."""
BAND_LABEL = "all ranks: mean and range"
MAX_LAID_OVER, MAX_STANDING_OUT = 8, 2
"""Ranks laid over a band: as many as there are colours; and those that nobody asked for."""
BAND = -1
REFRESH_AGES = (0.4, 1.0, 2.0, 4.0, 8.0)
REFRESH_SECONDS = 30.0
"""A view that is opened while the kernel is busy cannot ask for what it missed: it is sent everything now and then,
soon after the beginning and every so many seconds."""


@dataclass
class Source:
    """Where curves come from.

    Attributes:
        store: What is drawn.
        origin: The moment that is zero on the time axis, in seconds since the epoch.
        label: Begins the name of each curve; the rank follows where ``ranks``.
        ranks: Whether there is a curve per rank; otherwise the first rank that logged a metric stands for all.
        laid_over: Ranks whose own curves are drawn where there is a band.
    """

    store: Store
    origin: float
    label: str = ""
    ranks: bool = True
    laid_over: tuple[int, ...] = ()
    cursors: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict, repr=False)

    def series(self, names: Sequence[str]) -> Iterator[tuple[str, int, str]]:
        """Yield metric, rank and label of each curve; the rank of a band is `BAND`."""
        for name in names:
            ranks = self.store.ranks_of(name)
            if self.ranks and len(ranks) > BAND_RANKS:
                yield name, BAND, BAND_LABEL
                ranks = [rank for rank in self.laid_over if rank in ranks]
            for rank in ranks if self.ranks else ranks[:1]:
                own = f"rank {rank}" if self.ranks else ""
                yield name, rank, " · ".join(part for part in (self.label, own) if part)


def chosen_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that somebody typed, as "0, 5-7"; what makes no sense is left out."""
    found: list[int] = []
    for part in re.split(r"[,;\s]+", re.sub(r"\s*[-–]\s*", "-", text.strip())):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found += range(int(first), min(int(last or first), int(first) + MAX_LAID_OVER) + 1)
    return tuple(dict.fromkeys(found))


def sources_of(run: Run) -> list[Source]:
    """Return the source that draws each rank of ``run``."""
    return [Source(run.store, run.started)]


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

    def add_band(self, metric: str, label: str, tail: EnvelopeTail, origin: float) -> None:
        times = tail.times - origin
        x = np.where(np.isnan(tail.steps), times, tail.steps)
        first = float(x[0]) if math.isfinite(tail.cut) else None
        self.entries.append((metric, label, len(x), first))
        self._columns += [x, times, tail.mean, tail.low, tail.high]

    def message(self, seq: int, prev: int) -> dict[str, Any]:
        data = np.concatenate(self._columns).astype("<f8").tobytes() if self._columns else b""
        return {"seq": seq, "prev": prev, "series": self.entries, "data": data}


class Plot(anywidget.AnyWidget):
    """One chart per metric, one curve per rank; its controls work while the kernel is busy.

    Args:
        sources: Where the curves come from.
        empty_text: Shown while there are none.
    """

    _esm = script("uPlot.iife.min.js", "feed.js", "plot.js")
    _css = asset("uPlot.min.css")
    full: Any = traitlets.Dict().tag(sync=True)
    delta: Any = traitlets.Dict().tag(sync=True)
    wanted: Any = traitlets.Unicode("").tag(sync=True)
    chosen: Any = traitlets.Unicode("").tag(sync=True)
    hidden_metrics: Any = traitlets.Int(0).tag(sync=True)
    empty_text: Any = traitlets.Unicode("").tag(sync=True)

    def __init__(self, sources: Sequence[Source], empty_text: str = "No metric has been logged yet.") -> None:
        super().__init__(empty_text=empty_text)
        self._sources = list(sources)
        self._seq = 0
        self._asked = True
        self._filter = ""
        self._standing_out: tuple[int, ...] = ()
        self._born: float | None = None
        self._refreshes = 0
        self._refresh_due = 0.0
        self.on_msg(self._heard)

    def draw(self, sources: Sequence[Source]) -> None:
        """Draw these from now on.

        Args:
            sources: Where the curves come from.
        """
        self._sources = list(sources)
        self._asked = True

    def lay_over(self, ranks: Iterable[int]) -> None:
        """Draw the curves of these ranks over the bands, unless the user has chosen others.

        Args:
            ranks: Those that stand out. Once drawn a rank stays, so that curves do not come and go.
        """
        self._standing_out = tuple(dict.fromkeys([*self._standing_out, *ranks]))[:MAX_STANDING_OUT]

    def _choose(self) -> None:
        """Take over which ranks are to be laid over the bands."""
        wanted = chosen_ranks(self.chosen)[:MAX_LAID_OVER] if self.chosen.strip() else self._standing_out
        for source in self._sources:
            if source.ranks and source.laid_over != wanted:
                source.laid_over = wanted
                self._asked = True

    def _heard(self, _: Any, content: Any, __: Any) -> None:
        # Comes on any thread: note it, nothing else.
        if isinstance(content, dict) and content.get("kind") == "hello":
            self._asked = True

    def update(self, now: float) -> None:
        """Send what is new; everything where a view asked for it, or may have missed something.

        Args:
            now: Seconds, on any clock that goes forward.
        """
        if self._born is None:
            self._born = now
            self._plan_refresh(now)
        names = self._names()
        self._choose()
        # A view would have to ask for the beginning of what it gets in parts, and a kernel that is busy would not hear.
        if self._asked or self._filter != self.wanted or now >= self._refresh_due or not self.full:
            self._asked, self._filter = False, self.wanted
            self._plan_refresh(now)
            self._send_full(names)
        elif not self._send_new(names):
            self._send_full(names)

    def _plan_refresh(self, now: float) -> None:
        assert self._born is not None
        later = [age for age in REFRESH_AGES if self._born + age > now]
        self._refresh_due = self._born + later[0] if later else now + REFRESH_SECONDS

    def _names(self) -> list[str]:
        seen = dict.fromkeys(name for source in self._sources for name in source.store.metric_names())
        names = list(seen)
        if len(names) > MAX_METRICS and self.wanted:
            names = [name for name in names if self.wanted in name.lower()]
        hidden = max(0, len(names) - MAX_METRICS)
        if hidden != self.hidden_metrics:
            self.hidden_metrics = hidden
        return names[:MAX_METRICS]

    def _send_full(self, names: Sequence[str]) -> None:
        wanted = [(source, *series) for source in self._sources for series in source.series(names)]
        points = max(100, min(MAX_SERIES_POINTS, MAX_BROWSER_POINTS // max(1, len(wanted))))
        packet = _Packet()
        for source in self._sources:
            source.cursors.clear()
        for source, name, rank, label in wanted:
            if rank == BAND:
                self._add_band(packet, source, name, (0, 0))
                continue
            tail = source.store.tail(name, rank)
            source.cursors[name, rank] = tail.cursor
            packet.add(name, label, tail, source.origin, points)
        if packet.entries or self.full:
            self._seq += 1
            self.full = packet.message(self._seq, self._seq - 1)

    def _add_band(self, packet: _Packet, source: Source, name: str, cursor: tuple[int, int]) -> None:
        band = source.store.band(name, cursor)
        assert band is not None, "there is one of more ranks than BAND_FROM"
        source.cursors[name, BAND] = band.cursor
        if len(band.times):
            packet.add_band(name, BAND_LABEL, band, source.origin)

    def _send_new(self, names: Sequence[str]) -> bool:
        """Send what came since the last message; return False where that is not possible, because points were moved."""
        packet = _Packet()
        for source in self._sources:
            for name, rank, label in source.series(names):
                known = source.cursors.get((name, rank))
                if rank == BAND:
                    if known is None:  # the ranks were few enough for curves of their own until now
                        return False
                    self._add_band(packet, source, name, known)
                    continue
                tail = source.store.tail(name, rank, known or (0, 0))
                if known is not None and tail.whole and known[1]:
                    return False
                source.cursors[name, rank] = tail.cursor
                if len(tail.values):
                    packet.add(name, label, tail, source.origin, MAX_NEW_POINTS)
        if packet.entries:
            self._seq += 1
            self.delta = packet.message(self._seq, self._seq - 1)
        return True

    # ---- without a browser

    @property
    def html(self) -> str:
        """The curves as pictures with alternative texts."""
        pictures = []
        for source in self._sources:
            for name in source.store.metric_names()[:MAX_METRICS]:
                words = svg_curves.description(source.store.series(name))
                words = f"{source.label}: {words}" if source.label else words
                pictures.append(svg_curves.image(name, svg_curves.tracks_of(source.store, name), words))
        return " ".join(pictures) or f"<p>{escape(self.empty_text)}</p>"

    @property
    def text(self) -> str:
        """The curves in words, one per line."""
        lines = [
            f"{source.label}: {words}" if source.label else words
            for source in self._sources
            for words in (svg_curves.description(source.store.series(name)) for name in source.store.metric_names())
        ]
        return "\n".join(lines) or self.empty_text


__all__ = ["BAND_LABEL", "BAND_RANKS", "MAX_METRICS", "Plot", "Source", "chosen_ranks", "sources_of"]
