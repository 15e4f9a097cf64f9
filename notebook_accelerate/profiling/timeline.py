"""Merge the traces of all profiled ranks into one timeline on one clock, and write it in Chrome's trace format."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from notebook_accelerate.profiling.collective_waits import Joined
from notebook_accelerate.profiling.tables import SampledLines
from notebook_accelerate.profiling.trace import CATEGORIES, RankTrace


@dataclass
class Timeline:
    """The tracks of all profiled ranks on one clock.

    Attributes:
        tracks: The tracks in the order of ranks. For each rank, the main thread comes first.
        names: The names of events. ``Track.names`` holds indices into this list.
        categories: The names of categories. ``Track.category`` holds indices into this list.
        details: By index of a name, additional text, such as the source of a cell's line.
        waits: The events that wait for other ranks, from collectives matched across ranks.
        steps: The steps of the ranks.
        span: The time from the origin to the end of the last event, in microseconds.
        origin: The time of the origin, in seconds since the epoch, on the kernel's clock.
    """

    tracks: list[Track] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=lambda: list(CATEGORIES))
    details: dict[int, str] = field(default_factory=dict)
    waits: list[EventWait] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    span: float = 0.0
    origin: float = 0.0


@dataclass
class Track:
    """The events of one thread, one stream of a device, or the collectives of one rank, in parallel columns.

    The events are ordered by their start. An event contains the deeper events that follow it, until its end.

    Attributes:
        rank: The rank to which the events belong.
        name: The track's name, for example "rank 0 · main thread", "rank 0 · gpu stream 7" or "rank 0 · collectives".
        start: The start in microseconds from the timeline's origin.
        duration: The duration in microseconds.
        names: The index of the event's name in ``Timeline.names``.
        depth: The number of events of this track that contain the event.
        category: The index of the event's category in ``Timeline.categories``.
    """

    rank: int
    name: str
    start: array[float] = field(default_factory=lambda: array("d"))
    duration: array[float] = field(default_factory=lambda: array("f"))
    names: array[int] = field(default_factory=lambda: array("I"))
    depth: array[int] = field(default_factory=lambda: array("B"))
    category: array[int] = field(default_factory=lambda: array("B"))

    def __len__(self) -> int:
        return len(self.start)


class Step(NamedTuple):
    """One step of one rank, in microseconds from the timeline's origin."""

    rank: int
    start: float
    end: float
    number: int


class EventWait(NamedTuple):
    """A wait in a collective: an event of ``from_track`` waits for the last rank's event of ``to_track``."""

    from_track: int
    from_event: int
    to_track: int
    to_event: int


# ---- merge the traces of ranks

LEAST_WAIT = 20e-6
"""Waits shorter than this many seconds are not drawn, because the clocks of processes differ by about as much."""

_STEP, _COLLECTIVE, _PYTHON = (CATEGORIES.index(name) for name in ("step", "collective", "python"))


class Merger:
    """Merges the traces of the ranks into a timeline.

    Args:
        traces: The traces, in the order of ranks.
        clocks: By rank, the run's time at its trace's time 0, in seconds since the epoch.
        lines: The stack samples of each rank.
    """

    def __init__(
        self, traces: Sequence[RankTrace], clocks: Mapping[int, float], lines: Mapping[int, SampledLines]
    ) -> None:
        self._traces, self._clocks, self._lines = traces, clocks, lines
        begins = [clocks[trace.rank] + trace.start[0] / 1e6 for trace in traces if len(trace)]
        self.timeline = Timeline(origin=min(begins, default=0.0))
        self._names: dict[str, int] = {}
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    def merge(self, joined: Sequence[Joined]) -> Timeline:
        """Return the timeline, with the waits in matched collectives."""
        for trace in self._traces:
            self._add_rank(trace)
        for each in joined:
            self._add_waits(each)
        timeline = self.timeline
        timeline.names = list(self._names)
        ends = [track.start[i] + track.duration[i] for track in timeline.tracks for i in range(len(track))]
        timeline.span = max([*ends, *(step.end for step in timeline.steps)], default=0.0)
        return timeline

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _add_rank(self, trace: RankTrace) -> None:
        shift = (self._clocks[trace.rank] - self.timeline.origin) * 1e6
        for number, (start, end) in enumerate(trace.steps()):
            self.timeline.steps.append(Step(trace.rank, start + shift, end + shift, number + 1))
        main = trace.main()
        rows: dict[tuple[int, str], list[int]] = {(0, f"rank {trace.rank} · main thread"): []}
        for event in range(len(trace)):
            if trace.category[event] != _STEP:
                rows.setdefault(self._track_of(trace, event, main), []).append(event)
        lines = self._line_track(trace, shift)
        for (_, name), events in sorted(rows.items(), key=lambda row: row[0]):
            if events:
                self._add_track(trace, name, events, shift)
            if lines is not None and name.endswith("main thread"):
                self.timeline.tracks.append(lines)

    @staticmethod
    def _track_of(trace: RankTrace, event: int, main: int) -> tuple[int, str]:
        thread = trace.thread[event]
        place = trace.threads[thread]
        if thread == main:
            return 0, f"rank {trace.rank} · main thread"
        if place.device:
            return 3, f"rank {trace.rank} · gpu stream {place.number}"
        if trace.category[event] == _COLLECTIVE:
            return 1, f"rank {trace.rank} · collectives"
        return 2, f"rank {trace.rank} · thread {place.number}"

    def _add_track(self, trace: RankTrace, name: str, events: Sequence[int], shift: float) -> None:
        track = Track(trace.rank, name)
        ends: list[float] = []
        for event in events:
            start = trace.start[event]
            while ends and ends[-1] <= start:
                ends.pop()
            self._places[trace.rank, event] = (len(self.timeline.tracks), len(track))
            _append(track, start + shift, trace.duration[event], self._name(trace.text(event)), len(ends),
                    trace.category[event])  # fmt: skip
            ends.append(trace.end(event))
        self.timeline.tracks.append(track)

    def _line_track(self, trace: RankTrace, shift: float) -> Track | None:
        """Return a track of the lines that the samples show. Consecutive samples of a line become one event."""
        lines = self._lines.get(trace.rank)
        if lines is None or not lines.times:
            return None
        track = Track(trace.rank, f"rank {trace.rank} · lines")
        last = min(lines.times[-1], trace.last_end()) if len(trace) else lines.times[-1]
        for index, begin, end in lines.spans(lines.times[0], last):
            line = lines.line(index)
            if line is None:
                continue
            name = self._name(line.place)
            self.timeline.details.setdefault(name, line.source)
            if len(track) and track.names[-1] == name and track.start[-1] + track.duration[-1] >= begin + shift - 1:
                track.duration[-1] = end + shift - track.start[-1]
            else:
                _append(track, begin + shift, end - begin, name, 0, _PYTHON)
        return track if track.start else None  # Short steps may end before the first sample.

    def _add_waits(self, joined: Joined) -> None:
        last = joined.last
        target = self._places[last, joined.calls[last].event]
        for rank, seconds in joined.waits().items():
            if seconds >= LEAST_WAIT:
                self.timeline.waits.append(EventWait(*self._places[rank, joined.calls[rank].event], *target))


def _append(track: Track, start: float, duration: float, name: int, depth: int, category: int) -> None:
    track.start.append(start)
    track.duration.append(duration)
    track.names.append(name)
    track.depth.append(min(depth, 255))
    track.category.append(category)


# ---- write the timeline in Chrome's trace format

Row = dict[str, Any]


class ChromeEvents:
    """Converts a timeline to Chrome's events: ranks to processes, tracks to threads, and waits to arrows.

    Perfetto's importer drops an event that overlaps another event of its thread without being nested in it, and an
    arrow that ends before it starts. It truncates times to whole nanoseconds, and rejects negative times and threads.

    Args:
        timeline: The timeline to convert.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._threads = count(1)
        self._waiting = {place for wait in timeline.waits for place in (wait[:2], wait[2:])}
        self._placed: dict[tuple[int, int], int] = {}
        """The threads of the events that arrows connect, by track and event."""
        starts = [min(track.start, default=0.0) for track in timeline.tracks]
        self._origin = round(1000 * min([0.0, *starts, *(step.start for step in timeline.steps)]))

    def rows(self) -> Iterator[Row]:
        """Yield the events. The events of a thread are ordered by their start."""
        timeline = self._timeline
        ranks = {step.rank for step in timeline.steps} | {track.rank for track in timeline.tracks}
        for rank in sorted(ranks):
            yield _metadata("process_name", rank, 0, f"rank {rank}")
            yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
            yield from self._steps(rank)
            for number, track in enumerate(timeline.tracks):
                if track.rank == rank:
                    yield from self._track(number, track)
        for number, wait in enumerate(timeline.waits):
            yield from self._arrow(number, wait)

    def _steps(self, rank: int) -> Iterator[Row]:
        thread = next(self._threads)
        yield _metadata("thread_name", rank, thread, "steps")
        for step in self._timeline.steps:
            if step.rank == rank:
                begin, end = round(step.start * 1000), round(step.end * 1000)
                yield self._event(f"step {step.number}", "step", rank, thread, begin, end)

    def _track(self, number: int, track: Track) -> Iterator[Row]:
        timeline, lanes = self._timeline, Lanes(track)
        name = track.name.partition(" · ")[2]
        threads = [next(self._threads) for _ in range(lanes.count)]
        for lane, thread in enumerate(threads):
            yield _metadata("thread_name", track.rank, thread, f"{name} ({lane + 1})" if lane else name)
        for event in range(len(track)):
            thread = threads[lanes.lane[event]]
            if (number, event) in self._waiting:
                self._placed[number, event] = thread
            yield self._event(
                timeline.names[track.names[event]], timeline.categories[track.category[event]], track.rank, thread,
                lanes.start[event], lanes.end[event],
            )  # fmt: skip

    def _arrow(self, number: int, wait: EventWait) -> Iterator[Row]:
        """Yield both ends of an arrow: the waiting event, and the last event to enter the collective."""
        for phase, place in (("s", wait[:2]), ("f", wait[2:])):
            track = self._timeline.tracks[place[0]]
            yield {
                "ph": phase, "id": number, "name": "waits for", "cat": "wait", "bp": "e", "pid": track.rank,
                "tid": self._placed[place], "ts": self._microseconds(round(track.start[place[1]] * 1000)),
            }  # fmt: skip

    def _event(self, name: str, category: str, rank: int, thread: int, begin: int, end: int) -> Row:
        return {
            "ph": "X", "name": name, "cat": category, "pid": rank, "tid": thread, "ts": self._microseconds(begin),
            "dur": _microseconds(end - begin),
        }  # fmt: skip

    def _microseconds(self, time: int) -> float:
        """Convert nanoseconds to microseconds, counted from the first event or from 0, whichever is earlier."""
        return _microseconds(time - self._origin)


class Lanes:
    """Distributes the events of a track over threads, so that two events of a thread never overlap without nesting.

    One thread is enough unless a track has events of several threads, as the track of collectives does.

    Args:
        track: The track whose events are distributed.

    Attributes:
        start: The start of each event, in whole nanoseconds.
        end: The end of each event, in whole nanoseconds. Durations have single precision, so ends that are slightly
            after the next start are moved back.
        lane: The number of each event's thread.
        count: The number of threads.
    """

    def __init__(self, track: Track) -> None:
        self.start = [round(each * 1000) for each in track.start]
        self.end = [round((a + b) * 1000) for a, b in zip(track.start, track.duration, strict=True)]
        self._open: list[list[int]] = [[]]
        self.lane = [self._place(event) for event in range(len(track))]
        self.count = len(self._open)

    def _place(self, event: int) -> int:
        for lane, stack in enumerate(self._open):
            self._close(stack, self.start[event])
            if self._fits(stack, event):
                stack.append(event)
                return lane
        self._open.append([event])
        return len(self._open) - 1

    def _inexact(self, event: int) -> int:
        """Return the possible error of an event's end, in nanoseconds."""
        return 1 + (self.end[event] - self.start[event] >> 22)

    def _close(self, stack: list[int], now: int) -> None:
        while stack and self.end[stack[-1]] <= now + self._inexact(stack[-1]):
            last = stack.pop()
            self.end[last] = max(self.start[last], min(self.end[last], now))

    def _fits(self, stack: list[int], event: int) -> bool:
        if not stack or self.end[event] <= self.end[stack[-1]]:
            return True
        if self.end[event] - self.end[stack[-1]] > self._inexact(event) + self._inexact(stack[-1]):
            return False
        self.end[event] = self.end[stack[-1]]
        return True


def _metadata(kind: str, rank: int, thread: int, name: str) -> Row:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _microseconds(nanoseconds: int) -> float:
    """Return nanoseconds as microseconds, plus a quarter of a nanosecond.

    Without the addition, Perfetto's truncation could yield one nanosecond less.
    """
    return round(nanoseconds / 1000 + 0.00025, 5)
