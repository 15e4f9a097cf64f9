"""A picture of a timeline as SVG: a row per rank's main thread, collectives and streams, with the waits."""

from __future__ import annotations

from notebook_accelerate.launch.report.markup import Markup, element, svg_text
from notebook_accelerate.profiling.timeline import Timeline, Track

WIDTH, ROW, LEFT_EDGE = 900, 22, 150
MAX_BARS = 400
"""Bars of a track: the longest ones."""
MAX_TRACKS = 24
_COLOURS = {
    "op": "#7aa6d8", "python": "#b9b9b9", "collective": "#d98b73", "kernel": "#6db58b", "memory": "#c6a6d8",
    "loader": "#e0bc5f", "backward": "#5f86c2", "optimizer": "#9b86cf", "runtime": "#a9c3c9", "wait": "#e05a47",
}  # fmt: skip
_INK = "#1c1c1c"


def timeline_picture(timeline: Timeline) -> Markup:
    """Return the picture; empty where nothing was recorded."""
    tracks = [track for track in timeline.tracks if "thread" not in track.name or "main thread" in track.name]
    tracks = tracks[:MAX_TRACKS]
    if not tracks or timeline.span <= 0:
        return Markup("")
    height = ROW * len(tracks) + ROW
    parts: list[Markup] = []
    rows = {id(track): index for index, track in enumerate(tracks)}
    for index, track in enumerate(tracks):
        parts.append(svg_text(2, ROW * index + 15, track.name, _INK))
        parts += _bars(timeline, track, ROW * index + 2)
    parts += _waits(timeline, rows)
    parts += _steps(timeline, tracks, height)
    parts.append(svg_text(LEFT_EDGE, height - 6, f"{timeline.span / 1000:.1f} ms", _INK))
    return element(
        "svg",
        element("rect", x=0, y=0, width=WIDTH, height=height, fill="#ffffff"),
        *parts,
        viewBox=f"0 0 {WIDTH} {height}",
        style=f"width:100%;max-width:{WIDTH}px;font:11px sans-serif;display:block",
        role="img",
        aria_label="Timeline of the profiled ranks",
    )


def _x(timeline: Timeline, at: float) -> float:
    return LEFT_EDGE + (WIDTH - LEFT_EDGE - 4) * min(1.0, max(0.0, at / timeline.span))


def _bars(timeline: Timeline, track: Track, y: float) -> list[Markup]:
    """Return the outermost events of a track: those that a pixel shows, the longest."""
    outer = [event for event in range(len(track)) if track.depth[event] == 0]
    longest = sorted(outer, key=lambda event: -track.duration[event])[:MAX_BARS]
    found = []
    for event in sorted(longest):
        start = track.start[event]
        left, right = _x(timeline, start), _x(timeline, start + track.duration[event])
        name = timeline.names[track.names[event]]
        detail = timeline.details.get(track.names[event], "")
        title = f"{name} · {track.duration[event] / 1000:.2f} ms" + (f"\n{detail}" if detail else "")
        colour = _COLOURS.get(timeline.categories[track.category[event]], "#7aa6d8")
        found.append(
            element("rect", element("title", title), x=f"{left:.1f}", y=f"{y:.0f}", fill=colour, height=ROW - 6,
                    width=f"{max(0.4, right - left):.1f}")
        )  # fmt: skip
    return found


def _waits(timeline: Timeline, rows: dict[int, int]) -> list[Markup]:
    """Return a red bar for the time in which a rank waits in a collective, with the rank it waits for."""
    found = []
    for wait in timeline.waits[:MAX_BARS]:
        track, other = timeline.tracks[wait.from_track], timeline.tracks[wait.to_track]
        if id(track) not in rows:
            continue
        start, entered = track.start[wait.from_event], other.start[wait.to_event]
        left, right = _x(timeline, start), _x(timeline, entered)
        title = element("title", f"waits {(entered - start) / 1000:.2f} ms for rank {other.rank}")
        found.append(
            element("rect", title, x=f"{left:.1f}", y=ROW * rows[id(track)] + ROW - 7, height=4,
                    width=f"{max(0.4, right - left):.1f}", fill=_COLOURS["wait"])
        )  # fmt: skip
    return found


def _steps(timeline: Timeline, tracks: list[Track], height: int) -> list[Markup]:
    rank = tracks[0].rank
    lines = []
    for step in timeline.steps:
        if step.rank == rank:
            x = f"{_x(timeline, step.start):.1f}"
            lines.append(element("line", x1=x, x2=x, y1=0, y2=height - ROW, stroke="#555", stroke_dasharray="3 3"))
    return lines


__all__ = ["timeline_picture"]
