"""The messages between the process of a detached run and a kernel that has attached to it."""

from __future__ import annotations

import sys
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from notebook_accelerate.telemetry import Event

VERSION = 2
"""The version of these messages, which is part of a run's entry.

Version 1 added `PingCommand`, version 2 `FollowCommand`. Processes ignore unknown events, so the version matters only
for messages that need a reply.
"""


@dataclass(slots=True)
class FollowCommand(Event):
    """Send the run's records from ``position`` on; 0 means from the beginning.

    Records follow as `RecordsEvent`, after a `HistoryEvent` if the process no longer holds that position.
    """

    position: int


@dataclass(slots=True)
class StopCommand(Event):
    """Stop the run; its ranks have ``grace`` seconds to end."""

    grace: float


@dataclass(slots=True)
class InterruptCommand(Event):
    """Interrupt these ranks."""

    ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ClockCommand(Event):
    """Suspend the run's time limits for a rank that the user holds, or let them go on."""

    rank: int
    held: bool


@dataclass(slots=True)
class AnswerCommand(Event):
    """Answer prompt ``number`` of a rank; None means end of file."""

    rank: int
    number: int
    text: str | None = None


@dataclass(slots=True)
class CaptureCommand(Event):
    """Read the stacks of a rank that cannot reply; `CapturedEvent` with the same number follows."""

    rank: int
    number: int


@dataclass(slots=True)
class CapturedEvent(Event):
    """The stacks of a rank; see ``debugging.process_inspection.ProcessStacks``."""

    number: int
    dump: str
    native: list[str] = field(default_factory=list)
    suspended: str = ""
    problem: str = ""


@dataclass(slots=True)
class RelayedEvent(Event):
    """An encoded event for a rank, or from one."""

    rank: int
    payload: bytes


@dataclass(slots=True)
class RecordsEvent(Event):
    """The next records of the run, as frames of a journal; a kernel that has them is at ``position``."""

    position: int
    payload: bytes


@dataclass(slots=True)
class HistoryEvent(Event):
    """A part of a journal with all records before ``position``, in its format; 0 means that more parts follow."""

    position: int
    payload: bytes


@dataclass(slots=True)
class PingCommand(Event):
    """Ask for a `PongEvent`."""


@dataclass(slots=True)
class PongEvent(Event):
    """Shows that the process of the run answers."""


def fits(event: Event) -> bool:
    """Return whether the fields of an event have their types: a peer may send any JSON."""
    return all(_fits(hint, getattr(event, name)) for name, hint in _hints(cast("Any", type(event))).items())


@cache
def _hints(kind: Any) -> dict[str, Any]:
    names = (*kind.field_names, *(["payload"] if kind.has_payload else []))
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in names}


def _fits(hint: Any, value: object) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(parts[0], item) for item in value)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(part, value) for part in parts)
    if hint is float:  # comparisons, because math.isfinite() raises an error for a large int
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return type(value) is hint
