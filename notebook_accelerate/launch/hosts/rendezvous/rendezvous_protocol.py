"""What travels between a kernel and the child process that meets the other notebooks for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.telemetry import Event


@dataclass(slots=True)
class RendezvousOrder(Event):
    """The first message down: where to meet, as what, and how long to wait.

    ``node`` is a `nodes.Node` as a dict, less what the child finds out; ``settings`` is `rdzv_conf` without the secret.
    """

    backend: str
    address: str
    port: int
    run_id: str
    num_nodes: int
    node: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    secret: str = ""


@dataclass(slots=True)
class JoinOrder(Event):
    """Join the others for one attempt."""

    attempt: int


@dataclass(slots=True)
class ListenerEvent(Event):
    """Where the first notebook can be called, for the attempt at hand: told by it, and heard by the others."""

    address: str
    port: int


@dataclass(slots=True)
class WaitingEvent(Event):
    """Who has come so far, in words; ``first``: this notebook hosts the store, and says so for the first time."""

    text: str
    first: bool = False


@dataclass(slots=True)
class NoteEvent(Event):
    """Something the user should read, such as a notebook that was refused."""

    text: str


@dataclass(slots=True)
class MetEvent(Event):
    """All have come: the nodes in order, which one this is, and where the ranks' store is."""

    attempt: int
    index: int
    nodes: list[dict[str, Any]]
    address: str
    port: int
    interface: str = ""
    own_address: str = ""


@dataclass(slots=True)
class BrokenEvent(Event):
    """The rendezvous has failed: ``kind`` is "timeout", "secret", "port", "late", "mismatch" or "connection"."""

    kind: str
    text: str


@dataclass(slots=True)
class NewsOrder(Event):
    """Tell the other notebooks: ``kind`` is "failed", "stopped" or "released" (failed ranks are kept no longer).

    ``failures`` are those of this notebook's ranks, as an `EndOrder` has them.
    """

    kind: str
    text: str
    failures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class NewsEvent(Event):
    """What another notebook told, as `NewsOrder` has it, or that it was lost: ``kind`` is "lost" then."""

    kind: str
    node: int
    text: str
    failures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class StandOrder(Event):
    """Tell the other notebooks whether time stands still in this one, and where it waits for its user, in words."""

    standing: bool
    text: str = ""


@dataclass(slots=True)
class StandEvent(Event):
    """Whether time stands still in another notebook, as it told."""

    node: int
    standing: bool
    text: str = ""


@dataclass(slots=True)
class EndOrder(Event):
    """All ranks of this notebook have ended: how ("succeeded", "failed", "stopped"), why, and what failed.

    ``final``: it must not start again.
    """

    outcome: str
    text: str = ""
    failures: list[dict[str, Any]] = field(default_factory=list)
    final: bool = False


@dataclass(slots=True)
class DecisionEvent(Event):
    """What all notebooks do now: ``action`` is "end" or "restart"; ``ends`` is what each told, by node."""

    action: str
    reason: str
    ends: dict[str, dict[str, Any]]
    lost: dict[str, str]
    left: int


@dataclass(slots=True)
class LeaveOrder(Event):
    """Nothing more is wanted: tell the others if they still wait for this notebook, and end."""

    text: str = ""


__all__ = [
    "BrokenEvent",
    "DecisionEvent",
    "EndOrder",
    "JoinOrder",
    "LeaveOrder",
    "ListenerEvent",
    "MetEvent",
    "NewsEvent",
    "NewsOrder",
    "NoteEvent",
    "RendezvousOrder",
    "StandEvent",
    "StandOrder",
    "WaitingEvent",
]
