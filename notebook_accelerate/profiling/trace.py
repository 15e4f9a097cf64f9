"""Reads a trace of torch's profiler (Chrome's format) into columns."""

from __future__ import annotations

import base64
import gzip
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any

from notebook_accelerate.profiling.timeline import CATEGORIES
from notebook_accelerate.telemetry.trace_names import AFTER_STEPS, KEY

STEP = "ProfilerStep#"
_CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
_PLAIN = {
    "kernel": "kernel", "gpu_memcpy": "memory", "gpu_memset": "memory", "cuda_runtime": "runtime",
    "cuda_driver": "runtime", "python_function": "python",
}  # fmt: skip
_REPEATED = ("Trace", "gpu_user_annotation")
"""Events that say again what others say: the whole recording, and a step's time on a stream of a device."""
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NAMED = (
    (STEP, "step"), (AFTER_STEPS, "step"), ("enumerate(DataLoader)", "loader"), ("Optimizer.", "optimizer"),
    ("gloo:", "collective"), ("nccl:", "collective"), ("c10d::", "collective"), ("record_param_comms", "collective"),
    ("ncclDevKernel", "collective"), ("ncclKernel", "collective"), ("autograd::engine", "backward"),
    ("DistributedDataParallel.forward", "forward"),
)  # fmt: skip
_SHAPED = ("mm", "matmul", "conv", "linear", "attention", "gloo:", "nccl", "record_param_comms", "embedding")
"""Parts of the names of events whose shapes are kept."""


@dataclass(frozen=True)
class Thread:
    """A thread of the process, or a stream of a device."""

    process: str
    number: str
    device: bool


@dataclass
class RankTrace:
    """The trace of one rank, in parallel columns, in the order of start.

    Attributes:
        rank: The rank.
        start: Microseconds by the trace's own clock.
        duration: Microseconds.
        name: Index in ``names``.
        category: Index in ``timeline.CATEGORIES``.
        thread: Index in ``threads``.
        names: The names of events.
        threads: The threads and streams.
        arguments: By event, the arguments that torch has recorded of it, where they are of use.
        memory: Allocations: time, bytes (negative: freed), address.
        base: The time of the trace's 0, in seconds since the epoch.
        facts: What the rank has recorded besides: see ``worker.step_profiler``.
        groups: The number of process groups; 0 where it is not known.
        world: The number of ranks of the training; 0 where it is not known.
        members: The ranks of each process group by its name, as far as torch tells.
    """

    rank: int
    start: array[float] = field(default_factory=lambda: array("d"))
    duration: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("I"))
    category: array[int] = field(default_factory=lambda: array("B"))
    thread: array[int] = field(default_factory=lambda: array("I"))
    names: list[str] = field(default_factory=list)
    threads: list[Thread] = field(default_factory=list)
    arguments: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    base: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    groups: int = 0
    world: int = 0
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _steps: list[tuple[float, float]] | None = None

    def __len__(self) -> int:
        return len(self.start)

    def end(self, event: int) -> float:
        """Return when an event ends."""
        return self.start[event] + self.duration[event]

    def text(self, event: int) -> str:
        """Return the name of an event."""
        return self.names[self.name[event]]

    def main(self) -> int:
        """Return the index of the thread that trains: the one with the steps, else the one with most events."""
        counts: dict[int, int] = {}
        step = _CATEGORY["step"]
        for event in range(len(self)):
            if self.category[event] == step:
                return self.thread[event]
            if not self.threads[self.thread[event]].device:
                counts[self.thread[event]] = counts.get(self.thread[event], 0) + 1
        return max(counts, key=lambda each: counts[each], default=0)

    def steps(self) -> list[tuple[float, float]]:
        """Return start and end of each complete step."""
        if self._steps is None:
            step, first = _CATEGORY["step"], int(self.facts.get("skipped", 0))
            events = [event for event in range(len(self)) if self.category[event] == step]
            found = [(self.start[event], self.end(event)) for event in events if self.text(event).startswith(STEP)]
            self._steps = found[first : first + int(self.facts.get("steps", len(found)))]
        return self._steps

    def last_end(self) -> float:
        """Return when the last of its events ends; 0.0 without events."""
        return max(map(add, self.start, self.duration), default=0.0)

    def sampled_steps(self) -> list[tuple[float, float]]:
        """Return start and end of each complete step, with those that were only sampled after the recorded ones."""
        times = [nanoseconds / 1e3 - self.base * 1e6 for nanoseconds in self.facts.get("boundaries", ())]
        return [*self.steps(), *pairwise(times)]


def read_trace(path: str | Path, rank: int | None = None) -> RankTrace:
    """Read a trace's file, also one that is compressed with gzip.

    Args:
        path: The file.
        rank: The rank; None: the one that the file names.

    Raises:
        ValueError: The file is not a trace of torch's profiler.
    """
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    try:
        loaded = json.loads(data)
        rows = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
        return parse(loaded if isinstance(loaded, dict) else {}, rows, rank)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{path} is not a trace of torch's profiler ({type(error).__name__}: {error})") from None


def parse(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], rank: int | None = None) -> RankTrace:
    """Return a trace's events in columns; see ``read_trace``."""
    world = head.get("distributedInfo") or {}
    facts = _facts(head.get(KEY))
    number = rank if rank is not None else int(facts.get("rank", world.get("rank", 0)))
    trace = RankTrace(number, base=float(head.get("baseTimeNanoseconds") or 0) / 1e9, facts=facts)
    trace.world = int(world.get("world_size", 0))
    trace.members = {str(row.get("pg_name")): tuple(row.get("ranks") or ()) for row in world.get("pg_config") or ()}
    trace.groups = int(world.get("pg_count") or len(world.get("pg_config") or ()))
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    complete = [row for row in rows if row.get("ph") == "X" and row.get("cat") not in _REPEATED]
    complete.sort(key=lambda row: (row["ts"], -row.get("dur", 0.0)))
    for row in complete:
        _add(trace, row, names, threads)
    trace.names, trace.threads = list(names), list(threads)
    trace.memory = sorted(
        (float(row["ts"]), int(row["args"].get("Bytes", 0)), int(row["args"].get("Addr", 0)))
        for row in rows
        if row.get("name") == "[memory]" and row.get("args")
    )
    return trace


def _facts(value: object) -> Mapping[str, Any]:
    """Return what a rank has added to its trace: JSON, compressed and in base64, which torch writes unchanged."""
    if isinstance(value, str):
        value = json.loads(gzip.decompress(base64.b64decode(value)))
    return value if isinstance(value, dict) else {}


def _add(trace: RankTrace, row: Mapping[str, Any], names: dict[str, int], threads: dict[Thread, int]) -> None:
    name, kind = str(row["name"]), str(row.get("cat", ""))
    arguments = row.get("args") or {}
    place = Thread(str(row.get("pid", "")), str(row.get("tid", "")), kind in _DEVICE)
    event = len(trace.start)
    trace.start.append(float(row["ts"]))
    trace.duration.append(float(row.get("dur", 0.0)))
    trace.name.append(names.setdefault(name, len(names)))
    trace.category.append(_CATEGORY[category_of(name, kind)])
    trace.thread.append(threads.setdefault(place, len(threads)))
    if arguments and any(part in name for part in _SHAPED):
        trace.arguments[event] = {key: value for key, value in arguments.items() if key in _KEPT}


_KEPT = (
    "Input Dims", "Input type", "Process Group Name", "Seq", "Collective name", "dtype", "In msg nelems",
    "Out msg nelems",
)  # fmt: skip


def category_of(name: str, kind: str) -> str:
    """Return the category of an event by its name, and by torch's own category."""
    for begin, category in _NAMED:
        if name.startswith(begin):
            return category
    return _PLAIN.get(kind, "op")


__all__ = ["STEP", "RankTrace", "Thread", "category_of", "parse", "read_trace"]
