"""The timeline of a profile as an SVG image of limited size, for reports and saved notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from notebook_accelerate.launch.report.markup import Markup, element, svg_drawing, svg_image, svg_text
from notebook_accelerate.launch.report.svg_curves import INK, ticks

if TYPE_CHECKING:
    import numpy as np

    from notebook_accelerate.profiling.timeline import Timeline, Track

WIDTH, LABEL, RIGHT, TOP, BOTTOM = 900, 62, 12, 30, 24
STEP_HEIGHT, LANE, GAP = 11, 13, 9
MAX_RANKS = 16
"""Maximum number of ranks to draw. If there are more, a note says so."""
MAX_STEPS = 100
"""Maximum number of steps of a rank to draw separately."""
MAX_BYTES = 64_000
"""Maximum size of the SVG in bytes, before base64 adds a third. The number of columns is chosen to stay below it."""
COLUMNS = (824, 412, 206, 103, 52)
"""The numbers of columns to try for a lane. The first one that results in less than ``MAX_BYTES`` is used."""
SAMPLES = 4
"""How many times a track is sampled in each column. The most frequent category determines the column's colour."""
PHASES = ("forward", "backward", "optimizer", "loader", "collective", "checkpoint", "logging", "wait")
"""The categories of phases, which are drawn instead of the operations inside them."""


class CategoryLook(NamedTuple):
    """The name and the colours with which the events of a category are shown.

    Attributes:
        title: The text in legends.
        picture: The colour in pictures, a mid-tone that is visible on light and dark backgrounds.
        light: The colour in the live timeline with a light theme, behind dark text.
        dark: The colour in the live timeline with a dark theme, behind light text.
    """

    title: str
    picture: str
    light: str
    dark: str


LOOKS = {
    "forward": CategoryLook("forward", "#3b82d6", "#8fb9f2", "#2f5f9e"),
    "backward": CategoryLook("backward", "#8a63d2", "#bda8ee", "#6247a6"),
    "optimizer": CategoryLook("optimizer", "#2a9a68", "#86cda6", "#2a7250"),
    "loader": CategoryLook("data loading", "#d9662b", "#f4b387", "#9c5526"),
    "collective": CategoryLook("collective", "#1b98a6", "#7fcbd4", "#1f6f79"),
    "wait": CategoryLook("wait", "#d6455d", "#ee8d99", "#a3384a"),
    "kernel": CategoryLook("GPU kernel", "#6f8f2f", "#b4cf78", "#55702a"),
    "memory": CategoryLook("copy", "#a0703c", "#dab78d", "#7a5a35"),
    "runtime": CategoryLook("CUDA call", "#7d8590", "#c6cbd2", "#4f5761"),
    "op": CategoryLook("operation", "#7f96b8", "#b1c1d8", "#43546d"),
    "python": CategoryLook("Python", "#9a9a9a", "#d6d2c8", "#5a5750"),
    "checkpoint": CategoryLook("checkpoint", "#c4881c", "#ecc86c", "#866317"),
    "logging": CategoryLook("logging", "#c25a9b", "#e8a5cd", "#8a4a76"),
    "step": CategoryLook("step", "#808080", "#d9dce1", "#3a4048"),
}
"""The looks of all categories, in the order of the legend."""


@dataclass
class _RankRow:
    """The part of the picture that shows one rank.

    Attributes:
        rank: The rank's number.
        lanes: The rank's lanes from top to bottom, each a list of the tracks to merge.
        waits: The start and end of each wait, in microseconds.
    """

    rank: int
    lanes: list[list[Track]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    @property
    def height(self) -> int:
        return STEP_HEIGHT + LANE * len(self.lanes) + GAP


def timeline_svg(timeline: Timeline) -> Markup:
    """Return a picture of a timeline as an ``img`` element of less than 100 kB, which needs no script or network.

    Each rank has a row with its steps, a lane for the main thread, a lane for collectives, with waiting in red, and
    lanes for the device.

    Args:
        timeline: The timeline to draw.
    """
    rows = _rows(timeline)
    height = TOP + sum(row.height for row in rows) + BOTTOM
    drawing = Markup()
    for columns in COLUMNS:
        drawing = _drawing(timeline, rows, height, columns)
        if len(drawing) <= MAX_BYTES:
            break
    return svg_image(drawing, WIDTH, height, _description(timeline))


def _rows(timeline: Timeline) -> list[_RankRow]:
    """Return the rows of the first ``MAX_RANKS`` ranks."""
    rows: dict[int, _RankRow] = {}
    main: dict[int, list[Track]] = {}
    for track in timeline.tracks:
        row = rows.setdefault(track.rank, _RankRow(track.rank))
        kind = track.name.rpartition("·")[2].strip()
        if kind == "collectives" or "stream" in kind:
            row.lanes.append([track])
        else:
            main.setdefault(track.rank, []).append(track)
    for rank, tracks in main.items():
        rows[rank].lanes.insert(0, [max(tracks, key=lambda track: ("main" in track.name, len(track)))])
    for wait in timeline.waits:
        waiting, last = timeline.tracks[wait.from_track], timeline.tracks[wait.to_track]
        start = waiting.start[wait.from_event]
        end = min(last.start[wait.to_event], start + waiting.duration[wait.from_event])
        if end > start:
            rows[waiting.rank].waits.append((start, end))
    for step in timeline.steps:
        rows.setdefault(step.rank, _RankRow(step.rank))
    return [rows[rank] for rank in sorted(rows)][:MAX_RANKS]


def _drawing(timeline: Timeline, rows: Sequence[_RankRow], height: int, columns: int) -> Markup:
    span = max(timeline.span, 1e-6)
    scale = (WIDTH - LABEL - RIGHT) / span
    parts: list[Markup] = [*_axis(span, scale, height)]
    used: list[str] = []
    top = TOP
    for row in rows:
        parts += _steps(timeline, row, top, scale)
        lane_top = top + STEP_HEIGHT
        parts.append(svg_text(LABEL - 8, lane_top + 10, f"rank {row.rank}", INK, "end"))
        for tracks in row.lanes:
            parts += _lane(timeline, tracks, lane_top, columns, used)
            if any(_is_collective(track) for track in tracks) or len(row.lanes) == 1:
                parts += _waits(timeline, row, lane_top, columns, used)
            lane_top += LANE
        top += row.height
    ranks = {track.rank for track in timeline.tracks} | {step.rank for step in timeline.steps}
    note = f"{len(rows)} of {len(ranks)} ranks" if len(rows) < len(ranks) else ""
    return svg_drawing(WIDTH, height, *_legend(used, note), *parts)


def _is_collective(track: Track) -> bool:
    return track.name.endswith("collectives")


def _axis(span: float, scale: float, height: int) -> Iterator[Markup]:
    """Yield the lines of the grid and their labels, in a unit that suits the time span."""
    unit, name = next((each for each in ((1e6, "s"), (1e3, "ms")) if span >= 2 * each[0]), (1.0, "µs"))
    for value in ticks(0.0, span / unit, 8):
        x = LABEL + value * unit * scale
        yield element("line", x1=x, x2=x, y1=TOP - 4, y2=height - BOTTOM, stroke="#808080", stroke_opacity=".25")
        yield svg_text(min(x, WIDTH - 22.0), height - 8, f"{value:,.10g} {name}", INK, "middle")


def _steps(timeline: Timeline, row: _RankRow, top: float, scale: float) -> Iterator[Markup]:
    """Yield a bar for each step, with the step's number if there is room, or one bar if there are too many steps."""
    steps = [step for step in timeline.steps if step.rank == row.rank]
    label = "step {}"
    if len(steps) > MAX_STEPS:
        label = f"steps {{}} to {steps[-1].number}"
        steps = [steps[0]._replace(end=steps[-1].end)]
    for index, step in enumerate(steps):
        x, width = LABEL + step.start * scale, max(0.5, (step.end - step.start) * scale - 1)
        opacity = ".3" if index % 2 else ".45"
        yield element("rect", x=x, y=top, width=width, height=STEP_HEIGHT - 2, fill="#808080", fill_opacity=opacity)
        if width > 48:
            yield svg_text(x + 4, top + 7.8, label.format(step.number), INK, font_size=9)


def _lane(timeline: Timeline, tracks: Sequence[Track], top: float, columns: int, used: list[str]) -> Iterator[Markup]:
    """Yield a path for each category, with a rectangle for each sequence of columns of that category."""
    seen = _columns(timeline, tracks, columns)
    for category in sorted(set(seen.tolist()) - {-1}):
        name = timeline.categories[category]
        used.append(name)
        yield _runs(seen == category, top, LANE - 2, LOOKS[name].picture)


def _runs(columns: np.ndarray, top: float, height: float, colour: str) -> Markup:
    """Return a path with a rectangle for each sequence of columns that are True."""
    import numpy as np

    pixels = (WIDTH - LABEL - RIGHT) / len(columns)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], columns.astype(int), [0]])))
    path = "".join(
        f"M{LABEL + begin * pixels:.4g} {top:g}h{(end - begin) * pixels:.4g}v{height:g}h-{(end - begin) * pixels:.4g}z"
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    )
    return element("path", d=path, fill=colour)


def _columns(timeline: Timeline, tracks: Sequence[Track], columns: int) -> np.ndarray:
    """Return the category of each column, int64, shape (columns,), with -1 for idle columns.

    The deepest event determines the category, except that a phase of the training hides the events inside it.
    """
    import numpy as np

    times = (np.arange(columns * SAMPLES) + 0.5) * (timeline.span / (columns * SAMPLES))
    phases = [index for index, name in enumerate(timeline.categories) if name in PHASES]
    steps = [index for index, name in enumerate(timeline.categories) if name == "step"]
    found = np.full(len(times), -1)
    for track in tracks:
        depths, category = np.asarray(track.depth), np.asarray(track.category)
        start, duration = np.asarray(track.start), np.asarray(track.duration)
        for depth in range(int(depths.max()) + 1 if len(depths) else 0):
            chosen = np.flatnonzero((depths == depth) & ~np.isin(category, steps))
            if not len(chosen):
                continue
            at = np.searchsorted(start[chosen], times, "right") - 1
            event = chosen[np.maximum(at, 0)]
            inside = (at >= 0) & (times < start[event] + duration[event])
            kind = category[event].astype(int)
            inside &= np.isin(kind, phases) | ~np.isin(found, phases)
            found = np.where(inside, kind, found)
    return _most_frequent(found.reshape(columns, SAMPLES))


def _most_frequent(samples: np.ndarray) -> np.ndarray:
    """Return the most frequent value of each row."""
    import numpy as np

    counts = (samples[:, :, None] == samples[:, None, :]).sum(axis=2)
    most: np.ndarray = samples[np.arange(len(samples)), counts.argmax(axis=1)]
    return most


def _waits(timeline: Timeline, row: _RankRow, top: float, columns: int, used: list[str]) -> Iterator[Markup]:
    """Yield a path with the columns where a rank spends most of the time waiting."""
    import numpy as np

    if not row.waits:
        return
    edges = np.maximum.accumulate(np.array([0.0, *np.array(sorted(row.waits)).ravel()]))
    waited = np.cumsum(np.where(np.arange(len(edges)) % 2, 0.0, np.diff(edges, prepend=0.0)))
    bounds = np.interp(np.linspace(0.0, timeline.span, columns + 1), edges, waited)
    used.append("wait")
    yield _runs(np.diff(bounds) > timeline.span / columns / 2, top + LANE - 6, 4, LOOKS["wait"].picture)


def _legend(used: Sequence[str], note: str) -> Iterator[Markup]:
    x = float(LABEL)
    for look in [look for name, look in LOOKS.items() if name in used]:
        yield element("rect", x=x, y=8, width=9, height=9, rx=2, fill=look.picture)
        yield svg_text(x + 13, 16, look.title, INK)
        x += 25 + 6.2 * len(look.title)
    if note:
        yield svg_text(WIDTH - RIGHT, 16, note, INK, "end")


def _description(timeline: Timeline) -> str:
    ranks = sorted({track.rank for track in timeline.tracks})
    events = sum(len(track) for track in timeline.tracks)
    count = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    text = f"Timeline of {count}: {events:,} events in {timeline.span / 1e3:,.1f} ms"
    waited: dict[int, float] = {}
    for wait in timeline.waits:
        waiting, last = timeline.tracks[wait.from_track], timeline.tracks[wait.to_track]
        time = min(last.start[wait.to_event] - waiting.start[wait.from_event], waiting.duration[wait.from_event])
        waited[last.rank] = waited.get(last.rank, 0.0) + max(0.0, time)
    if waited:
        rank = max(waited, key=lambda each: waited[each])
        text += f"; others wait longest for rank {rank}: {waited[rank] / 1e3:,.1f} ms in total"
    return text
