"""The messages between the kernel and a rank, as named dataclasses.

Fields hold JSON values. One field named ``payload`` may hold bytes, which follow the JSON unchanged and are never
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
    """Base of all messages on a channel. Subclasses register themselves by name."""

    registry: ClassVar[dict[str, type[Event]]] = {}
    droppable: ClassVar[bool] = False
    """Whether a full queue may drop the event (and then report the number of dropped events)."""
    boundary: ClassVar[bool] = False
    """Whether the event marks the boundary between two training steps."""
    latest_by: ClassVar[tuple[str, ...] | None] = None
    """The fields that identify events replaced by newer ones in a kept run, or None if every event counts."""
    field_names: ClassVar[tuple[str, ...]] = ()
    """The names of the fields in the JSON, in order."""
    has_payload: ClassVar[bool] = False
    """Whether the event has the field ``payload``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # dataclass(slots=True) creates the class again, and the later class replaces the earlier one in the registry.
        # (Zero-argument super() would use the replaced class.)
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
    """Progress of a loop."""

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
    """A prepared loader starts a pass, which takes ``steps`` optimizer steps. ``epoch`` counts from 0.

    ``steps`` is None for a loader without a length.
    """

    droppable: ClassVar[bool] = True
    latest_by: ClassVar[tuple[str, ...]] = ()

    epoch: int
    steps: int | None = None


@dataclass(slots=True)
class FailureEvent(Event):
    """The function raised an exception. ``chain`` ends with it, and ``payload`` is the pickled exception.

    If the exception cannot be pickled, ``payload`` is empty and ``note`` has the reason.
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
    """A rank changed state: "starting", "running", "succeeded", "failed" or "stopped"."""

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
    """Use of a rank's process: percent of one core, and bytes of memory."""

    droppable: ClassVar[bool] = True
    latest_by: ClassVar[tuple[str, ...]] = ()

    cpu_percent: float
    memory_bytes: int


@dataclass(slots=True)
class DeviceMemoryEvent(Event):
    """Memory that a rank holds on one device, in bytes, as counted by torch in that rank.

    ``device`` is the rank's name for the device ("cuda:0"), ``name`` its model, and ``uuid`` its identity without a
    prefix such as "GPU-". Both are "" if torch does not know them. ``total`` is the device's own size, or 0 if unknown.
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
    """Use of one GPU by all its processes, as the driver measures it. A host sends it under any of its ranks.

    ``percent`` is its utilisation (None if the driver does not report it), and ``used`` and ``total`` are bytes of its
    memory.
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

    ``mark`` is the number of its marks in the rank's standard streams, or 0 without marks. ``clear`` is "now" or "wait"
    for a call of ``clear_output``, which is not a display.
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
    """The user's line, without the line break. None means end of file.

    ``number`` is the prompt's number: two notebooks may show the same prompt, and only the first answer counts.
    """

    text: str | None
    number: int = 0


@dataclass(slots=True)
class AnsweredEvent(Event):
    """A rank no longer waits for the answer to its prompt ``number``."""

    number: int


@dataclass(slots=True)
class AgentFailedEvent(Event):
    """This package's thread in a rank has failed with ``error``, and has either ``ended`` or continues."""

    error: str
    ended: bool


@dataclass(slots=True)
class ExitWaitEvent(Event):
    """A rank's function returned some time ago, but its process is still running. ``text`` gives the reason."""

    text: str


@dataclass(slots=True)
class DroppedEvent(Event):
    """The channel could not keep up, and ``count`` droppable events were lost."""

    latest_by: ClassVar[tuple[str, ...]] = ()

    count: int


@dataclass(slots=True)
class ResultEvent(Event):
    """The function returned. ``payload`` is its pickled value.

    A large value is in two files, whose descriptors are sent with this event: its pickle, and its buffers with their
    ``sizes``. ``error`` is why the value cannot be sent, or "". ``advice`` is what to return instead of a value that
    cannot be read.
    """

    payload: bytes
    sizes: list[int] | None = None
    error: str = ""
    advice: str = ""


@dataclass(slots=True)
class GroupTimeoutEvent(Event):
    """The requested time limit of the default process group's collectives, in seconds.

    The kernel enforces it and stops its clock at a breakpoint, because torch cannot extend the limit of a waiting
    operation.
    """

    seconds: float


@dataclass(slots=True)
class TraceEvent(Event):
    """A rank has written a profiler trace, with its absolute path on the rank's machine and its size in bytes."""

    latest_by: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    size: int


@dataclass(slots=True)
class CheckpointEvent(Event):
    """A checkpoint is complete, at this absolute path or URL.

    ``time`` is when all ranks had reached ``save_state``, in seconds since the epoch. Everything logged before belongs
    to the training that the checkpoint continues.
    """

    latest_by: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    time: float

    def shift(self, seconds: float) -> None:
        self.time += seconds


@dataclass(slots=True)
class ShardingEvent(Event):
    """The shards of a rank, sent when it has been prepared; see `ShardReport`.

    ``axes`` are the sizes of the mesh of ranks, outermost first, and ``place`` is the rank's position on each axis.
    ``stages`` names the axis along which ranks have different layers, or is "". ``held`` maps each kind to its bytes
    ``whole`` and ``here`` (None: unknown), the axes over which it is ``sharded``, where it is stored while
    ``offloaded``, and a ``note``. ``units`` is the number of ``unit``: units of FSDP, layers of a stage.
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
# They indicate where in a stream a rich display belongs, which is sent over the channel. A mark is an operating system
# command of ECMA-48, which a terminal ignores.

BEGIN, END = b"\x1b]notebook_accelerate:", b"\x07"
_MARK = re.compile(re.escape(BEGIN) + rb"(\d{1,15})" + END)
_LONGEST = len(BEGIN) + 15


def display_mark(number: int) -> bytes:
    """Return the mark of a display."""
    return BEGIN + b"%d" % number + END


def split_at_mark(data: bytes, *, complete: bool) -> tuple[bytes, int | None, bytes]:
    """Return the output before the next mark, the mark's number, and the output after it.

    Args:
        data: Output of a rank.
        complete: Whether nothing follows ``data``. Otherwise, a possible start of a mark is left for later.

    Returns:
        The three parts. If there is no mark, the number is None, and the last part is the data left for later.
    """
    if (found := _MARK.search(data)) is not None:
        return data[: found.start()], int(found[1]), data[found.end() :]
    start = -1 if complete else data.rfind(BEGIN[:1], -_LONGEST)
    if start >= 0 and (data[start:].startswith(BEGIN) or BEGIN.startswith(data[start:])):
        return data[:start], None, data[start:]
    return data, None, b""
