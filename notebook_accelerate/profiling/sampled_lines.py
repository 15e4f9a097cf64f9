"""The samples that were taken during a profile: the line that ran at a time, and the lines by time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.profiling.trace import RankTrace
from notebook_accelerate.telemetry.tracebacks import is_user_code

MAX_GAP = 0.5e6
"""Microseconds between two samples; a longer gap is not known to belong to a line."""

Where = Callable[[FrameInfo], str]


@dataclass(frozen=True)
class Line:
    """A line of the user's code.

    Attributes:
        place: For example "Cell In[7], line 3".
        function: Its function.
        source: The line's text; "" where it is not known.
    """

    place: str
    function: str
    source: str

    def text(self) -> str:
        """Return the place with the line's text."""
        return f"{self.place}: {self.source}" if self.source else self.place


class SampledLines:
    """The samples of one rank on its trace's clock.

    Args:
        trace: The rank's trace.
        where: Returns the location of a frame.
    """

    def __init__(self, trace: RankTrace, where: Where) -> None:
        samples: Any = trace.facts.get("samples") or {}
        self.frames = [FrameInfo(name, line, function, source) for name, line, function, source in
                       samples.get("frames", ())]  # fmt: skip
        self.stacks: list[list[int]] = [list(stack) for stack in samples.get("stacks", ())]
        self.which: list[int] = list(samples.get("which", ()))
        self.times = [nanoseconds / 1e3 - trace.base * 1e6 for nanoseconds in samples.get("times", ())]
        self.blocked = float(samples.get("blocked", 0.0))
        self.lock = float(samples.get("lock", 0.0))
        self.cpu = float(samples.get("cpu", 0.0))
        self.threads: list[Any] = list(samples.get("threads", ()))
        self.seconds = float(samples.get("seconds", 0.0))
        self.error = str(samples.get("error", ""))
        self._where = where
        self._lines = [self._line(stack) for stack in self.stacks]

    def _line(self, stack: list[int]) -> Line | None:
        frames = [self.frames[index] for index in stack]
        found = next((frame for frame in reversed(frames) if is_user_code(frame.filename)), None)
        return self.named(found) if found is not None else None

    def named(self, frame: FrameInfo) -> Line:
        """Return a frame as a line."""
        return Line(self._where(frame), frame.function.rpartition(".")[2], frame.source)

    def line(self, index: int) -> Line | None:
        """Return the line of a sample."""
        return self._lines[self.which[index]]

    def spans(self, start: float, end: float) -> Iterable[tuple[int, float, float]]:
        """Yield the samples whose time, since the sample before, lies between two times: sample, start, end."""
        first = bisect_left(self.times, start)
        for index in range(first, len(self.times)):
            begin = self.times[index - 1] if index else self.times[index]
            if begin >= end:
                return
            if self.times[index] - begin <= MAX_GAP:
                yield index, max(begin, start), min(self.times[index], end)

    def at(self, start: float, end: float) -> Line | None:
        """Return the line that took most of the time between two times; None where no sample tells."""
        totals: dict[Line, float] = {}
        for index, begin, until in self.spans(start, end):
            if (line := self.line(index)) is not None:
                totals[line] = totals.get(line, 0.0) + until - begin
        return max(totals, key=lambda each: totals[each], default=None)

    def seconds_where(self, matches: Callable[[list[FrameInfo]], bool], start: float, end: float) -> float:
        """Return the seconds in stacks that match, between two times."""
        known: dict[int, bool] = {}
        total = 0.0
        for index, begin, until in self.spans(start, end):
            which = self.which[index]
            if which not in known:
                known[which] = matches([self.frames[each] for each in self.stacks[which]])
            if known[which]:
                total += until - begin
        return total / 1e6

    def lines_where(self, matches: Callable[[list[FrameInfo]], bool]) -> list[Line]:
        """Return the lines of the stacks that match, those with most time first."""
        totals: dict[Line, int] = {}
        for which in self.which:
            line = self._lines[which]
            if line is not None and matches([self.frames[each] for each in self.stacks[which]]):
                totals[line] = totals.get(line, 0) + 1
        return sorted(totals, key=lambda each: -totals[each])
