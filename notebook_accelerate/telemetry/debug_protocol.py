"""The kernel's requests to a rank's agent, and the replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, NamedTuple

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import ExceptionInfo, FrameInfo
from notebook_accelerate.telemetry.events import Event, to_chain

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a rank."""


class Collective(NamedTuple):
    """A collective operation, as torch's flight recorder records it.

    Attributes:
        group: The name of the process group.
        number: The sequence number in that group, from 1.
        operation: "all_reduce", "broadcast", ...
        shapes: The shapes of the inputs.
        dtypes: The element types of the inputs, such as "f32".
        since: When this rank entered the collective, in seconds since the epoch.
    """

    group: str
    number: int
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    since: float

    @property
    def place(self) -> str:
        """The place among the collectives of the group, such as "the 4th collective"."""
        last, teens = self.number % 10, self.number // 10 % 10 == 1
        return f"the {self.number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th')} collective"

    def inputs(self) -> str:
        """Return the inputs in parentheses, such as " (float32 [128])", or "" if they are unknown.

        Pickled objects are sent as tensors of bytes, so only their total size is shown.
        """
        pairs = list(zip(self.dtypes, self.shapes, strict=False))
        if pairs and all(dtype == "u8" for dtype, _ in pairs):
            return f" ({sum(prod(shape) for _, shape in pairs):,} bytes)"
        named = ", ".join(f"{_dtype_name(dtype)} {list(shape)}" for dtype, shape in pairs)
        return f" ({named})" if named else ""

    def text(self) -> str:
        """Return a description, such as "all_reduce, the 4th collective (float32 [128])"."""
        return f"{self.operation}, {self.place}{self.inputs()}"

    def call(self) -> tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """Return the values that must be equal on all ranks."""
        return self.operation, self.shapes, self.dtypes


def _dtype_name(short: str) -> str:
    """Return torch's name of an element type, such as "float32" for "f32"."""
    kind = short.rstrip("0123456789")
    names = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
    return names.get(kind, kind) + short[len(kind) :]


@dataclass(slots=True)
class Request(Event):
    """Base class of the kernel's requests. The reply to a request has the same number."""

    number: int


@dataclass(slots=True)
class Reply(Event):
    """Base class of a rank's replies. Each answers the request with the same number."""

    number: int


@dataclass(slots=True)
class StacksRequest(Request):
    """Asks for the stacks of all threads."""


@dataclass(slots=True)
class StacksReply(Reply):
    """The stacks of a rank, and the collectives that it has entered.

    Attributes:
        threads: The frames of each thread, outermost first, by thread name. The main thread comes first.
        moved: When the main thread last moved, in seconds since the epoch.
        waiting: The collectives that this rank has entered but not left.
        last: The number of the last collective entered, by process group.
        paused: Where the rank is waiting for ``run.unpause()`` or at a breakpoint, or "" if it is not paused.
        by_user: Whether the rank is waiting for ``run.unpause()``.
    """

    threads: dict[str, tuple[FrameInfo, ...]]
    moved: float
    waiting: tuple[Collective, ...] = ()
    last: dict[str, int] = field(default_factory=dict)
    paused: str = ""
    by_user: bool = False

    def __post_init__(self) -> None:
        # Restore the tuples, which JSON has turned into lists.
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
    """Asks to sample the main thread's stack for ``seconds``, ``rate`` times a second."""

    seconds: float
    rate: float


@dataclass(slots=True)
class SampleReply(Reply):
    """The stacks of the main thread while it was sampled.

    Attributes:
        frames: The file name, line and function of each frame that occurred.
        stacks: The seconds, the number of samples, and the frames (as indices, outermost first) of each stack that
            occurred.
        seconds: How long the main thread was sampled.
    """

    frames: list[tuple[str, int, str]]
    stacks: list[tuple[float, int, list[int]]]
    seconds: float


@dataclass(slots=True)
class ProfileRequest(Request):
    """Asks to record ``steps`` steps with torch's profiler, from the next step boundary on.

    Attributes:
        steps: The number of steps to record.
        seconds: If positive, recording starts even without a step boundary, and ends after this many seconds. If 0.0,
            it waits for the steps.
        memory: Whether to record allocations.
        folder: The kernel's folder for the trace. If the rank cannot access it, the reply contains the trace.
        token: The name of a file in that folder, by which the rank recognises the folder.
        samples: The minimum number of seconds for which stacks are sampled, after the last recorded step if necessary.
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
        path: The trace's file in the kernel's folder, or "" if ``payload`` contains the trace, compressed with gzip.
        error: The reason why there is no trace, or "" if there is one.
        steps: The number of steps that were recorded.
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
    """Asks for a report of the rank's memory."""


@dataclass(slots=True)
class MemoryReply(Reply):
    """The report of the rank's memory. See ``worker.memory_report`` for the keys of ``report``."""

    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(slots=True)
class AskRequest(Request):
    """Asks to evaluate an expression in a frame of the main thread, at the next step boundary."""

    expression: str
    frame: str = ""


@dataclass(slots=True)
class AskReply(Reply):
    """The pickled value of an expression, or the text of an error."""

    error: str = ""
    shown: str = ""
    payload: bytes = b""


@dataclass(slots=True)
class CompleteRequest(Request):
    """Asks to complete ``text`` with the names in a frame of the main thread."""

    text: str
    frame: str = ""


@dataclass(slots=True)
class CompleteReply(Reply):
    """The text of a `CompleteRequest`, completed by each matching name."""

    matches: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PauseRequest(Request):
    """Asks a rank to pause at the next step boundary."""


@dataclass(slots=True)
class UnpauseRequest(Request):
    """Asks a paused rank to continue."""


@dataclass(slots=True)
class BreakRequest(Request):
    """Asks to open the debugger at the main thread's next bytecode."""


@dataclass(slots=True)
class DebugpyRequest(Request):
    """Asks a rank to start debugpy."""


@dataclass(slots=True)
class DoneReply(Reply):
    """The request was carried out, with ``text`` as its result, or it failed with ``error``."""

    text: str = ""
    error: str = ""


@dataclass(slots=True)
class HeartbeatEvent(Event):
    """A rank's report, once a second, of when its main thread last moved, and of the collective it is waiting in."""

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
        values: The values to compare between ranks.
        text: The warning, if a single rank can detect the mistake.
    """

    check: str
    key: int
    values: list[float] = field(default_factory=list)
    text: str = ""


@dataclass(slots=True)
class DumpReadyEvent(Event):
    """The name of a file that a rank writes its stacks to on SIGUSR1, for other processes on the same machine."""

    path: str


@dataclass(slots=True)
class PausedEvent(Event):
    """The rank has started or stopped waiting for ``run.unpause()``."""

    paused: bool


@dataclass(slots=True)
class DebuggerLeftEvent(Event):
    """The debugger has released the rank."""


@dataclass(slots=True)
class CellRequest(Request):
    """Asks a warm rank to run a cell.

    ``payload`` contains the variables to set first, and ``fetch`` names the variables to send back.
    """

    source: str
    filename: str
    fetch: list[str] = field(default_factory=list)
    payload: bytes = b""


@dataclass(slots=True)
class CellReply(Reply):
    """The ``repr`` of a finished cell's value, or its exceptions. ``payload`` contains the fetched variables."""

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
"""The key in the trace file for data that torch's profiler does not record: samples and other facts about the rank."""
AFTER_STEPS = "after the last ProfilerStep"
"""The name for the operations after a trace's last step. HTA omits the last "ProfilerStep" and all later events."""


# ---- a rank's memory as text, for the notebook and for the note that the rank adds to an out-of-memory error


def memory_rows(report: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the names of the parts of a rank's memory and their sizes in bytes, without empty parts."""
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
    return [f"  {name:<{width}}  {size_text(nbytes):>10}" for name, nbytes in rows]
