"""The messages between a kernel and its rendezvous child process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.telemetry import Event


@dataclass(slots=True)
class RendezvousOrder(Event):
    """The kernel's first message: the address of the rendezvous, this notebook's node, and the time limits.

    ``node`` is a `membership.Node` as a dict, without the fields that the child fills in; ``settings`` is `rdzv_conf`
    without the secret.
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
    """The address of the first notebook's listener for the current attempt: sent by it, received by the others."""

    address: str
    port: int


@dataclass(slots=True)
class WaitingEvent(Event):
    """Text about who has arrived so far; ``first``: the first such event of the notebook that hosts the store."""

    text: str
    first: bool = False


@dataclass(slots=True)
class NoteEvent(Event):
    """A remark for the user, such as a notebook that was refused."""

    text: str


@dataclass(slots=True)
class AllJoinedEvent(Event):
    """All have arrived: the nodes in order, the index of this one, and the address of the ranks' store."""

    attempt: int
    index: int
    nodes: list[dict[str, Any]]
    address: str
    port: int
    interface: str = ""
    own_address: str = ""


@dataclass(slots=True)
class JoinFailedEvent(Event):
    """The rendezvous has failed, with the reason."""

    text: str


@dataclass(slots=True)
class NewsOrder(Event):
    """News for the other notebooks: ``kind`` is "failed", "stopped" or "released" (failed ranks are no longer held).

    ``failures`` are those of this notebook's ranks, as in `EndOrder`.
    """

    kind: str
    text: str
    failures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class NewsEvent(Event):
    """News of another notebook, as in `NewsOrder`, or its loss: ``kind`` is then "lost"."""

    kind: str
    node: int
    text: str
    failures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class PauseOrder(Event):
    """For the other notebooks: whether this one's clock is suspended, and a text about where it waits for its user."""

    paused: bool
    text: str = ""


@dataclass(slots=True)
class PauseEvent(Event):
    """Whether the clock of another notebook is suspended."""

    node: int
    paused: bool
    text: str = ""


@dataclass(slots=True)
class EndOrder(Event):
    """All ranks of this notebook have ended: the outcome ("succeeded", "failed", "stopped"), reason and failures.

    ``final``: it must not restart.
    """

    outcome: str
    text: str = ""
    failures: list[dict[str, Any]] = field(default_factory=list)
    final: bool = False


@dataclass(slots=True)
class DecisionEvent(Event):
    """The common decision: ``action`` is "end" or "restart"; ``ends`` is the end that each node reported."""

    action: str
    reason: str
    ends: dict[str, dict[str, Any]]
    lost: dict[str, str]


@dataclass(slots=True)
class LeaveOrder(Event):
    """End the child process; notify the others first if they still wait for this notebook."""

    text: str = ""
