"""Joins the collectives of ranks, and finds who waits for whom in them."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from notebook_accelerate.profiling.timeline import CATEGORIES
from notebook_accelerate.profiling.trace import RankTrace

MAX_SHIFT = 60
"""Ranks begin to record within so many collectives of each other."""
LEAST_AGREEMENT = 0.9
"""Sequences of which fewer collectives agree are not joined."""
CLOCKS = 100.0
"""Microseconds by which the clocks of torch's profiler and its flight recorder may differ."""
_COLLECTIVE = CATEGORIES.index("collective")
_DESCRIBED = "record_param_comms"
"""torch's event around each collective of NCCL, with its group and sizes."""
_BYTES = {
    "float": 4, "double": 8, "int": 4, "long": 8, "long int": 8, "c10::Half": 2, "c10::BFloat16": 2, "bool": 1,
    "unsigned char": 1, "signed char": 1, "short": 2, "Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8,
    "Int": 4, "Byte": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A collective of one rank.

    Attributes:
        event: Its index in the trace.
        group: The process group, with its ranks; "" where it is not known.
        operation: For example "all_reduce".
        nbytes: The size of its input; 0 where it is not known.
        start: Seconds since the epoch, by the run's clock.
        end: The same.
        number: Its number among those of the group, from 1; 0 where it is not known.
    """

    event: int
    group: str
    operation: str
    nbytes: int
    start: float
    end: float
    number: int = 0


@dataclass(frozen=True)
class Joined:
    """One collective of all ranks.

    Attributes:
        number: Its number among those of the group, from 1.
        calls: The call of each rank.
    """

    number: int
    calls: Mapping[int, Call]

    @property
    def last(self) -> int:
        """The rank that entered it last."""
        return max(self.calls, key=lambda rank: self.calls[rank].start)

    def waits(self) -> dict[int, float]:
        """Return how long each other rank was in it before the last one entered, in seconds."""
        entered = self.calls[self.last].start
        return {rank: min(entered, call.end) - call.start for rank, call in self.calls.items() if rank != self.last}

    def label(self) -> str:
        """Return "all_reduce #7 (64 MB)"."""
        call = next(iter(self.calls.values()))
        size = f" ({size_text(call.nbytes)})" if call.nbytes else ""
        return f"{call.operation} #{self.number}{size}"


def size_text(nbytes: float) -> str:
    """Return a number of bytes as "64 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def calls_of(trace: RankTrace, clock: float) -> list[Call]:
    """Return the collectives of a rank in order.

    Args:
        trace: The rank's trace.
        clock: The run's time of the trace's 0, in seconds since the epoch.
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
        elif begin != "gloo" and (begin != "nccl" or described):  # NCCL's own event is inside the one that describes it
            continue
        known, number = entered.take(operation, _elements(arguments), trace.start[event])
        name = str(arguments.get("Process Group Name", known))
        group = f"{name} {trace.members.get(name, '')}".strip()
        span = kernels.get(event, event)
        start, end = clock + trace.start[span] / 1e6, clock + trace.end(span) / 1e6
        found.append(Call(span, group, operation, _nbytes(arguments), start, end, number))
    return found


def _kernels(trace: RankTrace, described: Sequence[int]) -> dict[int, int]:
    """Return NCCL's kernel of each collective, by the event that describes it: the longest if there are several.

    The host queues a collective in some microseconds. A rank waits for the others in the kernel, on its device.
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
    """Finds the group and the number of gloo's collectives, by when the rank has entered them."""

    def __init__(self, trace: RankTrace) -> None:
        self._rows: dict[tuple[str, int], deque[tuple[float, str, int]]] = {}
        for group, number, operation, elements, seconds in trace.facts.get("collectives", ()):
            row = (seconds - trace.base) * 1e6, group, number
            self._rows.setdefault((operation, elements), deque()).append(row)

    def take(self, operation: str, elements: int, start: float) -> tuple[str, int]:
        """Return the group and number of the earliest one that is left; it was entered before its event begins."""
        rows = self._rows.get((operation, elements))
        if not rows or rows[0][0] > start + CLOCKS:
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


def join(calls: Mapping[int, Sequence[Call]]) -> list[Joined]:
    """Join the collectives of ranks that are in the same group: those with the same number.

    Without numbers, collectives of ranks are the same if they have the same operation and size, at the same time; a
    group whose ranks do not agree is left out.

    Args:
        calls: The calls of each rank, in order.
    """
    groups = sorted({call.group for row in calls.values() for call in row})
    found: list[Joined] = []
    for group in groups:
        members = {rank: [call for call in row if call.group == group] for rank, row in calls.items()}
        members = {rank: row for rank, row in members.items() if row}
        if len(members) > 1:
            found += _join_group(members)
    return sorted(found, key=lambda joined: min(call.start for call in joined.calls.values()))


def _join_group(members: Mapping[int, Sequence[Call]]) -> list[Joined]:
    if all(call.number for row in members.values() for call in row):
        numbered = {rank: {call.number: call for call in row} for rank, row in members.items()}
        common = sorted(set.intersection(*(set(row) for row in numbered.values())))
        pairs = ((number, {rank: row[number] for rank, row in numbered.items()}) for number in common)
        return [Joined(number, calls) for number, calls in pairs if _alike(calls)]
    first, *others = members
    shifts = {first: 0}
    for rank in others:
        shift = _shift(members[first], members[rank])
        if shift is None:
            return []
        shifts[rank] = shift
    found = []
    for index in range(len(members[first])):
        row = {rank: _at(members[rank], index + shifts[rank]) for rank in members}
        calls = {rank: call for rank, call in row.items() if call is not None}
        if len(calls) == len(members) and _alike(calls):
            found.append(Joined(index + 1, calls))
    return found


def _alike(calls: Mapping[int, Call]) -> bool:
    return len({(call.operation, call.nbytes) for call in calls.values()}) == 1


def _at(row: Sequence[Call], index: int) -> Call | None:
    return row[index] if 0 <= index < len(row) else None


def _shift(base: Sequence[Call], other: Sequence[Call]) -> int | None:
    """Return by how many places a rank's sequence is ahead of the base's; None where they do not agree.

    A collective ends on no rank before all have entered it.
    """
    best, most = None, 0.0
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        pairs = [(call, same) for index, call in enumerate(base) if (same := _at(other, index + shift)) is not None]
        if len(pairs) < max(1, min(len(base), len(other)) // 2):
            continue
        agreeing = sum(_same(call, same) for call, same in pairs) / len(pairs)
        if agreeing > most:
            best, most = shift, agreeing
        if most == 1:
            break
    return best if most >= LEAST_AGREEMENT else None


def _same(one: Call, other: Call) -> bool:
    overlap = max(one.start, other.start) <= min(one.end, other.end) + 0.001
    return one.operation == other.operation and one.nbytes == other.nbytes and overlap
