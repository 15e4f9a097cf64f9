"""The file format of a kept run's journal, which `docs/run_format.md` documents.

The file is a sequence of frames. Each has a checksum and holds JSON, and columns of numbers for thinned curves. Reading
a journal does not run any code of its writer: every value is checked against the type of its field.
"""

from __future__ import annotations

import collections.abc
import json
import struct
import types
import typing
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, cast

from notebook_accelerate.debugging.diagnosis import Diagnosis, RankPosition
from notebook_accelerate.errors import ExceptionInfo, FrameInfo
from notebook_accelerate.files import guarded_files
from notebook_accelerate.launch.plan.planner import LaunchPlan
from notebook_accelerate.launch.state import run_events
from notebook_accelerate.launch.state.call_arguments import Plain
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.launch.state.run_events import RUN, RunEvent
from notebook_accelerate.telemetry import (
    CheckpointEvent,
    DeviceMemoryEvent,
    DeviceUseEvent,
    DroppedEvent,
    EpochEvent,
    Event,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    RankFailure,
    ResourceEvent,
    ShardingEvent,
    StepTimeEvent,
    TraceEvent,
)
from notebook_accelerate.telemetry.automatic_metrics import AutomaticMetricEvent
from notebook_accelerate.telemetry.channel import escape_surrogates, to_json_scalar
from notebook_accelerate.telemetry.debug_protocol import Collective
from notebook_accelerate.telemetry.store import Record, to_float, to_int64

FORMAT = 1
"""Version of the format. Files of a newer version are refused."""
JOURNAL_NAME = "journal.nbac"
"""The name of the file in the folder of a run."""
MAGIC = b"NBAC-RUN"
"""The first bytes of every journal."""
FRAME = struct.Struct("<III")
"""The head of a frame: the sizes of its JSON and its payload, and the CRC-32 of the sizes and both parts."""
_LENGTHS = struct.Struct("<II")
MAX_JSON_BYTES = 48 << 20
"""Maximum size of a frame's JSON. A single event of a rank has at most 32 Mi characters."""
MAX_PAYLOAD_BYTES = 16 << 20
"""Maximum size of a frame's payload."""
MAX_ROWS = 500
"""Maximum number of events in a frame."""
MAX_RANKS = 1 << 14
"""Maximum number of ranks in a run. The highest rank that a journal may name is one less."""
MAX_CONTAINERS = 1 << 20
"""Maximum number of lists and objects in a frame's JSON. Each takes 64 bytes of memory or more."""
LATEST_TIME = 253_000_000_000.0
"""The latest time accepted, in seconds since the epoch (in the year 9987), because datetime ends with the year 9999."""
_TIMES = frozenset({"time", "since", "until"})
"""Names of fields that hold such times."""

RANK_EVENTS: tuple[type[Event], ...] = (
    MetricEvent, AutomaticMetricEvent, LogEvent, ProgressEvent, StepTimeEvent, ResourceEvent, DeviceMemoryEvent,
    DeviceUseEvent, DroppedEvent, TraceEvent, ShardingEvent, CheckpointEvent, EpochEvent,
)  # fmt: skip
"""The events of ranks that a journal contains, which are those that the store keeps."""
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        *RANK_EVENTS,
        *(each for each in vars(run_events).values() if isinstance(each, type) and issubclass(each, RunEvent)),
    )
}
_OBJECTS = frozenset({"RunEnded.cause", "RankFailure.exception", "Diagnosis.name_place", "RankReturned.result"})
"""Fields whose values are objects of the writer's process. They are not stored."""
_NAMES = {
    "Diagnosis": Diagnosis, "RankPosition": RankPosition, "LaunchPlan": LaunchPlan, "RankResult": RankResult,
    "RankFailure": RankFailure, "ExceptionInfo": ExceptionInfo, "FrameInfo": FrameInfo, "Collective": Collective,
    "Mapping": Mapping, "Sequence": Sequence, "Callable": collections.abc.Callable, "Any": Any, "Plain": Plain,
    "ClassVar": typing.ClassVar,
}  # fmt: skip
"""Names in annotations that their modules import for type checkers only."""


class Frame(NamedTuple):
    """A frame: a list of events as JSON rows, or a section, which is a JSON object with a key "kind"."""

    content: Any
    payload: bytes


# ---- frames


def encode_frame(content: object, payload: bytes = b"") -> bytes:
    """Encode JSON content and a payload as a frame with a checksum."""
    text = json.dumps(content, separators=(",", ":"), default=to_json_scalar).encode()
    lengths = _LENGTHS.pack(len(text), len(payload))
    checksum = zlib.crc32(payload, zlib.crc32(text, zlib.crc32(lengths)))
    return FRAME.pack(len(text), len(payload), checksum) + text + payload


def encode_records(records: Iterable[Record]) -> Iterator[bytes]:
    """Return the frames of events. Records of kinds that a journal does not contain are omitted."""
    return encode_rows(row_of(record) for record in records if type(record.event).__name__ in _KINDS)


def encode_rows(rows: Iterable[list[Any]]) -> Iterator[bytes]:
    """Return the frames of events as JSON rows."""
    waiting = iter(rows)
    while part := list(islice(waiting, MAX_ROWS)):
        yield from _frames_of(part)


def _frames_of(rows: list[list[Any]]) -> Iterator[bytes]:
    """Return as few frames as possible for some rows. If a single row is too long, its texts are shortened."""
    frame = encode_frame(rows)
    if len(frame) <= MAX_JSON_BYTES:
        yield frame
    elif len(rows) > 1:
        yield from _frames_of(rows[: len(rows) // 2])
        yield from _frames_of(rows[len(rows) // 2 :])
    elif (longest := _longest(rows[0])) > 80:
        yield from _frames_of([_shortened(rows[0], max(80, longest // 2))])


def _longest(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_longest, items), default=0)


def _shortened(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= limit else value[: limit - 1] + "…"
    if isinstance(value, dict):
        return {key: _shortened(item, limit) for key, item in value.items()}
    return [_shortened(item, limit) for item in value] if isinstance(value, list) else value


def read_frames(data: bytes | memoryview) -> Iterator[tuple[Frame, int]]:
    """Read the complete frames of a journal, without its first bytes.

    Yields:
        A frame, and the position at which it ends.

    Raises:
        ValueError: The data is damaged before its end. An incomplete last frame is ignored.
    """
    start, size = 0, len(data)
    while size - start >= FRAME.size:
        text_length, payload_length, checksum = FRAME.unpack_from(data, start)
        body = start + FRAME.size
        end = body + text_length + payload_length
        if text_length > MAX_JSON_BYTES or payload_length > MAX_PAYLOAD_BYTES or not text_length:
            # A file system may leave zeros at the end of a file after a power loss.
            if not bytes(data[start:]).strip(b"\0"):
                return
            raise ValueError(f"the frame at byte {start:,} cannot have {text_length:,} + {payload_length:,} bytes")
        if end > size:
            return
        content = bytes(data[body:end])
        if zlib.crc32(content, zlib.crc32(_LENGTHS.pack(text_length, payload_length))) != checksum:
            if end == size:
                return
            raise ValueError(f"the frame at byte {start:,} does not have the checksum that was written")
        yield Frame(_parse(content[:text_length]), content[text_length:]), end
        start = end


def _parse(text: bytes) -> Any:
    content = guarded_files.parse_json(text, MAX_CONTAINERS)
    return escape_surrogates(content) if b"\\ud" in text else content


# ---- events


def row_of(record: Record) -> list[Any]:
    """Return the JSON row of an event: its kind, rank, time, and a mapping of its fields."""
    event = record.event
    if type(event) is MetricEvent:  # The most common event. A rank may log anything, but the store keeps only numbers.
        numbers = {str(name): number for name, value in event.values.items() if (number := to_float(value)) is not None}
        return ["MetricEvent", record.rank, record.time, {"values": numbers, "step": to_int64(event.step)}]
    values = {each.name: _to_json(getattr(event, each.name)) for each in _stored_fields(cast("Any", type(event)))}
    return [type(event).__name__, record.rank, record.time, values]


_FLOATS = frozenset({float})


Points = dict[tuple[str, int], tuple[list[int], list[float], list[float]]]
"""Steps, times and values by metric and rank."""


def take_points(row: Any, points: Points) -> bool:
    """Add the points of a row to ``points``, or return False for a row that must be read by `record_of`.

    Most rows of most journals are logged numbers with a step. This function reads them in a tenth of the time that
    `record_of` takes.
    """
    try:
        kind, rank, time, fields_of_row = row
        numbers, step = fields_of_row["values"], fields_of_row["step"]
        fits = kind == "MetricEvent" and type(rank) is int and 0 <= rank < MAX_RANKS and type(time) is float
        if not fits or type(step) is not int or not _FLOATS.issuperset(map(type, numbers.values())):
            return False
        if not 0.0 <= time <= LATEST_TIME or not -(2**63) <= step < 2**63:
            return False
        for name, value in numbers.items():
            steps, times, values = points.get((name, rank)) or points.setdefault((name, rank), ([], [], []))
            steps.append(step)
            times.append(time)
            values.append(value)
    except (TypeError, ValueError, LookupError, AttributeError):
        return False
    return True


def record_of(row: object) -> Record | None:
    """Return the event of a JSON row, or None for an unknown kind and for unusable values of a rank.

    Raises:
        ValueError: The row does not have this format.
    """
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError(f"{_short(row)} is not an event")
    name, rank, time, values = row
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    lowest = RUN if issubclass(kind, RunEvent) else 0
    if type(rank) is not int or not lowest <= rank <= (RUN if lowest == RUN else MAX_RANKS - 1):
        raise ValueError(f"{name} has the rank {_short(rank)}")
    try:
        return Record(rank, _checked_time(_from_json(float, time, "time"), "time"), _build(kind, values))
    except ValueError:
        if lowest == RUN:
            raise
        return None  # A rank may have sent anything.


def _to_json(value: object) -> object:
    if is_dataclass(value):
        return {each.name: _to_json(getattr(value, each.name)) for each in _stored_fields(cast("Any", type(value)))}
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_to_json(item) for item in value]
    return value


@cache
def _stored_fields(kind: Hashable) -> tuple[Any, ...]:
    name = cast("Any", kind).__name__
    return tuple(each for each in fields(cast("Any", kind)) if f"{name}.{each.name}" not in _OBJECTS)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, localns=_NAMES)


def _build(kind: Any, values: object) -> Any:
    """Return a dataclass with the fields of a JSON object. Unknown fields, from newer versions, are ignored."""
    if not isinstance(values, dict):
        raise ValueError(f"the fields of {kind.__name__} are {_short(values)}")
    hints, found = _hints(kind), {}
    for each in _stored_fields(kind):
        if each.name in values:
            what = f"{kind.__name__}.{each.name}"
            found[each.name] = _from_json(hints[each.name], values[each.name], what)
            if each.name in _TIMES:
                _checked_time(found[each.name], what)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{kind.__name__} has no {each.name}")
    if kind is run_events.RankReturned:
        found["result"] = RankResult(int)  # The reader replaces this placeholder.
    return kind(**found)


def _checked_time(time: float, what: str) -> float:
    if not 0.0 <= time <= LATEST_TIME:  # The comparison also excludes NaN.
        raise ValueError(f"{what} is {_short(time)}, which is not a time in seconds since the epoch")
    return time


def _from_json(hint: Any, value: object, what: str) -> Any:
    """Convert a JSON value to the type ``hint``, or raise ValueError if it has another type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        guarded_files.check_depth(value)
        return value
    if hint is float and isinstance(value, (int, float)) and type(value) is not bool:
        if (number := to_float(value)) is None:
            raise ValueError(f"{what} is {_short(value)}, which is too large")
        return number
    if hint in (int, str, bool) and type(value) is hint:
        if hint is int and to_int64(value) is None:
            raise ValueError(f"{what} is {_short(value)}, which needs more than 64 bits")
        return value
    if origin in (typing.Union, types.UnionType):
        return _of_union(parts, value, what)
    if isinstance(hint, type) and hasattr(hint, "_fields") and isinstance(value, list):
        return _named_tuple(hint, value, what)
    if is_dataclass(hint) and not isinstance(value, list):
        return _build(hint, value)
    if origin in (tuple, list, collections.abc.Sequence) and isinstance(value, list):
        found = [_from_json(parts[0], item, what) for item in value]
        return tuple(found) if origin is tuple else found
    if origin in (dict, collections.abc.Mapping) and isinstance(value, dict):
        return {_key(parts[0], key, what): _from_json(parts[1], item, what) for key, item in value.items()}
    raise ValueError(f"{what} is {_short(value)}")


def _of_union(parts: tuple[Any, ...], value: object, what: str) -> Any:
    if value is None and type(None) in parts:
        return None
    others = [part for part in parts if part is not type(None)]
    for part in others[:-1]:
        if type(value) is part:
            return value
    return _from_json(others[-1], value, what)


def _key(hint: Any, key: str, what: str) -> Any:
    try:
        return int(key) if hint is int else key
    except ValueError:
        raise ValueError(f"{what} has the key {_short(key)}") from None


def _named_tuple(kind: Any, value: list[Any], what: str) -> Any:
    hints, names = _hints(kind), kind._fields
    if len(value) > len(names):
        raise ValueError(f"{what} has {len(value)} parts")
    return kind(*(_from_json(hints[name], item, what) for name, item in zip(names, value, strict=False)))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
