"""Match the collectives of all ranks, and find the ranks that the others wait for."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.profiling.tables import Line, SampledLines
from notebook_accelerate.profiling.trace import CATEGORIES, RankTrace

MAX_SHIFT = 60
"""The maximum difference, in collectives, between the starts of two ranks' recordings."""
LEAST_AGREEMENT = 0.9
"""The minimum share of collectives that must agree before the sequences of two ranks are matched."""
CLOCKS = 100.0
"""The maximum difference in microseconds between the clocks of torch's profiler and its flight recorder."""
_COLLECTIVE = CATEGORIES.index("collective")
_DESCRIBED = "record_param_comms"
"""The event that torch records around each NCCL collective, with its group and sizes."""
_BYTES = {
    "float": 4, "double": 8, "int": 4, "long": 8, "long int": 8, "c10::Half": 2, "c10::BFloat16": 2, "bool": 1,
    "unsigned char": 1, "signed char": 1, "short": 2, "Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8,
    "Int": 4, "Byte": 1,
}  # fmt: skip


@dataclass(frozen=True)
class CollectiveWait:
    """The wait of ranks, in a collective of each step, for a rank that enters it last.

    Attributes:
        label: The collective as text, for example "all_reduce #7 (64 MB)".
        culprit: The last rank.
        seconds: By waiting rank, its waiting time per step, minus the time of operations that it runs while it waits.
        line: The line that the last rank executes during that time, or None if it is unknown.
        usual: The lower quartile of the steps' longest waits. In three of four steps, a rank waits at least this long.
        computing: The share of the waiting time during which the last rank runs operations.
    """

    label: str
    culprit: int
    seconds: Mapping[int, float]
    line: Line | None
    usual: float
    computing: float = 0.0


def find_waits(
    traces: Mapping[int, RankTrace], clocks: Mapping[int, float], lines: Mapping[int, SampledLines],
    joined: Sequence[Joined],
) -> list[CollectiveWait]:  # fmt: skip
    """Return the waits for each rank that is last, from the collective with the longest wait in each step."""
    rows: dict[int, dict[int, tuple[float, Joined]]] = {}
    for each in joined:
        step = _step_of(traces[each.last], each.calls[each.last].event)
        longest = max(each.waits().values(), default=0.0)
        if step is not None and longest > rows.setdefault(each.last, {}).get(step, (0.0, each))[0]:
            rows[each.last][step] = longest, each
    busy = {rank: _Operations(trace) for rank, trace in traces.items()} if rows else {}
    found = [_wait(rank, steps, traces, busy, clocks, lines) for rank, steps in rows.items() if steps]
    return sorted(found, key=lambda wait: -max(wait.seconds.values(), default=0.0))


def _step_of(trace: RankTrace, event: int) -> int | None:
    """Return the step that called a collective, even if its kernel runs during a later step."""
    launch = trace.launch_of(event)
    at = trace.start[event if launch is None else launch]
    return next((index for index, (start, end) in enumerate(trace.steps()) if start <= at < end), None)


def _wait(
    culprit: int, steps: Mapping[int, tuple[float, Joined]], traces: Mapping[int, RankTrace],
    operations: Mapping[int, _Operations], clocks: Mapping[int, float], lines: Mapping[int, SampledLines],
) -> CollectiveWait:  # fmt: skip
    count = max(1, len(traces[culprit].steps()))
    seconds: dict[int, float] = {}
    longest = [0.0] * (count - len(steps))
    known: dict[Line, float] = {}
    busy = whole = 0.0
    for _, joined in steps.values():
        entered = joined.calls[culprit].start
        longest.append(0.0)
        for rank, waited in joined.waits().items():
            begin, end = joined.calls[rank].start - clocks[rank], entered - clocks[rank]
            idle = max(0.0, waited - operations[rank].seconds(begin, end))
            longest[-1] = max(longest[-1], idle)
            seconds[rank] = seconds.get(rank, 0.0) + idle / count
        first = min(call.start for call in joined.calls.values())
        begin, end = first - clocks[culprit], entered - clocks[culprit]
        busy, whole = busy + operations[culprit].seconds(begin, end), whole + end - begin
        for index, a, b in lines[culprit].spans(begin * 1e6, end * 1e6):
            if (line := lines[culprit].line(index)) is not None:
                known[line] = known.get(line, 0.0) + b - a
    label = max((joined for _, joined in steps.values()), key=lambda each: round(max(each.waits().values()), 5)).label()
    line = max(known, key=lambda each: known[each], default=None)
    usual = sorted(longest)[count // 4]
    return CollectiveWait(label, culprit, seconds, line, usual, busy / max(1e-9, whole))


class _Operations:
    """The times when a rank computes: kernels on its device, or else outermost operations of its main thread."""

    def __init__(self, trace: RankTrace) -> None:
        self._starts, self._ends = array("d"), array("d")
        main, until = trace.main(), float("-inf")
        kernels = [event for event in range(len(trace)) if trace.on_device(event)]
        for event in kernels or range(len(trace)):
            if kernels:
                inside = not trace.is_collective_kernel(event)
            else:
                inside = trace.thread[event] == main and trace.text(event).startswith("aten::")
            if inside and trace.end(event) > until:
                self._starts.append(max(trace.start[event], until))
                self._ends.append(until := trace.end(event))

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds of computation between two times, which are given in seconds on the trace's clock."""
        begin, end, total = begin * 1e6, end * 1e6, 0.0
        for index in range(max(0, bisect_right(self._starts, begin) - 1), len(self._starts)):
            if self._starts[index] >= end:
                break
            total += max(0.0, min(self._ends[index], end) - max(self._starts[index], begin))
        return total / 1e6


# ---- match the collectives of ranks


@dataclass(frozen=True)
class Joined:
    """One collective that all ranks call.

    Attributes:
        number: The collective's number in its group, from 1.
        calls: Each rank's call.
    """

    number: int
    calls: Mapping[int, TracedCall]

    @property
    def last(self) -> int:
        """The rank that entered the collective last."""
        return max(self.calls, key=lambda rank: self.calls[rank].start)

    def waits(self) -> dict[int, float]:
        """Return, for each other rank, the seconds in the collective before the last rank entered it."""
        entered = self.calls[self.last].start
        return {rank: min(entered, call.end) - call.start for rank, call in self.calls.items() if rank != self.last}

    def label(self) -> str:
        """Return the collective as text, such as "all_reduce #7 (64 MB)"."""
        call = next(iter(self.calls.values()))
        size = f" ({size_text(call.nbytes)})" if call.nbytes else ""
        return f"{call.operation} #{self.number}{size}"


def join_collectives(traces: Sequence[RankTrace], clocks: Mapping[int, float]) -> list[Joined]:
    """Match the collectives of several traces. If there are several groups, omit the calls of unknown groups."""
    calls: dict[int, list[TracedCall]] = {}
    for trace in traces:
        row = calls_of(trace, clocks[trace.rank])
        calls[trace.rank] = [call for call in row if call.group] if trace.groups > 1 else row
    return join(calls)


def join(calls: Mapping[int, Sequence[TracedCall]]) -> list[Joined]:
    """Match the collectives of the ranks in each group by their numbers.

    Without numbers, calls of different ranks match if they have the same operation and size and overlap in time. If
    ranks do not agree on the calls of one operation and size, these calls are omitted.

    Args:
        calls: The calls of each rank, in chronological order.
    """
    groups = sorted({call.group for row in calls.values() for call in row})
    found: list[Joined] = []
    for group in groups:
        members = {rank: [call for call in row if call.group == group] for rank, row in calls.items()}
        members = {rank: row for rank, row in members.items() if row}
        if len(members) > 1:
            found += _join_group(members)
    return sorted(found, key=lambda joined: min(call.start for call in joined.calls.values()))


def _join_group(members: Mapping[int, Sequence[TracedCall]]) -> list[Joined]:
    if all(call.number for row in members.values() for call in row):
        numbered = {rank: {call.number: call for call in row} for rank, row in members.items()}
        common = sorted(set.intersection(*(set(row) for row in numbered.values())))
        pairs = ((number, {rank: row[number] for rank, row in numbered.items()}) for number in common)
        return [Joined(number, calls) for number, calls in pairs if _alike(calls)]
    first = next(iter(members))
    places = {call.event: place for place, call in enumerate(members[first], 1)}
    # Collectives that run at the same time may start in different orders on two ranks, so match each kind by itself.
    found = []
    for kind in dict.fromkeys(call.kind for call in members[first]):
        rows = {rank: [call for call in row if call.kind == kind] for rank, row in members.items()}
        found += [Joined(places[calls[first].event], calls) for calls in _matches(rows, first)]
    return found


def _matches(rows: Mapping[int, Sequence[TracedCall]], first: int) -> list[dict[int, TracedCall]]:
    """Match the calls of one kind, and return the calls of all ranks for each match."""
    shifts = {rank: _shift(rows[first], row) for rank, row in rows.items()}
    known = {rank: shift for rank, shift in shifts.items() if shift is not None}
    if len(known) < len(rows):
        return []
    found = (
        {rank: call for rank, row in rows.items() if (call := _at(row, index + known[rank])) is not None}
        for index in range(len(rows[first]))
    )
    return [calls for calls in found if len(calls) == len(rows)]


def _alike(calls: Mapping[int, TracedCall]) -> bool:
    return len({call.kind for call in calls.values()}) == 1


def _at(row: Sequence[TracedCall], index: int) -> TracedCall | None:
    return row[index] if 0 <= index < len(row) else None


def _shift(base: Sequence[TracedCall], other: Sequence[TracedCall]) -> int | None:
    """Return how many places a rank's sequence is ahead of the base, or None if they do not agree.

    Matching calls overlap in time, because a collective ends on no rank before all ranks have entered it.
    """
    best, most = None, 0.0
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        pairs = [(call, same) for index, call in enumerate(base) if (same := _at(other, index + shift)) is not None]
        if len(pairs) < max(1, min(len(base), len(other)) // 2):
            continue
        agreeing = sum(_overlap(call, same) for call, same in pairs) / len(pairs)
        if agreeing > most:
            best, most = shift, agreeing
        if most == 1:
            break
    return best if most >= LEAST_AGREEMENT else None


def _overlap(one: TracedCall, other: TracedCall) -> bool:
    return max(one.start, other.start) <= min(one.end, other.end) + 0.001


# ---- the collectives of one rank


@dataclass(frozen=True)
class TracedCall:
    """A collective of one rank.

    Attributes:
        event: The index of its event in the trace.
        group: The name of the process group and its ranks, or "" if they are unknown.
        operation: The name of the operation, for example "all_reduce".
        nbytes: The size of its input, or 0 if it is unknown.
        start: The start in seconds since the epoch, on the run's clock.
        end: The end in seconds since the epoch, on the run's clock.
        number: Its number among the collectives of the group, from 1, or 0 if it is unknown.
    """

    event: int
    group: str
    operation: str
    nbytes: int
    start: float
    end: float
    number: int = 0

    @property
    def kind(self) -> tuple[str, int]:
        """What must be the same on all ranks: the operation and its size."""
        return self.operation, self.nbytes


def calls_of(trace: RankTrace, clock: float) -> list[TracedCall]:
    """Return the collectives that a rank has called, in chronological order.

    Args:
        trace: The rank's trace.
        clock: The run's time at the trace's time 0, in seconds since the epoch.
    """
    found = []
    entered = _Entered(trace)
    described = [event for event in range(len(trace)) if trace.text(event) == _DESCRIBED]
    kernels = _kernels(trace, described)
    for event in range(len(trace)):
        if trace.category[event] != _COLLECTIVE:
            continue
        begin, _, operation = trace.text(event).partition(":")
        arguments = trace.arguments.get(event, {})
        if trace.text(event) == _DESCRIBED:
            if "Collective name" not in arguments or "wait" in str(arguments["Collective name"]):
                continue
            operation = str(arguments["Collective name"]).replace("allreduce", "all_reduce")
        elif begin != "gloo" and (begin != "nccl" or described):
            continue  # Skip NCCL's own event, which is inside the event that describes it.
        known, number = entered.pop_match(operation, _elements(arguments), trace.start[event])
        name = str(arguments.get("Process Group Name", known))
        group = f"{name} {trace.members.get(name, '')}".strip()
        span = kernels.get(event, event)
        start, end = clock + trace.start[span] / 1e6, clock + trace.end(span) / 1e6
        found.append(TracedCall(span, group, operation, _nbytes(arguments), start, end, number))
    return found


def _kernels(trace: RankTrace, described: Sequence[int]) -> dict[int, int]:
    """Return the longest NCCL kernel of each collective, by the event that describes the collective.

    The host only queues a collective, which takes microseconds. The wait for other ranks takes place in the kernel.
    """
    by_thread: dict[int, list[int]] = {}
    for event in described:
        by_thread.setdefault(trace.thread[event], []).append(event)
    found: dict[int, int] = {}
    for kernel in range(len(trace)):
        if not trace.is_collective_kernel(kernel) or (launch := trace.launch_of(kernel)) is None:
            continue
        row = by_thread.get(trace.thread[launch], [])
        place = bisect_right(row, trace.start[launch], key=lambda event: trace.start[event]) - 1
        if place >= 0 and trace.start[launch] <= trace.end(event := row[place]):
            longest = found.setdefault(event, kernel)
            found[event] = max(longest, kernel, key=lambda each: trace.duration[each])
    return found


class _Entered:
    """Finds the group and the number of a gloo collective from the time at which the rank entered it."""

    def __init__(self, trace: RankTrace) -> None:
        self._rows: dict[tuple[str, int], deque[tuple[float, str, int]]] = {}
        for group, number, operation, elements, seconds in trace.facts.get("collectives", ()):
            row = (seconds - trace.base) * 1e6, group, number
            self._rows.setdefault((operation, elements), deque()).append(row)

    def pop_match(self, operation: str, elements: int, start: float) -> tuple[str, int]:
        """Remove and return the group and number of the earliest match, or ("", 0) if there is no match."""
        rows = self._rows.get((operation, elements))
        if not rows or rows[0][0] > start + CLOCKS:  # A rank enters a collective before the collective's event starts.
            return "", 0
        _, group, number = rows.popleft()
        return group, number


def _elements(arguments: Mapping[str, Any]) -> int:
    dims = [each for each in arguments.get("Input Dims", ()) if all(isinstance(size, int) for size in each)]
    return sum(map(prod, dims))


def _nbytes(arguments: Mapping[str, Any]) -> int:
    if "In msg nelems" in arguments:
        return int(arguments["In msg nelems"]) * _BYTES.get(str(arguments.get("dtype", "")), 0)
    total = 0
    for dims, kind in zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False):
        if dims and all(isinstance(each, int) for each in dims):
            total += prod(dims) * _BYTES.get(str(kind), 0)
    return total
