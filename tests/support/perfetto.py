"""What Perfetto keeps of a file in Chrome's trace format, by the rules of its importer.

Its trace processor is a program that no package has. The rules are those of its documentation, and of the messages that
it counts as errors of the import: times are cut off to whole nanoseconds, events are taken in the order of their times,
an event that overlaps one of its thread without lying within it is dropped, and an arrow begins and ends at an event
that is open then, and begins first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slice:
    """An event on a thread, in nanoseconds."""

    process: str
    thread: str
    name: str
    start: int
    end: int


@dataclass
class _Import:
    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    open: dict[tuple[int, int], list[Slice]] = field(default_factory=dict)
    begun: dict[int, Slice] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    arrows: list[tuple[Slice, Slice]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any], time: int) -> None:
        process, thread = row["pid"], row["tid"]
        stack = self.open.setdefault((process, thread), [])
        while stack and stack[-1].end <= time and row["ph"] == "X":
            stack.pop()
        if row["ph"] == "X":
            end = time + int(row["dur"] * 1000.0)
            if not stack or end <= stack[-1].end:
                stack.append(Slice(self.processes[process], self.threads[thread], row["name"], time, end))
                self.slices.append(stack[-1])
        elif stack and row["ph"] == "s":
            self.begun[row["id"]] = stack[-1]
        elif stack and row["id"] in self.begun:
            self.arrows.append((self.begun[row["id"]], stack[-1]))


def imported(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Slice], list[tuple[Slice, Slice]]]:
    """Return the events that are kept, and the arrows."""
    found = _Import()
    for row in rows:
        assert min(row["pid"], row["tid"]) >= 0, row
        if row["ph"] == "M" and row["name"] == "process_name":
            found.processes[row["pid"]] = row["args"]["name"]
        elif row["ph"] == "M" and row["name"] == "thread_name":
            assert row["tid"] not in found.threads, row
            found.threads[row["tid"]] = row["args"]["name"]
    timed = [(int(row["ts"] * 1000.0), row) for row in rows if row["ph"] in "Xsf"]
    for time, row in sorted(timed, key=lambda each: each[0]):
        found.add(row, time)
    return found.slices, found.arrows
