"""Read a trace of torch's profiler, in Chrome's trace format, into columns."""

from __future__ import annotations

import base64
import gzip
import io
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from operator import add
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.files import guarded_files
from notebook_accelerate.telemetry.channel import escape_surrogates
from notebook_accelerate.telemetry.debug_protocol import AFTER_STEPS, TRACE_KEY
from notebook_accelerate.telemetry.tracebacks import describe_error, is_user_code

MAX_BYTES = 2 << 30
"""Maximum size of a trace file."""
MAX_RATIO = 64
"""Maximum ratio of a trace's unpacked size to its file size. Real traces have ratios between 10 and 30."""
MIN_UNPACKED_BYTES = 32 << 20
"""The unpacked size that is always allowed, however small the file is."""

CATEGORIES = (
    "op", "python", "collective", "kernel", "memory", "step", "loader", "forward", "backward", "optimizer",
    "runtime", "checkpoint", "logging", "wait",
)  # fmt: skip
"""The categories of events. ``Track.category`` holds indices into this tuple."""
STEP = "ProfilerStep#"
_CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
_PLAIN = {
    "kernel": "kernel", "gpu_memcpy": "memory", "gpu_memset": "memory", "cuda_runtime": "runtime",
    "cuda_driver": "runtime", "python_function": "python",
}  # fmt: skip
_REPEATED = ("Trace", "gpu_user_annotation")
"""Events that repeat the times of others: the whole recording, and a step on a device's stream."""
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")
_CPU = 0
"""The value of c10::DeviceType for CPU memory."""
_NAMED = (
    (STEP, "step"), (AFTER_STEPS, "step"), ("enumerate(DataLoader)", "loader"), ("Optimizer.", "optimizer"),
    ("gloo:", "collective"), ("nccl:", "collective"), ("c10d::", "collective"), ("record_param_comms", "collective"),
    ("ncclDevKernel", "collective"), ("ncclKernel", "collective"), ("autograd::engine", "backward"),
    ("DistributedDataParallel.forward", "forward"),
)  # fmt: skip
_SHAPED = ("mm", "matmul", "conv", "linear", "attention", "gloo:", "nccl", "record_param_comms", "embedding")
"""Parts of event names. If a name contains one of them, the event's shapes are kept."""


@dataclass(frozen=True)
class Thread:
    """A thread of the process, or a stream of a device."""

    process: str
    number: str
    device: bool


@dataclass
class RankTrace:
    """The trace of one rank: events in parallel columns, ordered by start time.

    Attributes:
        rank: The number of the rank.
        start: The start in microseconds, on the trace's own clock.
        duration: The duration in microseconds.
        name: The index of each event's name in ``names``.
        category: The index of each event's category in ``CATEGORIES``.
        thread: The index of each event's thread in ``threads``.
        names: The different names of events.
        threads: The threads of the process, and the streams of its devices.
        arguments: By event, the arguments that torch recorded, for the events whose arguments are used.
        correlation: The ID shared by a kernel and the call that launched it, or 0 for other events.
        memory: Allocations as time, bytes (negative if freed) and address. If there are allocations on accelerators,
            only these.
        base: The trace's time 0, in seconds since the epoch.
        facts: Further data that the rank recorded: see ``worker.step_profiler``.
        groups: The number of process groups, or 0 if it is unknown.
        world: The number of ranks of the training run, or 0 if it is unknown.
        members: The ranks of each process group by its name, if torch recorded them.
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
    correlation: array[int] = field(default_factory=lambda: array("q"))
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    base: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    groups: int = 0
    world: int = 0
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _steps: list[tuple[float, float]] | None = None
    _launches: dict[int, int] | None = None

    def __len__(self) -> int:
        return len(self.start)

    def end(self, event: int) -> float:
        """Return when an event ends."""
        return self.start[event] + self.duration[event]

    def text(self, event: int) -> str:
        """Return the name of an event."""
        return self.names[self.name[event]]

    def on_device(self, event: int) -> bool:
        """Return whether an event ran on a device: a kernel, or a copy."""
        return self.threads[self.thread[event]].device

    def is_collective_kernel(self, event: int) -> bool:
        """Return whether an event is an NCCL kernel, which occupies the device while it waits for other ranks."""
        return self.category[event] == _CATEGORY["collective"] and self.on_device(event)

    def launch_of(self, kernel: int) -> int | None:
        """Return the event that launched a kernel, or None if the trace does not contain it."""
        if self._launches is None:
            found = (event for event in range(len(self)) if self.correlation[event] and not self.on_device(event))
            self._launches = {self.correlation[event]: event for event in found}
        return self._launches.get(self.correlation[kernel]) if self.correlation[kernel] else None

    def main(self) -> int:
        """Return the index of the training thread: the thread with the steps, or else the one with the most events."""
        counts: dict[int, int] = {}
        step = _CATEGORY["step"]
        for event in range(len(self)):
            if self.category[event] == step:
                return self.thread[event]
            if not self.threads[self.thread[event]].device:
                counts[self.thread[event]] = counts.get(self.thread[event], 0) + 1
        return max(counts, key=lambda each: counts[each], default=0)

    def steps(self) -> list[tuple[float, float]]:
        """Return the start and end of each complete step."""
        if self._steps is None:
            step, first = _CATEGORY["step"], int(self.facts.get("skipped", 0))
            events = [event for event in range(len(self)) if self.category[event] == step]
            found = [(self.start[event], self.end(event)) for event in events if self.text(event).startswith(STEP)]
            self._steps = found[first : first + int(self.facts.get("steps", len(found)))]
        return self._steps

    def last_end(self) -> float:
        """Return the time when the last event ends, or 0.0 if there are no events."""
        return max(map(add, self.start, self.duration), default=0.0)

    def sampled_steps(self) -> list[tuple[float, float]]:
        """Return the start and end of each complete step, including later steps that were only sampled."""
        times = [nanoseconds / 1e3 - self.base * 1e6 for nanoseconds in self.facts.get("boundaries", ())]
        return [*self.steps(), *pairwise(times)]


def read_trace(path: str | Path, rank: int | None = None) -> RankTrace:
    """Read a trace file, which may be compressed with gzip.

    Args:
        path: The trace file.
        rank: The rank of the trace. If None, it is read from the file.

    Raises:
        ValueError: The file is not a trace of torch's profiler.
    """
    try:
        data = guarded_files.read_limited(Path(path), MAX_BYTES)
        loaded = _json(data)
        rows = loaded["traceEvents"] if isinstance(loaded, dict) else loaded
        return parse(loaded if isinstance(loaded, dict) else {}, rows, rank)
    except FileNotFoundError:
        raise
    except _MALFORMED as error:
        text = describe_error(error, 300)
        raise ValueError(f"{path} is not a trace of torch's profiler ({text})") from None


_GZIP = b"\x1f\x8b"
_MALFORMED = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError, MemoryError,
    OSError, EOFError, zlib.error,
)  # fmt: skip


def _json(data: bytes) -> Any:
    """Return the value of JSON data, which may be compressed with gzip."""
    data = _unpacked(data) if data[:2] == _GZIP else data
    value = guarded_files.parse_json(data)
    return escape_surrogates(value) if b"\\ud" in data else value


def _unpacked(data: bytes) -> bytes:
    """Return the data after unpacking it with gzip.

    Raises:
        ValueError: The unpacked data is much larger than a trace would be.
    """
    most = max(MIN_UNPACKED_BYTES, MAX_RATIO * len(data))
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        unpacked = file.read(most + 1)
    if len(unpacked) > most:
        raise ValueError(f"{len(data):,} bytes unpack to more than {most:,} bytes")
    return unpacked


def parse(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], rank: int | None = None) -> RankTrace:
    """Return the events of a trace's JSON in columns."""
    world = head.get("distributedInfo") or {}
    facts = _facts(head.get(TRACE_KEY))
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
    if not isfinite(trace.base) or not all(isfinite(row["ts"]) for row in rows if row.get("name") == "[memory]"):
        raise ValueError("a time is not a number")
    allocations = [row for row in rows if row.get("name") == "[memory]" and row.get("args")]
    on_devices = [row for row in allocations if row["args"].get("Device Type", _CPU) != _CPU]
    trace.memory = sorted(
        (float(row["ts"]), int(row["args"].get("Bytes", 0)), int(row["args"].get("Addr", 0)))
        for row in on_devices or allocations
    )
    return trace


_FRAME = (str, int, str, str)
_SAMPLES: dict[str, Any] = {
    "frames": [_FRAME], "stacks": [[int]], "times": [int], "which": [int], "seconds": float, "blocked": float,
    "lock": float, "cpu": float, "error": str,
    "threads": [{"name": str, "cpu": float, "lock": float, "frame": _FRAME}],
}  # fmt: skip
_FACTS: dict[str, Any] = {
    "version": int, "rank": int, "steps": int, "skipped": int, "seconds": float, "clock": float, "samples": dict,
    "boundaries": [int], "collectives": [(str, int, str, int, float)], "asked": dict, "held": [dict], "marks": [dict],
}  # fmt: skip
"""The types of the facts. ``[T]`` means a list of T, and ``(T, U)`` a list of one T and one U."""
_MARK = {"time": float, "delay": float}
_HELD = {"id": int, "nodes": int, "count": int, "added": int, "bytes": int, "kept": bool}


def _facts(value: object) -> Mapping[str, Any]:
    """Return the facts that a rank added to its trace.

    They are JSON, compressed and encoded in base64, because torch writes base64 unchanged.

    Raises:
        ValueError: The facts do not have the types that a rank writes.
    """
    if isinstance(value, str):
        value = _json(base64.b64decode(value))
    if not isinstance(value, dict):
        return {}
    facts = _of_types(value, _FACTS)
    if "held" in facts:
        facts["held"] = [
            {name: {"bytes": 0, **_of_types(row, _HELD)} for name, row in rows.items()} for rows in facts["held"]
        ]
    if "marks" in facts:
        facts["marks"] = [{"time": 0.0, **_of_types(mark, _MARK)} for mark in facts["marks"]]
    if "samples" not in facts:
        return facts
    samples = facts["samples"] = _of_types(facts["samples"], _SAMPLES)
    which, stacks, frames = (samples.get(name, ()) for name in ("which", "stacks", "frames"))
    stack_frames = {index for stack in stacks for index in stack}
    if not all(0 <= index < len(stacks) for index in which) or not all(
        0 <= each < len(frames) for each in stack_frames
    ):
        raise ValueError("the samples refer to a stack or a frame that does not exist")
    if len(which) != len(samples.get("times", ())):
        raise ValueError("the number of samples differs from the number of their times")
    return facts


def _of_types(values: dict[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that are not None, after checking their types.

    Raises:
        ValueError: A fact has the wrong type.
    """
    found = {name: value for name, value in values.items() if value is not None}
    for name in types.keys() & found.keys():
        if not _fits(found[name], types[name]):
            raise ValueError(f"the fact {name!r} has the wrong type")
    return found


def _fits(value: object, shape: Any) -> bool:
    """Return whether a value from JSON has the types that `_FACTS` describes."""
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(_fits, value, shape))
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(name in value and _fits(value[name], shape[name]) for name in shape)
    if shape in (int, float):
        return isinstance(value, (int, float)) and type(value) in (int, shape) and abs(value) < _LARGEST
    return type(value) is shape


_LARGEST = 2**63
"""The maximum absolute value of valid numbers. The comparison also rejects NaN."""


def _add(trace: RankTrace, row: Mapping[str, Any], names: dict[str, int], threads: dict[Thread, int]) -> None:
    name, kind = str(row["name"]), str(row.get("cat", ""))
    arguments = row.get("args") or {}
    place = Thread(str(row.get("pid", "")), str(row.get("tid", "")), kind in _DEVICE)
    event = len(trace.start)
    start, duration = float(row["ts"]), float(row.get("dur", 0.0))
    if not isfinite(start) or not isfinite(duration):
        raise ValueError(f"the event {name[:80]!r} has no time")
    trace.start.append(start)
    trace.duration.append(duration)
    trace.name.append(names.setdefault(name, len(names)))
    trace.category.append(_CATEGORY[category_of(name, kind)])
    trace.thread.append(threads.setdefault(place, len(threads)))
    shared = arguments.get("correlation") if kind in _DEVICE or kind in _LAUNCHING else 0
    trace.correlation.append(shared if isinstance(shared, int) and abs(shared) < 1 << 63 else 0)
    if arguments and any(part in name for part in _SHAPED):
        kept = {key: value for key, value in arguments.items() if key in _KEPT and _fits(value, _KEPT[key])}
        if "Input Dims" in kept:  # If an argument is a list of tensors, its sizes are nested lists.
            kept["Input Dims"] = [each if _fits(each, [int]) else [] for each in kept["Input Dims"]]
        trace.arguments[event] = kept


_KEPT: dict[str, Any] = {
    "Input Dims": [list], "Input type": [str], "Process Group Name": str, "Seq": int, "Collective name": str,
    "dtype": str, "In msg nelems": int, "Out msg nelems": int,
}  # fmt: skip
"""The arguments that findings use, with their types."""


def category_of(name: str, kind: str) -> str:
    """Return the category of an event, given its name and torch's own category."""
    for begin, category in _NAMED:
        if name.startswith(begin):
            return category
    return _PLAIN.get(kind, "op")


# ---- classify sampled stacks of the main thread by their files and functions


def is_logging(frames: list[FrameInfo]) -> bool:
    """Return whether a stack contains printing or logging code."""
    for frame in frames:
        name = frame.filename.replace("\\", "/")
        # Exclude tqdm's __iter__, which also contains the wait for the next batch.
        if name.endswith("/tqdm/std.py") and not frame.function.endswith("__iter__"):
            return True
        if name.endswith(("/logging/__init__.py", "notebook_accelerate/worker/console.py")):
            return True
        if "notebook_accelerate/tracking/" in name:
            return True
    return bool(frames) and frames[-1].source.lstrip().startswith("print(")


def is_waiting_for_batch(frames: list[FrameInfo]) -> bool:
    """Return whether a stack waits for a batch from a DataLoader's worker processes."""
    return any(
        frame.filename.replace("\\", "/").endswith("torch/utils/data/dataloader.py")
        and frame.function.endswith("_get_data")
        for frame in reversed(frames)
    )


def is_saving(frames: list[FrameInfo]) -> bool:
    """Return whether a stack is saving a checkpoint."""
    for frame in frames:
        name = frame.filename.replace("\\", "/")
        if "torch/serialization.py" in name and "save" in frame.function:
            return True
        if "notebook_accelerate/checkpointing/" in name and "load" not in frame.function:
            return True
        if "safetensors" in name and "save" in frame.function:
            return True
    return False


def is_outside_torch(frames: list[FrameInfo]) -> bool:
    """Return whether a stack ends in the user's code, or in a library that is neither torch nor this package.

    Printing, logging and saving do not count, because other rules report them.
    """
    own = next((i for i in range(len(frames) - 1, -1, -1) if is_user_code(frames[i].filename)), None)
    if own is None or is_logging(frames) or is_saving(frames):
        return False
    below = [frame.filename.replace("\\", "/") for frame in frames[own + 1 :]]
    return not any("/torch/" in name or "/notebook_accelerate/" in name for name in below)
