"""Operations and lines of a profile by their own time."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from notebook_accelerate.profiling.sampled_lines import Line, SampledLines
from notebook_accelerate.profiling.timeline import CATEGORIES
from notebook_accelerate.profiling.trace import RankTrace

_STEP, _FORWARD = CATEGORIES.index("step"), CATEGORIES.index("forward")


@dataclass
class OpTime:
    """The time of one operation, over all profiled steps.

    Attributes:
        name: Its name, as "aten::mm".
        category: One of ``timeline.CATEGORIES``.
        calls: How often it ran, by rank.
        own: Seconds without those of the operations in it, by rank.
        total: Seconds, by rank.
        device: Whether it ran on a device.
    """

    name: str
    category: str
    calls: dict[int, int] = field(default_factory=dict)
    own: dict[int, float] = field(default_factory=dict)
    total: dict[int, float] = field(default_factory=dict)
    device: bool = False


@dataclass(frozen=True)
class LineSeconds:
    """The time of one line of the user's code, with the functions of libraries that it called.

    Attributes:
        line: The line.
        seconds: By rank.
        shares: By rank, the share of the profiled time, from 0 to 1.
    """

    line: Line
    seconds: Mapping[int, float]
    shares: Mapping[int, float]

    @property
    def place(self) -> str:
        """For example "Cell In[7], line 3"."""
        return self.line.place

    @property
    def share(self) -> float:
        """The mean share of all ranks."""
        return sum(self.shares.values()) / max(1, len(self.shares))


def own_times(trace: RankTrace) -> array[float]:
    """Return the duration of each event without that of the events in it, in microseconds."""
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


def op_table(traces: Sequence[RankTrace]) -> list[OpTime]:
    """Return the operations by their own time, the longest first."""
    found: dict[tuple[str, bool], OpTime] = {}
    for trace in traces:
        own = own_times(trace)
        begin, end = recorded(trace)
        for event in range(len(trace)):
            if trace.category[event] in (_STEP, _FORWARD) or not begin <= trace.start[event] <= end:
                continue  # steps and forward passes consist of operations
            name, device = trace.text(event), trace.threads[trace.thread[event]].device
            row = found.get((name, device))
            if row is None:
                row = found[name, device] = OpTime(name, CATEGORIES[trace.category[event]], device=device)
            row.calls[trace.rank] = row.calls.get(trace.rank, 0) + 1
            row.own[trace.rank] = row.own.get(trace.rank, 0.0) + max(0.0, own[event]) / 1e6
            row.total[trace.rank] = row.total.get(trace.rank, 0.0) + trace.duration[event] / 1e6
    return sorted(found.values(), key=lambda row: -sum(row.own.values()))


def line_table(traces: Sequence[RankTrace], lines: Mapping[int, SampledLines]) -> list[LineSeconds]:
    """Return the lines of the user's code by time, the longest first."""
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


def recorded(trace: RankTrace) -> tuple[float, float]:
    """Return the time that the complete steps take, else that of all events."""
    steps = trace.steps()
    if steps and trace.facts.get("steps", 1):
        return steps[0][0], steps[-1][1]
    if not len(trace):
        return 0.0, 0.0
    return trace.start[0], trace.last_end()
