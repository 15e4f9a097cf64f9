"""What travels between the kernel and a rank, as named dataclasses.

Fields hold what JSON can say; one field named ``payload`` may hold bytes, which travel behind the JSON untouched and
are never unpickled by the channel. A class becomes part of the protocol by deriving from ``Event``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


@dataclass(slots=True)
class Event:
    """Base of everything that crosses a channel; subclasses register themselves by name."""

    registry: ClassVar[dict[str, type[Event]]] = {}
    droppable: ClassVar[bool] = False
    """Whether a full queue may drop it (and say how many were)."""
    boundary: ClassVar[bool] = False
    """Whether it marks the boundary between two training steps."""
    field_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # dataclass(slots=True) makes the class a second time; the later one replaces the earlier in the table.
        # (Zero-argument super() would look for the class that the decorator replaced.)
        super(Event, cls).__init_subclass__(**kwargs)
        Event.registry[cls.__name__] = cls

    def shift(self, seconds: float) -> None:
        """Add ``seconds`` to the points in time that the event holds: it comes from a machine with another clock."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the field names that travel in the JSON, in order."""
        if not cls.field_names:
            cls.field_names = tuple(f.name for f in fields(cls) if f.name != "payload")
        return cls.field_names


@dataclass(slots=True)
class MetricEvent(Event):
    """Named numbers of one training step."""

    droppable: ClassVar[bool] = True
    boundary: ClassVar[bool] = True
    field_names: ClassVar[tuple[str, ...]] = ()

    values: dict[str, float]
    step: int | None = None


@dataclass(slots=True)
class ProgressEvent(Event):
    """How far a loop has come."""

    droppable: ClassVar[bool] = True
    boundary: ClassVar[bool] = True
    field_names: ClassVar[tuple[str, ...]] = ()

    step: int
    total: int | None = None
    label: str = ""


@dataclass(slots=True)
class StatusEvent(Event):
    """A rank changed state: "starting", "running", "succeeded", "failed" or "stopped"."""

    field_names: ClassVar[tuple[str, ...]] = ()

    state: str
    detail: str = ""


@dataclass(slots=True)
class LogEvent(Event):
    """Whole lines of text a rank wrote to ``stream`` ("stdout" or "stderr"), without the last line break."""

    droppable: ClassVar[bool] = True
    field_names: ClassVar[tuple[str, ...]] = ()

    stream: str
    text: str


@dataclass(slots=True)
class ResourceEvent(Event):
    """What a rank's process uses: percent of one core, bytes of memory, and of its accelerator where there is one."""

    droppable: ClassVar[bool] = True
    field_names: ClassVar[tuple[str, ...]] = ()

    cpu_percent: float
    memory_bytes: int
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None


@dataclass(slots=True)
class DisplayEvent(Event):
    """A rich output made by ``display()`` in a rank: a MIME bundle for the kernel to publish."""

    field_names: ClassVar[tuple[str, ...]] = ()

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str | None = None
    update: bool = False


@dataclass(slots=True)
class InputRequest(Event):
    """A rank waits for a line of text from the user.

    ``shown`` are lines that belong before the prompt; ``kind`` is "input" or "debugger"; ``number`` counts the rank's
    questions, from 1.
    """

    field_names: ClassVar[tuple[str, ...]] = ()

    prompt: str
    password: bool = False
    shown: str = ""
    kind: str = "input"
    number: int = 0


@dataclass(slots=True)
class InputReply(Event):
    """The user's line, without the line break; None means end of file.

    ``number`` is the question's: two notebooks may show one question, and only the first answer counts.
    """

    field_names: ClassVar[tuple[str, ...]] = ()

    text: str | None
    number: int = 0


@dataclass(slots=True)
class AnsweredEvent(Event):
    """A rank waits no longer for the answer to its question ``number``: nobody else need give one."""

    field_names: ClassVar[tuple[str, ...]] = ()

    number: int


@dataclass(slots=True)
class DroppedEvent(Event):
    """So many droppable events were lost because the channel could not keep up."""

    field_names: ClassVar[tuple[str, ...]] = ()

    count: int


@dataclass(slots=True)
class ResultEvent(Event):
    """The function returned; ``payload`` is its pickled value."""

    field_names: ClassVar[tuple[str, ...]] = ()

    payload: bytes


@dataclass(slots=True)
class GroupTimeoutEvent(Event):
    """The time limit that was asked for of the default process group's collectives, in seconds.

    The kernel enforces it, so that it can stand still at a breakpoint: torch cannot extend a waiting operation.
    """

    field_names: ClassVar[tuple[str, ...]] = ()

    seconds: float


@dataclass(slots=True)
class TraceEvent(Event):
    """A rank has written a profiler's trace: an absolute path on its machine, and the file's size in bytes."""

    field_names: ClassVar[tuple[str, ...]] = ()

    path: str
    size: int


@dataclass(slots=True)
class ShardingEvent(Event):
    """What a rank holds of what it trains, told when it has been prepared; ``telemetry.sharding`` says what is in it.

    ``axes`` are the sizes of the mesh of ranks, the outermost first, and ``place`` is where the rank stands in it;
    ``stages`` names the axis along which ranks have layers of their own, "" where none has. ``held`` is, by kind, a
    table of: bytes ``whole`` and ``here`` (None: not known), the axes over which it is ``sharded``, where it rests when
    it is ``offloaded``, and a ``note``. ``units`` counts what ``unit`` says: units of FSDP, layers of a stage.
    """

    field_names: ClassVar[tuple[str, ...]] = ()

    strategy: str
    variant: str
    axes: dict[str, int]
    place: dict[str, int]
    held: dict[str, dict[str, Any]]
    stages: str = ""
    units: int = 0
    unit: str = "units"
