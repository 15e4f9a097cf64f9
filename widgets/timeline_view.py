"""The timeline of a profile in the browser: one canvas over all ranks, whose data is sent once, as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from notebook_accelerate.widgets.assets import asset, script
from notebook_accelerate.widgets.front_end import front_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accelerate.profiling.timeline import Timeline, Track

SCRIPTS = ("feed.js", "looks.js", "timeline_data.js", "timeline_canvas.js", "timeline.js")
MAX_EVENTS = 3_000_000
"""Events that are sent: 36 MB. Of more, the shortest are left out."""
MAX_NAME = 300
"""Characters of a name or a detail that are sent."""
TICKS = 2**32 - 1
"""The start of an event is sent in this many parts of the span: of 10 s a part is 2.3 ns."""


class TimelineView(anywidget.AnyWidget):
    """Tracks of events on one clock, with zoom, search and the waits of ranks for each other.

    It holds all its data: it works while the kernel is busy.

    Args:
        timeline: The timeline.
    """

    _esm = script(*SCRIPTS)
    _css = asset("panel.css") + asset("timeline.css")
    data: Any = traitlets.Dict().tag(sync=True)

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(data=encode(timeline))
        self.on_msg(self._on_message)

    def _on_message(self, _: object, content: object, __: object) -> None:
        if isinstance(content, dict) and content.get("kind") == "drawn":
            front_end.drawn = True


def encode(timeline: Timeline, limit: int = MAX_EVENTS) -> dict[str, Any]:
    """Return what a view needs of a timeline: texts, and columns of events as bytes in little-endian order.

    The events are in the order of tracks, then depth, then start; ``tracks`` has the number of events of each depth.
    ``start`` is uint32 in units of ``tick`` microseconds, ``duration`` float32 in microseconds, ``name`` uint16 (or
    uint32, of more than 65,536 names), ``category`` uint8. ``waits`` has two int32 for each: the event that waits and
    the one that it waits for. ``steps`` has four float64: rank, start, end, number.

    Args:
        timeline: The timeline.
        limit: Of more events, the shortest are left out; collectives stay. ``shortest`` says how long they were.
    """
    shortest = _shortest(timeline.tracks, limit)
    collective = timeline.categories.index("collective") if "collective" in timeline.categories else -1
    orders = [_order(track, shortest, collective) for track in timeline.tracks]
    span = max(timeline.span, 1e-6)
    tick = span / TICKS
    columns = {
        "start": _column(timeline, orders, "start", "<u4", tick),
        "duration": _column(timeline, orders, "duration", "<f4"),
        "name": _column(timeline, orders, "names", "<u2" if len(timeline.names) <= 1 << 16 else "<u4"),
        "category": _column(timeline, orders, "category", "u1"),
    }
    return {
        "tracks": [_head(track, order) for track, order in zip(timeline.tracks, orders, strict=True)],
        "names": [name[:MAX_NAME] for name in timeline.names],
        "details": [[index, text[:MAX_NAME]] for index, text in timeline.details.items()],
        "categories": list(timeline.categories),
        "span": span,
        "tick": tick,
        "events": sum(map(len, timeline.tracks)),
        "shortest": shortest,
        "waits": _waits(timeline, orders).astype("<i4").tobytes(),
        "steps": np.array([tuple(step) for step in timeline.steps], "<f8").reshape(-1, 4).tobytes(),
        **columns,
    }


def _shortest(tracks: Sequence[Track], limit: int) -> float:
    """Return the duration below which events are left out, in microseconds; 0.0: none."""
    total = sum(map(len, tracks))
    if total <= limit:
        return 0.0
    durations = np.concatenate([np.asarray(track.duration) for track in tracks])
    return float(np.nextafter(np.partition(durations, total - limit)[total - limit], np.float32(np.inf)))


def _order(track: Track, shortest: float, collective: int) -> np.ndarray:
    """Return the indices of a track's events as they are sent."""
    order = np.argsort(np.asarray(track.depth), kind="stable")
    if not shortest:
        return order
    kept = (np.asarray(track.duration) >= shortest) | (np.asarray(track.category) == collective)
    chosen: np.ndarray = order[kept[order]]
    return chosen


def _head(track: Track, order: np.ndarray) -> dict[str, Any]:
    depths = np.bincount(np.asarray(track.depth)[order]).tolist() if len(order) else []
    return {"rank": track.rank, "name": track.name[:MAX_NAME], "lanes": depths}


def _column(timeline: Timeline, orders: Sequence[np.ndarray], name: str, kind: str, unit: float = 1.0) -> bytes:
    parts = []
    for track, order in zip(timeline.tracks, orders, strict=True):
        values = np.asarray(getattr(track, name))[order]
        parts.append((values if unit == 1.0 else np.clip(values / unit, 0, TICKS).round()).astype(kind))
    return np.concatenate(parts).tobytes() if parts else b""


def _waits(timeline: Timeline, orders: Sequence[np.ndarray]) -> np.ndarray:
    """Return for each wait the places of its two events in the columns, shape (n, 2)."""
    places, first = [], 0
    for track, order in zip(timeline.tracks, orders, strict=True):
        place = np.full(len(track), -1)
        place[order] = np.arange(first, first + len(order))
        places.append(place)
        first += len(order)
    pairs = [
        (places[wait.from_track][wait.from_event], places[wait.to_track][wait.to_event]) for wait in timeline.waits
    ]
    found = np.array(pairs, int).reshape(-1, 2)
    kept: np.ndarray = found[(found >= 0).all(axis=1)]
    return kept


__all__ = ["TimelineView", "encode"]
