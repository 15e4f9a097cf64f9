"""What travels between a kernel and a host: a process on another machine that has ranks there.

A rank's own channel and output travel inside: nothing of them is decoded on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.telemetry import Event


@dataclass(slots=True)
class HelloEvent(Event):
    """The first word of a host, and the kernel's answer to it.

    Attributes:
        node: Index of the host's machine in the run.
        host: Name of that machine.
        facts: What the kernel may want to know of it: versions, devices.
    """

    node: int
    host: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ClockEvent(Event):
    """What time is it? The answer carries the same number; its stamp is the other end's time."""

    number: int


@dataclass(slots=True)
class StartedEvent(Event):
    """A rank has a process."""

    rank: int
    pid: int
    local_rank: int


@dataclass(slots=True)
class OutputEvent(Event):
    """Bytes that a rank wrote to ``stream`` ("stdout" or "stderr")."""

    rank: int
    stream: str
    payload: bytes


@dataclass(slots=True)
class FramesEvent(Event):
    """Bytes of a rank's channel, in either direction."""

    rank: int
    payload: bytes


@dataclass(slots=True)
class AsideEvent(Event):
    """What the host says in a rank's name, between what the rank says itself: whole frames."""

    rank: int
    payload: bytes


@dataclass(slots=True)
class EndedEvent(Event):
    """A rank's process has ended, and everything it left has been sent; see ``backends.base.Exit``."""

    rank: int
    code: int | None
    signal: int | None
    max_rss: int


@dataclass(slots=True)
class SignalOrder(Event):
    """Send a signal to a rank, or to everything in its process group."""

    rank: int
    number: int
    group: bool = False


@dataclass(slots=True)
class DumpOrder(Event):
    """The rank's stacks appear in this file of the host's machine: keep it open."""

    rank: int
    path: str


@dataclass(slots=True)
class LookOrder(Event):
    """Look at a rank that cannot answer."""

    rank: int
    number: int


@dataclass(slots=True)
class LookAnswer(Event):
    """What was seen: faulthandler's dump, and native frames."""

    rank: int
    number: int
    dump: str
    native: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FarewellEvent(Event):
    """This end leaves, and why: "" when the run is over for it."""

    reason: str = ""
