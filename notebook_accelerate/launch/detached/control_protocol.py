"""The socket between a run's process and the attached processes, and the messages sent over the socket."""

from __future__ import annotations

import os
import socket
import struct
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from notebook_accelerate.launch.processes import kernel_descriptors
from notebook_accelerate.telemetry import Event, Stamped, encode, steady_time

_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True)
class FollowCommand(Event):
    """Request the run's records from ``position`` on, or from the beginning if ``position`` is 0.

    The process sends the records as `RecordsEvent`. If it no longer holds the records from that position on, it first
    sends the history as `HistoryEvent`.
    """

    position: int


@dataclass(slots=True)
class StopCommand(Event):
    """Stop the run. Its ranks have ``grace`` seconds to end."""

    grace: float


@dataclass(slots=True)
class InterruptCommand(Event):
    """Send a KeyboardInterrupt to these ranks, without ending the run."""

    ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ClockCommand(Event):
    """Suspend the run's time limits because the user holds a rank, or end that suspension."""

    rank: int
    held: bool


@dataclass(slots=True)
class AnswerCommand(Event):
    """Answer prompt ``number`` of a rank. If ``text`` is None, the rank gets end-of-file."""

    rank: int
    number: int
    text: str | None = None


@dataclass(slots=True)
class CaptureCommand(Event):
    """Read the stacks of a rank that cannot reply. The reply is a `CapturedEvent` with the same number."""

    rank: int
    number: int


@dataclass(slots=True)
class CapturedEvent(Event):
    """The stacks of a rank; see ``debugging.process_stacks.ProcessStacks``."""

    number: int
    dump: str
    native: list[str] = field(default_factory=list)
    suspended: str = ""
    problem: str = ""


@dataclass(slots=True)
class RelayedEvent(Event):
    """An encoded event to a rank, or from a rank."""

    rank: int
    payload: bytes


@dataclass(slots=True)
class RecordsEvent(Event):
    """The next records of the run, as frames of a journal. ``position`` is the position after these records."""

    position: int
    payload: bytes


@dataclass(slots=True)
class HistoryEvent(Event):
    """A part of a journal with all records before ``position``. If ``position`` is 0, more parts follow."""

    position: int
    payload: bytes


@dataclass(slots=True)
class PingCommand(Event):
    """Request a `PongEvent` in reply."""


@dataclass(slots=True)
class PongEvent(Event):
    """The reply to `PingCommand`, which shows that the run's process is responsive."""


def relayed(rank: int, event: Event) -> RelayedEvent:
    """Wrap an event to a rank, or from a rank, for sending between the run's process and a kernel."""
    return RelayedEvent(rank, encode([Stamped(steady_time.now(), event)]))


def fits(event: Event) -> bool:
    """Return whether the fields of an event have the right types. Check this, because a peer can send any JSON."""
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
    if hint is float:  # Don't use math.isfinite(), which raises an error for a large int.
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return type(value) is hint


# ---- the socket


def listen(path: Path) -> socket.socket:
    """Create a socket that listens on a path. Only this user can connect to it, and forked ranks close it.

    Raises:
        OSError: The socket cannot be created.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with short_socket_path(path) as address:
            before = os.umask(0o177)
            try:
                listener.bind(address)
            finally:
                os.umask(before)
        listener.listen()
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    kernel_descriptors.add(listener.fileno())
    return listener


def stop_listening(listener: socket.socket, path: Path) -> None:
    """Remove a listening socket and its file."""
    with suppress(OSError):
        path.unlink()
    kernel_descriptors.discard(listener.fileno())
    listener.close()


@contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """Yield an address for a socket. A path that is too long is replaced by one through the folder's descriptor."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user, as far as the system can check."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # On this system, only the permissions of the folder protect the socket.
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())
