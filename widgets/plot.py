"""Metric curves in the browser, drawn by uPlot; new points are sent as bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import traitlets

from notebook_accelerate.launch.report.curves import ENVELOPE, Curve, Series, Source
from notebook_accelerate.widgets.feed import Feed
from notebook_accelerate.widgets.panel_elements import asset, script

SCRIPTS = ("uPlot.iife.min.js", "feed.js", "looks.js", "plot.js")
MAX_METRICS = 200
"""The maximum number of metrics that are sent at a time. Users select others with the filter."""
MAX_BROWSER_POINTS = 400_000
MAX_SERIES_POINTS = 2_000
"""The maximum number of points of a curve in its first message, after M4.

The browser keeps up to three times as many, and then downsamples them.
"""
MAX_NEW_POINTS = 400
"""The maximum number of points of one series in one update, after M4."""
ENVELOPE_RANKS = 16
"""With more ranks than this, an envelope (minimum, mean and maximum) is drawn, and single ranks over it."""
MAX_CHOSEN, MAX_OUTLIERS = 8, 2
"""The maximum numbers of ranks drawn over an envelope: ranks that the user chose (one per colour), or outliers."""
REFRESH_SECONDS = 30.0
"""Seconds between messages with everything, after ``REFRESH_AGES``."""


def _fits(wanted: str, name: str) -> bool:
    """Return whether a metric matches a user's regular expression, or contains the text if it is not an expression."""
    try:
        return re.search(wanted, name, re.IGNORECASE) is not None
    except re.error:
        return wanted.lower() in name.lower()


def chosen_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that a user typed, such as "0, 5-7". Other words are ignored."""
    found: list[int] = []
    for part in re.split(r"[,;\s]+", re.sub(r"\s*[-–]\s*", "-", text.strip())):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found += range(int(first), min(int(last or first), int(first) + MAX_CHOSEN) + 1)
    return tuple(dict.fromkeys(found))


def _message(drawn: Iterable[tuple[str, Curve]]) -> dict[str, Any]:
    """Return a message with curves, in the format of ``static/plot.js``, with the name of the metric before each."""
    entries: list[tuple[Any, ...]] = []
    columns: list[np.ndarray] = []
    for name, curve in drawn:
        entry: tuple[Any, ...] = (name, curve.label, len(curve.x))
        columns += [curve.x, curve.x if curve.seconds is None else curve.seconds, curve.y]
        if curve.low is not None and curve.high is not None:
            entry = (*entry, None if curve.whole else float(curve.x[0]))
            columns += [curve.low, curve.high]
        entries.append(entry)
    data = np.concatenate(columns).astype("<f8").tobytes() if columns else b""
    return {"series": entries, "data": data}


class Plot(Feed):
    """A chart for each metric, with a curve for each rank. Its controls work while the kernel is busy.

    Args:
        sources: The stores to draw.
        empty_text: The text that is shown until a metric is logged.

    The trait ``order`` lists labels of curves in the order of their colours, for a table next to the plot.
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
        self._cursors: dict[tuple[str, str], tuple[int, int]] = {}

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
            ranks: The outliers. A rank that is drawn stays, so that curves do not appear and disappear.
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
            now: The time in seconds, on any clock that does not go back.
        """
        names = self._names()
        self._apply_choice()
        # Begin with everything, because a view could not ask a busy kernel for a message that it has missed.
        if self._full_due(now) or self._filter != self.wanted or not self.full:
            self._filter = self.wanted
            self._send_full(names)
        elif not self._send_new(names):
            self._send_full(names)

    def _names(self) -> list[str]:
        names = list(dict.fromkeys(name for source in self._sources for name in source.names()))
        if len(names) > MAX_METRICS and self.wanted:
            names = [name for name in names if _fits(self.wanted, name)]
        self.hidden_metrics = max(0, len(names) - MAX_METRICS)
        return names[:MAX_METRICS]

    def _series(self, names: Sequence[str]) -> Iterator[Series]:
        return (series for source in self._sources for series in source.series(names, ENVELOPE_RANKS))

    def _send_full(self, names: Sequence[str]) -> None:
        wanted = list(self._series(names))
        points = max(100, min(MAX_SERIES_POINTS, MAX_BROWSER_POINTS // max(1, len(wanted))))
        drawn = [(series.name, series.read(points)) for series in wanted]
        self._cursors = {(name, curve.label): curve.cursor for name, curve in drawn}
        drawn = [(name, curve) for name, curve in drawn if len(curve.x)]
        if drawn or self.full:
            self._send_message("full", _message(drawn))

    def _send_new(self, names: Sequence[str]) -> bool:
        """Send the points since the last message, or return False if everything has to be sent again.

        This is the case if the store has moved its points, or if an envelope replaces single ranks.
        """
        drawn = []
        for series in self._series(names):
            key, is_envelope = (series.name, series.label), series.rank == ENVELOPE
            known = self._cursors.get(key)
            if known is None and is_envelope:
                return False
            curve = series.read(MAX_NEW_POINTS, known or (0, 0))
            if curve.whole and known is not None and known[1] and not is_envelope:
                return False
            self._cursors[key] = curve.cursor
            if len(curve.x):
                drawn.append((series.name, curve))
        if drawn:
            self._send_message("delta", _message(drawn))
        return True
