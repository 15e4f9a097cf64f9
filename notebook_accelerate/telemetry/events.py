"""The messages between the kernel and a rank, as named dataclasses.

Fields hold JSON values. Only a field named ``payload`` may hold bytes, which follow the JSON unchanged and are never
unpickled by the channel. Every subclass of ``Event`` is part of the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from notebook_accelerate.errors import ExceptionInfo, FrameInfo


@dataclass(slots=True)
class Event:
    """Base class of all messages on a channel. Subclasses are registered by name."""

    registry: ClassVar[dict[str, type[Event]]] = {}
    droppable: ClassVar[bool] = False
    """Whether a full queue may drop the event. The number of dropped events is reported."""
    boundary: ClassVar[bool] = False
    """Whether the event marks the boundary between two training steps."""
    latest_by: ClassVar[tuple[str, ...] | None] = None
    """Fields by which a kept run recognises events that a newer one replaces, or None if it keeps every event."""
    field_names: ClassVar[tuple[str, ...]] = ()
    """The names of the fields in the JSON, in order."""
    has_payload: ClassVar[bool] = False
    """Whether the event has the field ``payload``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # dataclass(slots=True) creates the class a second time, and the second class replaces the first one in the
        # registry. (Zero-argument super() would use the first class.)
        super(Event, cls).__init_subclass__(**kwargs)
        Event.registry[cls.__name__] = cls
        if "__dataclass_fields__" in cls.__dict__:
            names = tuple(each.name for each in fields(cls))
            cls.field_names = tuple(name for name in names if name != "payload")
            cls.has_payload = "payload" in names

    def shift(self, seconds: float) -> None:
        """Add ``seconds`` to the times in the event, to convert them from another machine's clock."""


@dataclass(slots=True)
class MetricEvent(Event):
    """Named numbers of one training step."""

    droppable: ClassVar[bool] = True
    boundary: ClassVar[bool] = True

    values: dict[str, float]
    step: int | None = None


@dataclass(slots=True)
class ProgressEvent(Event):
    """The progress of a loop, as shown by a progress bar."""

    droppable: ClassVar[bool] = True
    boundary: ClassVar[bool] = True
    latest_by: ClassVar[tuple[str, ...]] = ("endless",)

    step: int
    total: int | None = None
    label: str = ""

    @property
    def endless(self) -> bool:
        """Whether the loop has an unknown length."""
        return self.total is None


@dataclass(slots=True)
class EpochEvent(Event):
    """A prepared loader starts pass number ``epoch``, counted from 0.

    The pass takes ``steps`` optimizer steps. If the loader has no length, ``steps`` is None.
    """

    droppable: ClassVar[bool] = True
    latest_by: ClassVar[tuple[str, ...]] = ()

    epoch: int
    steps: int | None = None


@dataclass(slots=True)
class FailureEvent(Event):
    """The function raised an exception, the last one in ``chain``. ``payload`` is the pickled exception.

    If the exception cannot be pickled, ``payload`` is empty and ``note`` gives the reason.
    """

    chain: tuple[ExceptionInfo, ...]
    time: float
    kind: str = "exception"
    note: str = ""
    payload: bytes = b""

    def __post_init__(self) -> None:
        self.chain = to_chain(self.chain)

    def shift(self, seconds: float) -> None:
        self.time += seconds


def to_chain(rows: Iterable[Any]) -> tuple[ExceptionInfo, ...]:
    """Restore exceptions from their JSON form."""
    return tuple(
        ExceptionInfo(type_, message, tuple(FrameInfo(*frame) for frame in frames), link)
        for type_, message, frames, link in rows
    )


@dataclass(slots=True)
class StatusEvent(Event):
    """A rank's new state: "starting", "running", "succeeded", "failed" or "stopped"."""

    state: str
    detail: str = ""


@dataclass(slots=True)
class LogEvent(Event):
    """Complete lines that a rank wrote to ``stream`` ("stdout" or "stderr"), without the last line break."""

    droppable: ClassVar[bool] = True

    stream: str
    text: str


@dataclass(slots=True)
class ResourceEvent(Event):
    """The resources that a rank's process uses: a percentage of one core, and bytes of memory."""

    droppable: ClassVar[bool] = True
    latest_by: ClassVar[tuple[str, ...]] = ()

    cpu_percent: float
    memory_bytes: int


@dataclass(slots=True)
class DeviceMemoryEvent(Event):
    """Memory that a rank holds on one device, in bytes, as counted by torch in that rank.

    ``device`` is the rank's name for the device ("cuda:0"), ``name`` its model, and ``uuid`` its identity without a
    prefix such as "GPU-". ``name`` and ``uuid`` are "" if torch does not know them. ``total`` is the size of the
    device's own memory, or 0 if unknown.
    """

    droppable: ClassVar[bool] = True
    latest_by: ClassVar[tuple[str, ...]] = ("device", "uuid")

    device: str
    allocated: int
    reserved: int
    peak: int
    total: int = 0
    name: str = ""
    uuid: str = ""


@dataclass(slots=True)
class DeviceUseEvent(Event):
    """One GPU's use by all processes, as measured by the driver. A host sends this on behalf of one of its ranks.

    ``percent`` is the GPU's utilisation, or None if the driver does not report it. ``used`` and ``total`` are bytes of
    its memory.
    """

    droppable: ClassVar[bool] = True
    latest_by: ClassVar[tuple[str, ...]] = ("uuid",)

    uuid: str
    percent: float | None
    used: int
    total: int


@dataclass(slots=True)
class DisplayEvent(Event):
    """Rich output of ``display()`` in a rank: a MIME bundle for the kernel to publish.

    ``mark`` is the number in the display's marks in the rank's standard streams, or 0 if it has no marks. For a call to
    ``clear_output``, which displays nothing, ``clear`` is "now" or "wait".
    """

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str | None = None
    update: bool = False
    mark: int = 0
    clear: str = ""


@dataclass(slots=True)
class InputRequest(Event):
    """A rank waits for a line of text from the user.

    ``shown`` contains the lines to show before the prompt, ``kind`` is "input" or "debugger", and ``number`` counts the
    rank's prompts, from 1.
    """

    prompt: str
    password: bool = False
    shown: str = ""
    kind: str = "input"
    number: int = 0


@dataclass(slots=True)
class InputReply(Event):
    """The user's line without the line break, or None for the end of the file.

    ``number`` is the prompt's number, because two notebooks may show the same prompt, and only the first answer counts.
    """

    text: str | None
    number: int = 0


@dataclass(slots=True)
class AnsweredEvent(Event):
    """A rank no longer waits for the answer to its prompt ``number``."""

    number: int


@dataclass(slots=True)
class AgentFailedEvent(Event):
    """This package's thread in a rank has failed with ``error``. If ``ended`` is False, the thread continues."""

    error: str
    ended: bool


@dataclass(slots=True)
class ExitWaitEvent(Event):
    """A rank's function returned some time ago, but its process is still running, for the reason in ``text``."""

    text: str


@dataclass(slots=True)
class DroppedEvent(Event):
    """The channel could not keep up, and ``count`` droppable events were lost."""

    latest_by: ClassVar[tuple[str, ...]] = ()

    count: int


@dataclass(slots=True)
class ResultEvent(Event):
    """The function returned. ``payload`` is its pickled value.

    A large value is in two files, one with its pickle and one with its buffers, whose sizes are ``sizes``. Their
    descriptors are sent with this event. ``error`` tells why the value cannot be sent, or is "". ``advice`` tells what
    to return instead of a value that the kernel cannot read.
    """

    payload: bytes
    sizes: list[int] | None = None
    error: str = ""
    advice: str = ""


@dataclass(slots=True)
class ImportedEvent(Event):
    """The rank has imported ``module``, which the kernel imports for later ranks of the same function."""

    latest_by: ClassVar[tuple[str, ...]] = ("module",)

    module: str


@dataclass(slots=True)
class GroupTimeoutEvent(Event):
    """The requested time limit of the default process group's collectives, in seconds.

    The kernel enforces the limit, and stops its clock at a breakpoint, because torch cannot extend the limit of an
    operation that is already waiting.
    """

    seconds: float


@dataclass(slots=True)
class TraceEvent(Event):
    """The absolute path of a profiler trace that a rank has written on its machine, and the trace's size in bytes."""

    latest_by: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    size: int


@dataclass(slots=True)
class CheckpointEvent(Event):
    """A checkpoint is complete, at this absolute path or URL.

    ``time`` is when all ranks had reached ``save_state``, in seconds since the epoch. Everything logged before that
    belongs to the training that is saved in the checkpoint.
    """

    latest_by: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    time: float

    def shift(self, seconds: float) -> None:
        self.time += seconds


@dataclass(slots=True)
class ShardingEvent(Event):
    """The shards of a rank, sent when its model has been prepared; see `ShardReport`.

    ``axes`` are the sizes of the mesh of ranks, outermost first, and ``place`` is the rank's position on each axis.
    ``stages`` names the axis along which ranks have different layers, or is "". ``held`` maps each kind of tensors to
    its bytes ``whole`` and ``here`` (None if unknown), the axes along which it is ``sharded``, where it is stored while
    ``offloaded``, and a ``note``. ``units`` counts what ``unit`` names: units of FSDP, or layers of a stage.
    """

    latest_by: ClassVar[tuple[str, ...]] = ()

    strategy: str
    variant: str
    axes: dict[str, int]
    place: dict[str, int]
    held: dict[str, dict[str, Any]]
    stages: str = ""
    units: int = 0
    unit: str = "units"


# ---- marks in a rank's standard streams
#
# A mark indicates where in a stream a rich display belongs, because displays are sent over the channel. It is an
# "operating system command" of ECMA-48, which terminals ignore.

BEGIN, END = b"\x1b]notebook_accelerate:", b"\x07"
_MARK = re.compile(re.escape(BEGIN) + rb"(\d{1,15})" + END)
_LONGEST = len(BEGIN) + 15


def display_mark(number: int) -> bytes:
    """Return the mark of a display."""
    return BEGIN + b"%d" % number + END


def split_at_mark(data: bytes, *, complete: bool) -> tuple[bytes, int | None, bytes]:
    """Split output at the next mark, into the output before it, the mark's number, and the output after it.

    Args:
        data: The output of a rank.
        complete: Whether no more output follows ``data``. Otherwise, what may be the start of a mark is left for later.

    Returns:
        The three parts. If there is no mark, the number is None, and the last part is the data left for later.
    """
    if (found := _MARK.search(data)) is not None:
        return data[: found.start()], int(found[1]), data[found.end() :]
    start = -1 if complete else data.rfind(BEGIN[:1], -_LONGEST)
    if start >= 0 and (data[start:].startswith(BEGIN) or BEGIN.startswith(data[start:])):
        return data[:start], None, data[start:]
    return data, None, b""
