"""Requests of the kernel to a rank's agent, and the replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from notebook_accelerate.errors import ExceptionInfo, FrameInfo
from notebook_accelerate.telemetry.events import Event, to_chain

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a rank."""


class Collective(NamedTuple):
    """A collective operation, as torch's flight recorder records it.

    Attributes:
        group: Name of the process group.
        number: Sequence number in that group, from 1.
        operation: "all_reduce", "broadcast", ...
        shapes: Shapes of the inputs.
        dtypes: Element types of the inputs, such as "f32".
        since: When this rank entered it, in seconds since the epoch.
    """

    group: str
    number: int
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    since: float

    def text(self) -> str:
        """Return a description, such as "all_reduce #4 (f32 [128])"."""
        inputs = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in zip(self.dtypes, self.shapes, strict=False))
        name = f"{self.operation} #{self.number}"
        return f"{name} ({inputs})" if inputs else name

    def call(self) -> tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """Return the values that must be equal on all ranks."""
        return self.operation, self.shapes, self.dtypes


@dataclass(slots=True)
class Request(Event):
    """Base of the kernel's requests. The reply has the same number."""

    number: int


@dataclass(slots=True)
class Reply(Event):
    """Base of a rank's replies. Each answers the request with the same number."""

    number: int


@dataclass(slots=True)
class StacksRequest(Request):
    """Return the stacks of all threads."""


@dataclass(slots=True)
class StacksReply(Reply):
    """The stacks and collectives of a rank.

    Attributes:
        threads: Frames by thread name, outermost first. The main thread comes first.
        moved: Time of the main thread's last movement, in seconds since the epoch.
        waiting: The collectives that this rank has entered but not left.
        last: The number of the last collective entered, by process group.
        paused: Where the rank waits for ``run.unpause()`` or at a breakpoint, or "".
        by_user: Whether it waits for ``run.unpause()``.
    """

    threads: dict[str, tuple[FrameInfo, ...]]
    moved: float
    waiting: tuple[Collective, ...] = ()
    last: dict[str, int] = field(default_factory=dict)
    paused: str = ""
    by_user: bool = False

    def __post_init__(self) -> None:
        # JSON turns the tuples into lists.
        self.threads = {name: tuple(FrameInfo(*frame) for frame in frames) for name, frames in self.threads.items()}
        self.waiting = tuple(to_collective(row) for row in self.waiting)

    def shift(self, seconds: float) -> None:
        self.moved += seconds
        self.waiting = tuple(each._replace(since=each.since + seconds) for each in self.waiting)


def to_collective(row: Any) -> Collective:
    """Restore a ``Collective`` from its JSON form."""
    group, number, operation, shapes, dtypes, since = row
    return Collective(group, number, operation, tuple(tuple(shape) for shape in shapes), tuple(dtypes), since)


@dataclass(slots=True)
class SampleRequest(Request):
    """Sample the main thread's stack for ``seconds``, ``rate`` times a second."""

    seconds: float
    rate: float


@dataclass(slots=True)
class SampleReply(Reply):
    """The main thread's activity while it was sampled.

    Attributes:
        frames: The file name, line and function of each frame that occurred.
        stacks: The seconds, samples, and frames (as indices, outermost first) of each stack that occurred.
        seconds: How long it was sampled.
    """

    frames: list[tuple[str, int, str]]
    stacks: list[tuple[float, int, list[int]]]
    seconds: float


@dataclass(slots=True)
class ProfileRequest(Request):
    """Record ``steps`` steps with torch's profiler, from the next step boundary on.

    Attributes:
        steps: The number of steps.
        seconds: Start even without a step boundary, and end after this many seconds. 0.0 means to wait for the steps.
        memory: Whether to record allocations.
        folder: A folder of the kernel for the trace. If the rank cannot access it, the reply contains the trace.
        token: The name of a file in that folder, which lets the rank recognise the folder.
        samples: Sample the stacks for at least this many seconds, continuing after the last recorded step if necessary.
    """

    steps: int
    seconds: float
    memory: bool
    folder: str
    token: str
    samples: float = 0.0


@dataclass(slots=True)
class ProfileReply(Reply):
    """A rank's trace, or the reason why it is missing.

    Attributes:
        path: The trace in the kernel's folder, or "" if ``payload`` contains it, compressed with gzip.
        error: Why there is no trace.
        steps: How many steps were recorded.
        seconds: How long the recording took.
        clock: Seconds to add to the trace's times, which are the rank's system time, to get the run's clock.
    """

    path: str = ""
    error: str = ""
    steps: int = 0
    seconds: float = 0.0
    clock: float = 0.0
    payload: bytes = b""

    def shift(self, seconds: float) -> None:
        self.clock += seconds


@dataclass(slots=True)
class MemoryRequest(Request):
    """Request a report of the rank's memory."""


@dataclass(slots=True)
class MemoryReply(Reply):
    """The report of the rank's memory; see ``worker.memory_report`` for the fields of ``report``."""

    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(slots=True)
class AskRequest(Request):
    """Evaluate an expression in a frame of the main thread, at the next step boundary."""

    expression: str
    frame: str = ""


@dataclass(slots=True)
class AskReply(Reply):
    """The pickled value, or an error's text."""

    error: str = ""
    shown: str = ""
    payload: bytes = b""


@dataclass(slots=True)
class CompleteRequest(Request):
    """Complete a text with the names in a frame of the main thread."""

    text: str
    frame: str = ""


@dataclass(slots=True)
class CompleteReply(Reply):
    """The text, completed by each matching name."""

    matches: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PauseRequest(Request):
    """Pause at the next step boundary."""


@dataclass(slots=True)
class UnpauseRequest(Request):
    """Unpause."""


@dataclass(slots=True)
class BreakRequest(Request):
    """Open the debugger at the main thread's next bytecode."""


@dataclass(slots=True)
class DebugpyRequest(Request):
    """Start debugpy."""


@dataclass(slots=True)
class DoneReply(Reply):
    """The request was carried out, with ``text`` as its result, or it failed with ``error``."""

    text: str = ""
    error: str = ""


@dataclass(slots=True)
class HeartbeatEvent(Event):
    """Sent by a rank's agent every second: when its main thread last moved, and the collective it waits in."""

    droppable: ClassVar[bool] = True

    moved: float
    waiting: Collective | None = None

    def __post_init__(self) -> None:
        if self.waiting is not None:
            self.waiting = to_collective(self.waiting)

    def shift(self, seconds: float) -> None:
        self.moved += seconds
        if self.waiting is not None:
            self.waiting = self.waiting._replace(since=self.waiting.since + seconds)


@dataclass(slots=True)
class CheckEvent(Event):
    """A small fact that the kernel compares between ranks, to find common mistakes.

    Attributes:
        check: "parameters", "batch", "loss", "gradients" or "mistake".
        key: The step or batch, from 1.
        values: The values to compare.
        text: The warning, if one rank is enough to find the mistake.
    """

    check: str
    key: int
    values: list[float] = field(default_factory=list)
    text: str = ""


@dataclass(slots=True)
class DumpReadyEvent(Event):
    """The file to which a rank writes its stacks on SIGUSR1, readable on the same machine."""

    path: str


@dataclass(slots=True)
class PausedEvent(Event):
    """The rank waits for ``run.unpause()``, or no longer waits."""

    paused: bool


@dataclass(slots=True)
class DebuggerLeftEvent(Event):
    """The debugger has released the rank."""


@dataclass(slots=True)
class CellRequest(Request):
    """Run a cell in a warm rank.

    ``payload`` contains variables to set first, and ``fetch`` names those to send back.
    """

    source: str
    filename: str
    fetch: list[str] = field(default_factory=list)
    payload: bytes = b""


@dataclass(slots=True)
class CellReply(Reply):
    """A cell has finished, with the ``repr`` of its value or exceptions. ``payload`` contains the fetched variables."""

    shown: str = ""
    chain: tuple[ExceptionInfo, ...] = ()
    time: float = 0.0
    payload: bytes = b""

    def shift(self, seconds: float) -> None:
        self.time += seconds

    def __post_init__(self) -> None:
        self.chain = to_chain(self.chain)


# ---- names that a rank writes into the trace of a profile, and that its readers search for

TRACE_KEY = "notebook_accelerate"
"""The key in the trace file for data that torch's profiler does not record: samples and other facts of the rank."""
AFTER_STEPS = "after the last ProfilerStep"
"""The operations after the last step of a trace. HTA omits the last event with such a name and all later events."""


# ---- the memory of a rank as text, for the notebook and for the note of an out-of-memory error in the rank itself


def size_cell(nbytes: float) -> str:
    """Return a number of bytes as text, such as "64.0 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def memory_rows(report: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the contents of a rank's memory as names and bytes, without empty ones."""
    rows = [(str(name), int(nbytes)) for name, nbytes in report["parts"].items()]
    if peak := report.get("activations at the peak"):
        rows.append(("activations at the peak", int(peak)))
    for device, counters in report["devices"].items():
        names = {"peak": "peak", "cache": "cache", "fragmented": "fragmented cache"}
        rows += [(f"{device} {text}", int(counters[name])) for name, text in names.items()]
    names = {"resident": "process, resident", "peak": "process, peak", "python": "Python's own objects"}
    rows += [(names[name], int(nbytes)) for name, nbytes in report["process"].items()]
    return [(name, nbytes) for name, nbytes in rows if nbytes]


def memory_table(report: Mapping[str, Any]) -> str:
    """Return the report as aligned lines."""
    lines = ["memory of this rank when it failed:"]
    lines += _aligned(memory_rows(report))
    if report["modules"]:
        lines += ["by module:", *_aligned([(row[0], sum(row[1:])) for row in report["modules"][:8]])]
    if report["variables"]:
        rows = [(f"{name} in {function}", nbytes) for name, function, nbytes in report["variables"][:8]]
        lines += ["by variable:", *_aligned(rows)]
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, int]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {size_cell(nbytes):>10}" for name, nbytes in rows]
