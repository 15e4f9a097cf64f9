"""Merges the traces of ranks into one timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from notebook_accelerate.profiling.collective_waits import Call, Joined, calls_of, join
from notebook_accelerate.profiling.sampled_lines import SampledLines
from notebook_accelerate.profiling.timeline import CATEGORIES, Step, Timeline, Track, Wait
from notebook_accelerate.profiling.trace import RankTrace

LEAST_WAIT = 20e-6
"""Shorter waits, in seconds, are not drawn: clocks of processes differ by as much."""
_STEP, _COLLECTIVE, _PYTHON = (CATEGORIES.index(name) for name in ("step", "collective", "python"))


class Merger:
    """Builds the timeline.

    Args:
        traces: The traces, in the order of ranks.
        clocks: By rank, the run's time of its trace's 0, in seconds since the epoch.
        lines: By rank, its samples.
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
        """Return the timeline with joined collectives as waits."""
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
        """Return a track of the lines that ran by the samples: equal ones in a row are one event."""
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
        return track if track.start else None  # short steps may be over before their first sample

    def _add_waits(self, joined: Joined) -> None:
        last = joined.last
        target = self._places[last, joined.calls[last].event]
        for rank, seconds in joined.waits().items():
            if seconds >= LEAST_WAIT:
                self.timeline.waits.append(Wait(*self._places[rank, joined.calls[rank].event], *target))


def _append(track: Track, start: float, duration: float, name: int, depth: int, category: int) -> None:
    track.start.append(start)
    track.duration.append(duration)
    track.names.append(name)
    track.depth.append(min(depth, 255))
    track.category.append(category)


def join_collectives(traces: Sequence[RankTrace], clocks: Mapping[int, float]) -> list[Joined]:
    """Join the collectives of traces; where there are several groups, only those whose group is known."""
    calls: dict[int, list[Call]] = {}
    for trace in traces:
        row = calls_of(trace, clocks[trace.rank])
        calls[trace.rank] = [call for call in row if call.group] if trace.groups > 1 else row
    return join(calls)


__all__ = ["Merger", "join_collectives"]
