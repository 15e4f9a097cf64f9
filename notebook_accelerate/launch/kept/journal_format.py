"""The file format of a kept run's journal, which `docs/run_format.md` documents.

The file is a sequence of frames. A frame has a checksum and contains JSON, and for thinned curves also columns of
numbers. Reading a journal never runs code from the file, because the reader checks each value against its field's type.
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
"""The version of the format. Files with a newer version are refused."""
JOURNAL_NAME = "journal.nbac"
"""The name of the journal's file in a run's folder."""
MAGIC = b"NBAC-RUN"
"""The first bytes of every journal."""
FRAME = struct.Struct("<III")
"""The head of a frame: the size of the JSON, the size of the payload, and a CRC-32 over both sizes and both parts."""
_LENGTHS = struct.Struct("<II")
MAX_JSON_BYTES = 48 << 20
"""Maximum size of a frame's JSON in bytes. A single event of a rank has at most 32 Mi characters."""
MAX_PAYLOAD_BYTES = 16 << 20
"""Maximum size of a frame's payload in bytes."""
MAX_ROWS = 500
"""Maximum number of events in a frame."""
MAX_RANKS = 1 << 14
"""Maximum number of ranks in a run. The largest rank that a journal may name is one less."""
MAX_CONTAINERS = 1 << 20
"""Maximum number of lists and objects in a frame's JSON. Even an empty one takes at least 64 bytes of memory."""
LATEST_TIME = 253_000_000_000.0
"""The latest time to accept, in seconds since the epoch (the year 9987). datetime supports years up to 9999."""
_TIMES = frozenset({"time", "since", "until"})
"""The names of the fields that hold times."""

RANK_EVENTS: tuple[type[Event], ...] = (
    MetricEvent, AutomaticMetricEvent, LogEvent, ProgressEvent, StepTimeEvent, ResourceEvent, DeviceMemoryEvent,
    DeviceUseEvent, DroppedEvent, TraceEvent, ShardingEvent, CheckpointEvent, EpochEvent,
)  # fmt: skip
"""The kinds of ranks' events that a journal contains. The store keeps the same kinds."""
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        *RANK_EVENTS,
        *(each for each in vars(run_events).values() if isinstance(each, type) and issubclass(each, RunEvent)),
    )
}
_OBJECTS = frozenset({"RunEnded.cause", "RankFailure.exception", "Diagnosis.name_place", "RankReturned.result"})
"""Fields that are not stored, because their values are objects of the writer's process."""
_NAMES = {
    "Diagnosis": Diagnosis, "RankPosition": RankPosition, "LaunchPlan": LaunchPlan, "RankResult": RankResult,
    "RankFailure": RankFailure, "ExceptionInfo": ExceptionInfo, "FrameInfo": FrameInfo, "Collective": Collective,
    "Mapping": Mapping, "Sequence": Sequence, "Callable": collections.abc.Callable, "Any": Any, "Plain": Plain,
    "ClassVar": typing.ClassVar,
}  # fmt: skip
"""Names that occur in annotations but that their modules import only for type checkers."""


class Frame(NamedTuple):
    """A frame, which contains either a list of events as JSON rows, or a section: a JSON object with a "kind"."""

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
    """Yield frames with the events of ``records``. Leave out kinds of events that a journal does not contain."""
    return encode_rows(row_of(record) for record in records if type(record.event).__name__ in _KINDS)


def encode_rows(rows: Iterable[list[Any]]) -> Iterator[bytes]:
    """Yield frames for events that are given as JSON rows."""
    waiting = iter(rows)
    while part := list(islice(waiting, MAX_ROWS)):
        yield from _frames_of(part)


def _frames_of(rows: list[list[Any]]) -> Iterator[bytes]:
    """Yield as few frames as possible for ``rows``. If a single row is too long, shorten its strings."""
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
        Each frame, and the position where the frame ends. An incomplete last frame is ignored.

    Raises:
        ValueError: The data is damaged, rather than only incomplete at the end.
    """
    start, size = 0, len(data)
    while size - start >= FRAME.size:
        text_length, payload_length, checksum = FRAME.unpack_from(data, start)
        body = start + FRAME.size
        end = body + text_length + payload_length
        if text_length > MAX_JSON_BYTES or payload_length > MAX_PAYLOAD_BYTES or not text_length:
            # After a power loss, a file system may leave zeros at the end of a file.
            if not bytes(data[start:]).strip(b"\0"):
                return
            raise ValueError(f"the frame at byte {start:,} cannot have {text_length:,} + {payload_length:,} bytes")
        if end > size:
            return
        content = bytes(data[body:end])
        if zlib.crc32(content, zlib.crc32(_LENGTHS.pack(text_length, payload_length))) != checksum:
            if end == size:
                return
            raise ValueError(f"the checksum of the frame at byte {start:,} does not match")
        yield Frame(_parse(content[:text_length]), content[text_length:]), end
        start = end


def _parse(text: bytes) -> Any:
    content = guarded_files.parse_json(text, MAX_CONTAINERS)
    return escape_surrogates(content) if b"\\ud" in text else content


# ---- events


def row_of(record: Record) -> list[Any]:
    """Return the JSON row for an event: the kind, the rank, the time, and a mapping of the fields."""
    event = record.event
    if type(event) is MetricEvent:  # Speed up the most common event. Keep only the numbers, as the store does.
        numbers = {str(name): number for name, value in event.values.items() if (number := to_float(value)) is not None}
        return ["MetricEvent", record.rank, record.time, {"values": numbers, "step": to_int64(event.step)}]
    values = {each.name: _to_json(getattr(event, each.name)) for each in _stored_fields(cast("Any", type(event)))}
    return [type(event).__name__, record.rank, record.time, values]


_FLOATS = frozenset({float})


Points = dict[tuple[str, int], tuple[list[int], list[float], list[float]]]
"""The steps, times and values of points, by metric and rank."""


def take_points(row: Any, points: Points) -> bool:
    """Add the points of a row to ``points``. Return False for a row that only `record_of` can read.

    Most rows of most journals contain logged numbers with a step. For these, this function takes a tenth of the time of
    `record_of`.
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
    """Return the record in a JSON row. Return None if its kind is unknown, or if a rank sent unusable values.

    Raises:
        ValueError: The row is not an event in this format.
    """
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError(f"{_short(row)} is not an event")
    name, rank, time, values = row
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    lowest = RUN if issubclass(kind, RunEvent) else 0
    if type(rank) is not int or not lowest <= rank <= (RUN if lowest == RUN else MAX_RANKS - 1):
        raise ValueError(f"{name} has an invalid rank: {_short(rank)}")
    try:
        return Record(rank, _checked_time(_from_json(float, time, "time"), "time"), _build(kind, values))
    except ValueError:
        if lowest == RUN:
            raise
        return None  # Ignore the event, because a rank may send anything.


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
    """Create a dataclass from the fields in a JSON object. Unknown fields, from newer versions, are ignored."""
    if not isinstance(values, dict):
        raise ValueError(f"the fields of {kind.__name__} are {_short(values)}, which is not a JSON object")
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
        found["result"] = RankResult(int)  # This is a placeholder, which the reader replaces.
    return kind(**found)


def _checked_time(time: float, what: str) -> float:
    if not 0.0 <= time <= LATEST_TIME:  # This comparison also rejects NaN.
        raise ValueError(f"{what} is {_short(time)}, which is not a time in seconds since the epoch")
    return time


def _from_json(hint: Any, value: object, what: str) -> Any:
    """Convert a JSON value to the type ``hint``. Raise ValueError if the value does not fit that type."""
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
    raise ValueError(f"{what} is {_short(value)}, which has the wrong type")


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
        raise ValueError(f"{what} has the key {_short(key)}, which is not an integer") from None


def _named_tuple(kind: Any, value: list[Any], what: str) -> Any:
    hints, names = _hints(kind), kind._fields
    if len(value) > len(names):
        raise ValueError(f"{what} has {len(value)} parts; at most {len(names)} are allowed")
    return kind(*(_from_json(hints[name], item, what) for name, item in zip(names, value, strict=False)))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
