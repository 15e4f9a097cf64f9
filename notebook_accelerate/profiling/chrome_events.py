"""Writes a timeline as events of Chrome's trace format, by the rules of Perfetto's importer.

It drops an event that overlaps another one of its thread without lying within it, and an arrow that ends before it
begins; it cuts times off to whole nanoseconds; and negative numbers are neither times nor threads to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from notebook_accelerate.profiling.timeline import Timeline, Track, Wait

Row = dict[str, Any]


class ChromeEvents:
    """The events of a timeline: a process per rank, threads per track, arrows for waits.

    Args:
        timeline: The timeline.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._threads = count(1)
        self._waiting = {place for wait in timeline.waits for place in (wait[:2], wait[2:])}
        self._placed: dict[tuple[int, int], int] = {}
        """By track and event, the thread of the events that arrows join."""
        starts = [min(track.start, default=0.0) for track in timeline.tracks]
        self._origin = round(1000 * min([0.0, *starts, *(step.start for step in timeline.steps)]))

    def rows(self) -> Iterator[Row]:
        """Yield the events, those of a thread in the order of their start."""
        timeline = self._timeline
        ranks = {step.rank for step in timeline.steps} | {track.rank for track in timeline.tracks}
        for rank in sorted(ranks):
            yield _name("process_name", rank, 0, f"rank {rank}")
            yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
            yield from self._steps(rank)
            for number, track in enumerate(timeline.tracks):
                if track.rank == rank:
                    yield from self._track(number, track)
        for number, wait in enumerate(timeline.waits):
            yield from self._arrow(number, wait)

    def _steps(self, rank: int) -> Iterator[Row]:
        thread = next(self._threads)
        yield _name("thread_name", rank, thread, "steps")
        for step in self._timeline.steps:
            if step.rank == rank:
                begin, end = round(step.start * 1000), round(step.end * 1000)
                yield self._event(f"step {step.number}", "step", rank, thread, begin, end)

    def _track(self, number: int, track: Track) -> Iterator[Row]:
        timeline, lanes = self._timeline, Lanes(track)
        name = track.name.partition(" · ")[2]
        threads = [next(self._threads) for _ in range(lanes.count)]
        for lane, thread in enumerate(threads):
            yield _name("thread_name", track.rank, thread, f"{name} ({lane + 1})" if lane else name)
        for event in range(len(track)):
            thread = threads[lanes.lane[event]]
            if (number, event) in self._waiting:
                self._placed[number, event] = thread
            yield self._event(
                timeline.names[track.names[event]], timeline.categories[track.category[event]], track.rank, thread,
                lanes.start[event], lanes.end[event],
            )  # fmt: skip

    def _arrow(self, number: int, wait: Wait) -> Iterator[Row]:
        """Yield the two ends: the event that waits, which begins first, and the last one to enter the collective."""
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
        """Return a time in nanoseconds as microseconds since the first event, or since 0 where that is later."""
        return _microseconds(time - self._origin)


class Lanes:
    """The events of a track in whole nanoseconds, on as many threads as it takes for each to lie within another or not.

    A track has one thread, unless events of several threads are on it, as collectives are.

    Args:
        track: The track.

    Attributes:
        start: By event, its start.
        end: By event, its end; durations are of single precision, and an end may lie a little beyond the next start.
        lane: By event, the number of its thread.
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
        """Return by how much an event's end may be wrong."""
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


def _name(kind: str, rank: int, thread: int, name: str) -> Row:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _microseconds(nanoseconds: int) -> float:
    """Return microseconds with a quarter of a nanosecond more: cut off, they are these nanoseconds and not one less."""
    return round(nanoseconds / 1000 + 0.00025, 5)


__all__ = ["ChromeEvents", "Lanes"]
