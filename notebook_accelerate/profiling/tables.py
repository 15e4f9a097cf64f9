"""Compute the tables of a profile: operations, lines of the user's code, and memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.profiling.trace import CATEGORIES, RankTrace
from notebook_accelerate.telemetry.tracebacks import is_user_code

_STEP, _FORWARD = CATEGORIES.index("step"), CATEGORIES.index("forward")

USED = 0.9
"""The share of a device's memory that a training run can use. The rest is lost to fragmentation and the driver."""
MOST = 64
_KEPT = ("parameters", "gradients", "optimizer state", "other tensors")

MAX_GAP = 0.5e6
"""Maximum time in microseconds between two samples. If they are further apart, it is unknown which lines ran."""

Where = Callable[[FrameInfo], str]


# ---- operations


@dataclass
class OpTime:
    """The time of one operation, over all profiled steps.

    Attributes:
        name: The name of the operation, such as "aten::mm".
        category: One of ``trace.CATEGORIES``.
        calls: The number of calls, by rank.
        own: Seconds without the time of the operations that it calls, by rank.
        total: Seconds including the operations that it calls, by rank.
        device: Whether it ran on a device.
    """

    name: str
    category: str
    calls: dict[int, int] = field(default_factory=dict)
    own: dict[int, float] = field(default_factory=dict)
    total: dict[int, float] = field(default_factory=dict)
    device: bool = False


def op_table(traces: Sequence[RankTrace]) -> list[OpTime]:
    """Return the operations, ordered by their own time, longest first."""
    found: dict[tuple[str, bool], OpTime] = {}
    for trace in traces:
        own = own_times(trace)
        begin, end = recorded(trace)
        for event in range(len(trace)):
            if trace.category[event] in (_STEP, _FORWARD) or not begin <= trace.start[event] <= end:
                continue  # Omit steps and forward passes, which only contain operations.
            name, device = trace.text(event), trace.threads[trace.thread[event]].device
            row = found.get((name, device))
            if row is None:
                row = found[name, device] = OpTime(name, CATEGORIES[trace.category[event]], device=device)
            row.calls[trace.rank] = row.calls.get(trace.rank, 0) + 1
            row.own[trace.rank] = row.own.get(trace.rank, 0.0) + max(0.0, own[event]) / 1e6
            row.total[trace.rank] = row.total.get(trace.rank, 0.0) + trace.duration[event] / 1e6
    return sorted(found.values(), key=lambda row: -sum(row.own.values()))


def own_times(trace: RankTrace) -> array[float]:
    """Return the duration of each event in microseconds, without the events that it contains."""
    own = array("d", trace.duration)
    open_events: dict[int, list[int]] = {}
    for event in range(len(trace)):
        if trace.category[event] == _STEP:
            continue
        above = open_events.setdefault(trace.thread[event], [])
        while above and trace.end(above[-1]) <= trace.start[event]:
            above.pop()
        if above:
            own[above[-1]] -= min(trace.duration[event], trace.end(above[-1]) - trace.start[event])
        above.append(event)
    return own


def recorded(trace: RankTrace) -> tuple[float, float]:
    """Return the start and end of the complete steps, or of all events if there are no steps."""
    steps = trace.steps()
    if steps and trace.facts.get("steps", 1):
        return steps[0][0], steps[-1][1]
    if not len(trace):
        return 0.0, 0.0
    return trace.start[0], trace.last_end()


# ---- lines, computed from the samples that were taken during the profile


@dataclass(frozen=True)
class Line:
    """A line of the user's code.

    Attributes:
        place: The location of the line, for example "Cell In[7], line 3".
        function: The function that contains the line.
        source: The line's text, or "" if it is unknown.
    """

    place: str
    function: str
    source: str

    def text(self) -> str:
        """Return the place and the line's text."""
        return f"{self.place}: {self.source}" if self.source else self.place


class SampledLines:
    """The stack samples of one rank, with times on the clock of its trace.

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
        """Return the line of a frame."""
        return Line(self._where(frame), frame.function.rpartition(".")[2], frame.source)

    def line(self, index: int) -> Line | None:
        """Return the line of a sample."""
        return self._lines[self.which[index]]

    def spans(self, start: float, end: float) -> Iterable[tuple[int, float, float]]:
        """Yield the index, start and end of each sample between two times. A sample starts where the last one ends."""
        first = bisect_left(self.times, start)
        for index in range(first, len(self.times)):
            begin = self.times[index - 1] if index else self.times[index]
            if begin >= end:
                return
            if self.times[index] - begin <= MAX_GAP:
                yield index, max(begin, start), min(self.times[index], end)

    def at(self, start: float, end: float) -> Line | None:
        """Return the line that took most of the time between two times, or None if there is no sample."""
        totals: dict[Line, float] = {}
        for index, begin, until in self.spans(start, end):
            if (line := self.line(index)) is not None:
                totals[line] = totals.get(line, 0.0) + until - begin
        return max(totals, key=lambda each: totals[each], default=None)

    def seconds_where(self, matches: Callable[[list[FrameInfo]], bool], start: float, end: float) -> float:
        """Return the seconds in matching stacks between two times."""
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
        """Return the lines of matching stacks, most frequent first."""
        totals: dict[Line, int] = {}
        for which in self.which:
            line = self._lines[which]
            if line is not None and matches([self.frames[each] for each in self.stacks[which]]):
                totals[line] = totals.get(line, 0) + 1
        return sorted(totals, key=lambda each: -totals[each])


@dataclass(frozen=True)
class LineSeconds:
    """The time of one line of the user's code, including library functions that it called.

    Attributes:
        line: The line of the user's code.
        seconds: The time in seconds, by rank.
        shares: The share of the profiled time, from 0 to 1, by rank.
    """

    line: Line
    seconds: Mapping[int, float]
    shares: Mapping[int, float]

    @property
    def place(self) -> str:
        """The place of the line, for example "Cell In[7], line 3"."""
        return self.line.place

    @property
    def share(self) -> float:
        """The share of the profiled time, averaged over all ranks."""
        return sum(self.shares.values()) / max(1, len(self.shares))


def line_table(traces: Sequence[RankTrace], lines: Mapping[int, SampledLines]) -> list[LineSeconds]:
    """Return the lines of the user's code, ordered by time, longest first."""
    totals: dict[Line, dict[int, float]] = {}
    spans = {trace.rank: [recorded(trace), *trace.sampled_steps()[len(trace.steps()) :]] for trace in traces}
    for rank, sampled in lines.items():
        for index, begin, end in (each for span in spans[rank] for each in sampled.spans(*span)):
            if (line := sampled.line(index)) is not None:
                row = totals.setdefault(line, dict.fromkeys(lines, 0.0))
                row[rank] += (end - begin) / 1e6
    length = {rank: max(1e-9, sum(end - start for start, end in each) / 1e6) for rank, each in spans.items()}
    rows = [
        LineSeconds(line, seconds, {rank: each / length[rank] for rank, each in seconds.items()})
        for line, seconds in totals.items()
    ]
    return sorted(rows, key=lambda row: -row.share)


# ---- memory, computed from the allocations of a trace


@dataclass(frozen=True)
class PeakMemory:
    """The memory that the recorded steps have allocated at their peak.

    Attributes:
        nbytes: The number of bytes above the memory in use at the start.
        lines: The lines that allocated these bytes, with the number for each, if samples show the lines.
    """

    nbytes: int
    lines: list[tuple[Line, int]] = field(default_factory=list)


def peak_of(trace: RankTrace, lines: SampledLines) -> PeakMemory:
    """Return the peak of the recorded steps, which is 0 bytes if allocations were not recorded."""
    start, end = recorded(trace)
    total = best = 0
    when = start
    events = [row for row in trace.memory if start <= row[0] <= end]
    for at, nbytes, _ in events:
        total += nbytes
        if total > best:
            best, when = total, at
    alive: dict[int, tuple[float, int]] = {}
    for at, nbytes, address in events:
        if at > when:
            break
        if nbytes > 0:
            alive[address] = at, nbytes
        else:
            alive.pop(address, None)
    found: dict[Line, int] = {}
    for at, nbytes in alive.values():
        if (line := lines.at(at, at + 1)) is not None:
            found[line] = found.get(line, 0) + nbytes
    return PeakMemory(best, sorted(found.items(), key=lambda row: -row[1]))


def what_fits(parts: Mapping[str, int], capacity: int, ranks: int) -> list[str]:
    """Return sentences about the changes that would fit into a rank's memory, or none if activations are unknown.

    Args:
        parts: The size in bytes of each kind of contents, such as "parameters".
        capacity: The rank's memory in bytes.
        ranks: The number of ranks across which state can be sharded.
    """
    activations = parts.get("activations at the peak", 0)
    if not activations or capacity <= 0:
        return []
    kept = sum(parts.get(name, 0) for name in _KEPT)
    factor = (USED * capacity - kept) / activations
    room = f"Of {size_text(capacity)} per rank, {size_text(kept)} are in use between steps"
    if factor >= 1.1:
        return [
            f"{room} and {size_text(activations)} more at the peak: batches {_as_many_times(factor)} as large would fit"
        ]
    state = sum(parts.get(name, 0) for name in _KEPT[:3])
    sharded = (USED * capacity - (kept - state) - state / ranks) / activations
    if ranks > 1 and sharded > factor:
        return [f"{room}: with FSDP across {ranks} ranks, batches {_as_many_times(sharded)} as large would fit"]
    return [f"{room}: smaller batches, activation checkpointing or offloading would fit"]


def _as_many_times(factor: float) -> str:
    return f"{min(factor, MOST):.1f} times" if factor < MOST else f"more than {MOST} times"
