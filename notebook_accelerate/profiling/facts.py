"""Extract facts from a profile: plain numbers for each rank, which the rules turn into findings."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from statistics import median
from typing import Any

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.profiling.collective_waits import CollectiveWait
from notebook_accelerate.profiling.tables import Line, SampledLines, recorded
from notebook_accelerate.profiling.trace import (
    CATEGORIES,
    RankTrace,
    is_logging,
    is_outside_torch,
    is_saving,
    is_waiting_for_batch,
)

_LOADER, _OPTIMIZER, _COLLECTIVE, _STEP, _RUNTIME, _BACKWARD = (
    CATEGORIES.index(name) for name in ("loader", "optimizer", "collective", "step", "runtime", "backward")
)
_CONTAINING = tuple(CATEGORIES.index(name) for name in ("step", "forward", "python"))
"""The categories of events that also contain the user's own code."""
SCALED = "aten::_amp_foreach_non_finite_check_and_unscale_"
"""The operation that GradScaler runs before it checks whether a gradient overflowed."""
SMALL = 50.0
"""Duration in microseconds below which an operation counts as small."""
LOOP = 500.0
"""Gaps between two small operations that are shorter than this many microseconds count as their time."""
LOOP_OF_READS = 100.0
"""Gaps between two reads that are shorter than this many microseconds count as their time. Longer ones contain other
operations."""
PAUSE = 1000.0
"""Gaps between two operations that are longer than this many microseconds are not part of their cost."""
LONG = 2.0
"""A step that takes more than this multiple of the median is an outlier."""
LEAST_LATER = 2
"""Minimum number of sampled steps. Fewer prove nothing: with two worker processes, every second step may wait."""
SURELY_MORE = 1.25
"""A thread counts as holding the lock only if it computes this many times as much as the main thread.

The main thread's own computation may run without the lock.
"""
READS = re.compile(r"\.item\(|\.tolist\(|\bfloat\(|\bint\(|\bbool\(|\bif |\bwhile ")
MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::_scaled_dot_product")
OUTER = ("aten::linear", "aten::matmul", "aten::conv1d", "aten::conv2d", "aten::conv3d")
"""Operations that call those in `MATRIX`. Their input has the shape of the module's input."""
COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph", "CompiledFxGraph")


@dataclass
class RankFacts:
    """The facts of one rank. Times are in seconds per step.

    Attributes:
        rank: The number of the rank.
        steps: The number of complete steps that were recorded.
        step: The time of a step.
        loader: The time spent waiting for a DataLoader.
        loader_processes: Whether the DataLoader has worker processes.
        compute: The time of the main thread's operations, without collectives, loading and the optimizer. On a device,
            the time of the kernels.
        optimizer: The time of the optimizer.
        rows: The first dimension of the first matrix product's input in each step.
        ops: The number of outermost operations per step, without the optimizer's.
        small_ops: The number of small operations among them.
        small_seconds: The time of the small operations, including the short gaps between them.
        optimizer_ops: The number of operations per step in the optimizer.
        items: The number of ``item()`` calls per step, without GradScaler's and the optimizer's.
        item_seconds: The time of these calls, including the short gaps between them.
        item_line: The line with most of these calls.
        kernels: The number of kernels per step on a device.
        kernel_seconds: The device's busy time without NCCL's kernels, which are also busy while they wait for ranks.
        communicating: The time during which only NCCL kernels run on the device.
        synchronizing: The time spent waiting for the device, for example in ``item()``.
        barriers: The number of barriers per step.
        barrier_seconds: The main thread's time in barriers.
        barrier_line: The line with most of the barriers.
        matrix: The time of matrix products by element type, such as "float".
        compiled: Whether compiled code ran.
        logging: The time spent in printing and logging.
        logging_line: The line that prints or logs.
        saving: The time spent in saving checkpoints.
        saving_line: The line that saves.
        saving_steps: The share of steps that contain a save.
        threads: The name, share and line of other Python threads that compute much more than the main thread while
            samples wait for the interpreter lock. The share is the thread's part of the CPU time of both threads.
        blocked: The share of samples that had to wait for the interpreter lock.
        outside: The time outside of torch's operations, in the user's code or in other libraries. Short gaps between
            operations do not count.
        outside_line: The line with most of this time.
        delay: The share of time that the main thread waited for a CPU core.
        grown: Variables that hold a growing number of tensors with graphs: name, count, growth over all steps.
        retained: Variables that keep activations between steps: name, bytes.
        memory_growth: Bytes per step that were allocated and not freed, or 0 if allocations were not recorded.
        asked: The settings that the training requested: "mixed_precision", "compiled".
    """

    rank: int
    steps: int = 0
    step: float = 0.0
    loader: float = 0.0
    loader_processes: bool = False
    compute: float = 0.0
    optimizer: float = 0.0
    rows: float = 0.0
    ops: float = 0.0
    small_ops: float = 0.0
    small_seconds: float = 0.0
    optimizer_ops: float = 0.0
    items: float = 0.0
    item_seconds: float = 0.0
    item_line: Line | None = None
    kernels: float = 0.0
    kernel_seconds: float = 0.0
    communicating: float = 0.0
    synchronizing: float = 0.0
    barriers: float = 0.0
    barrier_seconds: float = 0.0
    barrier_line: Line | None = None
    matrix: dict[str, float] = field(default_factory=dict)
    compiled: bool = False
    logging: float = 0.0
    logging_line: Line | None = None
    saving: float = 0.0
    saving_line: Line | None = None
    saving_steps: float = 0.0
    threads: list[tuple[str, float, Line]] = field(default_factory=list)
    blocked: float = 0.0
    outside: float = 0.0
    outside_line: Line | None = None
    delay: float = 0.0
    grown: list[tuple[str, int, int]] = field(default_factory=list)
    retained: list[tuple[str, int]] = field(default_factory=list)
    memory_growth: float = 0.0
    asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def idle(self) -> float:
        """The time per step in which nothing runs on the device, or the time of a step if there is no device."""
        return max(0.0, self.step - self.kernel_seconds - self.communicating) if self.kernels else self.step

    @property
    def running(self) -> float:
        """The time of a step without the time that the main thread waited for a CPU core."""
        return self.step * (1 - min(self.delay, 0.9))


@dataclass
class ProfileFacts:
    """The facts of all ranks, and the ranks that they wait for."""

    ranks: list[RankFacts]
    waits: list[CollectiveWait] = field(default_factory=list)
    world: int = 0
    """The number of ranks of the training run, or 0 if it is unknown."""


class RankReader:
    """Reads the facts of one rank from its trace.

    Args:
        trace: The trace of the rank.
        lines: The stack samples that were taken during the trace.
    """

    def __init__(self, trace: RankTrace, lines: SampledLines) -> None:
        self._trace, self._lines = trace, lines
        self._begin, self._end = recorded(trace)
        self._steps = trace.steps() if trace.facts.get("steps", 1) else []
        self._sampled = trace.sampled_steps() if self._steps else []
        self._main = trace.main()
        # The backward pass on a device runs in a thread of autograd while the main thread waits.
        self._training = {self._main} | {
            trace.thread[event] for event in range(len(trace)) if trace.category[event] == _BACKWARD
        }
        self._kernels = _LaunchedKernels(trace)
        self._waits_in_barriers = 0.0
        self._per_step = 1e6 * max(1, len(self._steps))
        self.facts = RankFacts(trace.rank, len(self._steps))

    def read(self) -> RankFacts:
        """Return the facts of the rank."""
        facts, trace = self.facts, self._trace
        facts.step = (self._end - self._begin) / self._per_step
        facts.asked = dict(trace.facts.get("asked") or {})
        facts.compiled = any(name.startswith(COMPILED) for name in trace.names)
        self._read_main_thread()
        self._read_device()
        self._read_barriers()
        self._read_samples()
        self._read_outside()
        self._read_variables()
        self._read_memory()
        return facts

    def _inside(self, event: int) -> bool:
        return self._begin <= self._trace.start[event] < self._end

    def _main_events(self) -> list[int]:
        trace = self._trace
        return [
            event
            for event in range(len(trace))
            if trace.thread[event] in self._training and trace.category[event] != _STEP and self._inside(event)
        ]

    def _read_main_thread(self) -> None:
        trace, facts = self._trace, self.facts
        outside = {_LOADER: -1.0, _OPTIMIZER: -1.0, _COLLECTIVE: -1.0}
        sums = {_LOADER: 0.0, _OPTIMIZER: 0.0}
        leaf_end = item_end = matrix_end = -1.0
        busy = small = last_end = 0.0
        count = smalls = optimizer_ops = 0
        reads: list[int] = []
        rows: dict[int, int] = {}
        events = self._main_events()
        small_names = self._small_names(events)
        for event in events:
            start, end, category, name = trace.start[event], trace.end(event), trace.category[event], trace.text(event)
            if category in outside:
                if start >= outside[category]:
                    outside[category] = end
                    if category in sums:
                        sums[category] += end - start
                    facts.loader_processes |= "MultiProcessing" in name
                continue
            if category == _RUNTIME or not name.startswith("aten::"):
                continue
            if self._read_matrix(event, name, rows, inside=start < matrix_end):
                matrix_end = end
            if start < outside[_OPTIMIZER]:
                optimizer_ops += 1
                continue
            if start < outside[_LOADER] or start < outside[_COLLECTIVE]:
                continue
            if name == "aten::item" and start >= item_end:
                item_end = end
                reads.append(event)
            if start < leaf_end:
                continue
            leaf_end, count = end, count + 1
            busy += end - start
            if small_names[trace.name[event]]:
                smalls += 1
                small += min(end - start, LOOP) + (start - last_end if start - last_end < LOOP else 0.0)
            last_end = end
        facts.loader, facts.optimizer = (sums[each] / self._per_step for each in (_LOADER, _OPTIMIZER))
        facts.compute, facts.small_seconds = busy / self._per_step, small / self._per_step
        steps = max(1, facts.steps)
        facts.ops, facts.small_ops, facts.optimizer_ops = count / steps, smalls / steps, optimizer_ops / steps
        facts.rows = sum(rows.values()) / max(1, len(rows))
        scaler = self._scaler_reads(events)
        self._read_items([(trace.start[event], trace.end(event)) for event in reads if event not in scaler])

    def _small_names(self, events: Sequence[int]) -> dict[int, bool]:
        """Return whether each operation counts as small, by the operation's name.

        The median is used because a single call takes long if the thread is interrupted.
        """
        durations: dict[int, list[float]] = {}
        for event in events:
            durations.setdefault(self._trace.name[event], []).append(self._trace.duration[event])
        return {name: median(each) < SMALL for name, each in durations.items()}

    def _read_matrix(self, event: int, name: str, rows: dict[int, int], *, inside: bool) -> bool:
        """Add the time of a matrix product by element type, and record the rows of the first one in each step.

        Returns:
            Whether the time was added. A product ``inside`` another one is already part of the other's time.
        """
        if not name.startswith(MATRIX) and name not in OUTER:
            return False
        arguments = self._trace.arguments.get(event, {})
        kinds = [kind for kind in arguments.get("Input type", ()) if kind in ("float", "c10::BFloat16", "c10::Half")]
        added = bool(kinds) and name not in OUTER and not inside
        if added:
            # Attention in reduced precision also takes float32 statistics as inputs, so the other type decides.
            kind, matrix = next((each for each in kinds if each != "float"), "float"), self.facts.matrix
            matrix[kind] = matrix.get(kind, 0.0) + self._kernels.duration(event) / self._per_step
        step = next((i for i, (a, b) in enumerate(self._steps) if a <= self._trace.start[event] < b), None)
        dims = next(
            (each for each in arguments.get("Input Dims", ()) if isinstance(each, list) and len(each) > 1), None
        )
        if name in OUTER and dims is not None and step is not None and all(isinstance(each, int) for each in dims):
            rows.setdefault(step, dims[0] if "conv" in name else prod(dims[:-1]))
        return added

    def _scaler_reads(self, events: Sequence[int]) -> set[int]:
        """Return the reads by GradScaler, which checks in each step whether a gradient overflowed."""
        found, scaled = set(), False
        for event in events:
            name = self._trace.text(event)
            if scaled and name == "aten::item":
                found.add(event)
            scaled = (scaled and name != "aten::item") or name == SCALED
        return found

    def _read_items(self, spans: Sequence[tuple[float, float]]) -> None:
        """Add up the calls to ``item()`` and the short gaps between them, which belong to a loop over values."""
        facts = self.facts
        facts.items = len(spans) / max(1, facts.steps)
        total, last = 0.0, -1e18
        for start, end in spans:
            total += min(end - start, LOOP) + (start - last if start - last < LOOP_OF_READS else 0.0)
            last = end
        facts.item_seconds = total / self._per_step
        known: dict[Line, int] = {}
        for start, end in spans:
            if (line := self._lines.at(start, end)) is not None:
                known[line] = known.get(line, 0) + 1
        reading = [line for line in known if READS.search(line.source)] or list(known)
        facts.item_line = max(reading, key=lambda each: known[each], default=None)

    def _read_device(self) -> None:
        trace, facts = self._trace, self.facts
        events = [event for event in range(len(trace)) if self._inside(event)]
        on_device = [event for event in events if trace.on_device(event)]
        computing = [event for event in on_device if not trace.is_collective_kernel(event)]
        busy, either = (_union(trace, each) for each in (computing, on_device))
        facts.kernels, facts.kernel_seconds = len(on_device) / max(1, facts.steps), busy / self._per_step
        facts.communicating = (either - busy) / self._per_step
        waits = [event for event in events if self._is_wait_for_device(event)]
        facts.synchronizing = sum(trace.duration[event] for event in waits) / self._per_step
        if on_device:
            facts.compute = facts.kernel_seconds

    def _is_wait_for_device(self, event: int) -> bool:
        return self._trace.category[event] == _RUNTIME and self._trace.text(event).endswith("Synchronize")

    def _read_barriers(self) -> None:
        trace, facts = self._trace, self.facts
        found = [
            (trace.start[event], max(trace.end(event), self._end_of_barrier(event)))
            for event in range(len(trace))
            if trace.text(event) == "c10d::barrier" and self._inside(event)
        ]
        found += [
            (trace.start[event], trace.end(event))
            for event in range(0 if not found else len(trace), len(trace))
            if trace.text(event) == "gloo:barrier" and self._inside(event)
        ]
        facts.barriers = len(found) / max(1, facts.steps)
        facts.barrier_seconds = sum(end - start for start, end in found) / self._per_step
        facts.synchronizing = max(0.0, facts.synchronizing - self._waits_in_barriers / self._per_step)
        known = [line for start, end in found if (line := self._lines.at(start, end)) is not None]
        facts.barrier_line = max(known, key=known.count, default=None)

    def _end_of_barrier(self, barrier: int) -> float:
        """Return the end of a barrier: of gloo's operation on another thread, or of the wait for NCCL's kernel."""
        trace = self._trace
        for other in range(barrier, min(len(trace), barrier + 2000)):
            if trace.text(other) == "gloo:barrier":
                return trace.end(other)
            if trace.thread[other] != trace.thread[barrier] or trace.start[other] < trace.start[barrier]:
                continue
            if self._is_wait_for_device(other):
                self._waits_in_barriers += trace.duration[other]
                return trace.end(other)
            if trace.start[other] > trace.end(barrier) and trace.text(other).startswith("aten::"):
                break  # The next operation of the training function has started.
        return 0.0

    def _read_samples(self) -> None:
        facts, lines = self.facts, self._lines
        if not lines.times:
            return
        facts.logging, facts.logging_line, _ = self._where(is_logging)
        facts.saving, facts.saving_line, facts.saving_steps = self._where(is_saving)
        facts.blocked = lines.blocked
        for thread in lines.threads:
            if thread.get("lock", 0.0) <= SURELY_MORE * lines.lock:
                continue
            line = lines.named(FrameInfo(*thread["frame"]))
            facts.threads.append((thread["name"], thread["cpu"] / max(1e-9, lines.cpu + thread["cpu"]), line))
        marks = self._trace.facts.get("marks") or []
        if len(marks) > 1:
            wall = (marks[-1]["time"] - marks[0]["time"]) / 1e9
            facts.delay = (marks[-1].get("delay", 0.0) - marks[0].get("delay", 0.0)) / max(1e-9, wall)
        if facts.loader_processes:
            facts.loader = max(facts.loader, self._later_loading())

    def _read_outside(self) -> None:
        """Add up the samples that were taken between operations and end outside of torch, by the user's lines."""
        lines = self._lines
        outside = [is_outside_torch([lines.frames[each] for each in stack]) for stack in lines.stacks]
        totals: dict[Line, float] = {}
        for start, end in self._pauses():
            for index, begin, until in lines.spans(start, end):
                if outside[lines.which[index]] and (line := lines.line(index)) is not None:
                    totals[line] = totals.get(line, 0.0) + until - begin
        self.facts.outside = sum(totals.values()) / self._per_step
        self.facts.outside_line = max(totals, key=lambda each: totals[each], default=None)

    def _pauses(self) -> Iterator[tuple[float, float]]:
        """Yield the gaps longer than `PAUSE` between the operations of the training's threads and the collectives."""
        trace, until = self._trace, self._begin
        for event in range(len(trace)):
            ours = trace.thread[event] in self._training or trace.category[event] == _COLLECTIVE
            if not ours or not self._inside(event) or trace.category[event] in _CONTAINING:
                continue
            if trace.start[event] - until > PAUSE:
                yield until, trace.start[event]
            until = max(until, trace.end(event))
        if self._end - until > PAUSE:
            yield until, self._end

    def _later_loading(self) -> float:
        """Return the seconds per step spent waiting for a DataLoader's processes, in the steps that were only sampled.

        The recorded steps may use batches that were prepared while torch's profiler started.
        """
        later = self._sampled[len(self._steps) :]
        if len(later) < LEAST_LATER:
            return 0.0
        waiting = sum(self._lines.seconds_where(is_waiting_for_batch, start, end) for start, end in later)
        return 1e6 * waiting / sum(end - start for start, end in later) * self.facts.step

    def _where(self, matches: Callable[[list[FrameInfo]], bool]) -> tuple[float, Line | None, float]:
        """Return the seconds per step in matching stacks, their line, and the share of steps that contain one.

        A few steps may take much longer, for example because another process gets the CPU core. The time is therefore
        also calculated without these steps, and the larger share is used.
        """
        steps = self._sampled
        if not steps:
            return 0.0, None, 0.0
        lengths = [(end - start) / 1e6 for start, end in steps]
        each = [self._lines.seconds_where(matches, start, end) for start, end in steps]
        usual = [index for index, length in enumerate(lengths) if length <= LONG * median(lengths)]
        if not sum(lengths[i] for i in usual):  # A damaged trace may contain steps of length 0.
            return 0.0, None, 0.0
        share = max(sum(each) / sum(lengths), sum(each[i] for i in usual) / sum(lengths[i] for i in usual))
        found, recorded_steps = self._lines.lines_where(matches), each[: len(self._steps)]
        often = max(sum(s > 0 for s in row) / max(1, len(row)) for row in (recorded_steps, each))
        return share * self.facts.step, found[0] if found else None, often

    def _read_variables(self) -> None:
        held: Sequence[Mapping[str, Any]] = self._trace.facts.get("held") or []
        if len(held) < 2 or self.facts.steps < 2:
            return
        before, after = held[0], held[-1]
        for name, row in after.items():
            earlier = before.get(name, {})
            if not earlier or earlier.get("id") != row.get("id"):  # The variable may have been assigned a new list.
                continue
            key = "nodes" if "nodes" in row else "count"
            count, added = row[key], row.get("added", 0)
            growth = added or count - earlier.get(key, 0)
            # A leak grows by the same number in every step, unlike a running sum of losses that is reset now and then.
            if added or (growth >= self.facts.steps and growth % self.facts.steps == 0):
                self.facts.grown.append((name, count, growth))
            elif row["bytes"] and row.get("kept", True):
                self.facts.retained.append((name, row["bytes"]))

    def _read_memory(self) -> None:
        """Set the memory growth per step, without the first step, which may allocate memory that later steps reuse."""
        memory, steps = self._trace.memory, self._steps[1:]
        if not memory or not steps:
            return
        growth = [sum(size for at, size, _ in memory if start <= at < end) for start, end in steps]
        if min(growth) > 0:
            self.facts.memory_growth = sum(growth) / len(growth)


def _union(trace: RankTrace, events: Sequence[int]) -> float:
    """Return the microseconds covered by at least one event. The events must be sorted by start."""
    total = until = 0.0
    for event in events:
        total += max(0.0, trace.end(event) - max(trace.start[event], until))
        until = max(until, trace.end(event))
    return total


class _LaunchedKernels:
    """Looks up a trace's kernels by launch thread and launch time."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        rows: dict[int, list[tuple[float, float]]] = {}
        for kernel in range(len(trace)):
            if trace.on_device(kernel) and (launch := trace.launch_of(kernel)) is not None:
                rows.setdefault(trace.thread[launch], []).append((trace.start[launch], trace.duration[kernel]))
        self._starts = {thread: [start for start, _ in sorted(row)] for thread, row in rows.items()}
        self._sums = {thread: [0.0, *accumulate(each for _, each in sorted(row))] for thread, row in rows.items()}

    def duration(self, event: int) -> float:
        """Return the microseconds of the kernels that an operation launched, or its own if it launched none."""
        trace, thread = self._trace, self._trace.thread[event]
        if thread not in self._starts:
            return trace.duration[event]
        starts, sums = self._starts[thread], self._sums[thread]
        first, last = bisect_left(starts, trace.start[event]), bisect_right(starts, trace.end(event))
        return sums[last] - sums[first] if last > first else trace.duration[event]
