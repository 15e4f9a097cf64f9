"""What a kernel and the process that is its driver on a Ray cluster say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.telemetry import Event


@dataclass(slots=True)
class PlaceOrder(Event):
    """Find places for ranks.

    Attributes:
        address: The cluster.
        ranks: How many.
        cpus: Processors for each.
        gpus: GPUs for each; None: one where the cluster has some.
        resources: Custom resources for each.
        strategy: Ray's placement strategy.
        runtime_env: Ray's runtime environment.
        wait: Seconds to wait for free resources; 0 refuses at once.
        versions: What the kernel runs, by name: python, torch, notebook_accelerate.
    """

    address: str
    ranks: int
    cpus: float
    gpus: int | None
    resources: dict[str, float]
    strategy: str
    runtime_env: dict[str, Any]
    wait: float
    versions: dict[str, str]


@dataclass(slots=True)
class ReachedEvent(Event):
    """The cluster has answered.

    Attributes:
        here: Address of the kernel's machine, as the nodes know it; "" where they cannot reach it.
    """

    here: str


@dataclass(slots=True)
class NoteEvent(Event):
    """Something to tell the user while the launch waits."""

    text: str


@dataclass(slots=True)
class TakenEvent(Event):
    """The resources are reserved; actors start."""


@dataclass(slots=True)
class RefusedEvent(Event):
    """The launch cannot be done, and why."""

    text: str


@dataclass(slots=True)
class PlacedEvent(Event):
    """Every rank has a place.

    Attributes:
        places: One for each rank, in order: node, host, address, local_rank, local_size, and the variables that the
            place calls for.
        port: Free on the first rank's node, and held there.
    """

    places: list[dict[str, Any]]
    port: int


@dataclass(slots=True)
class ServeOrder(Event):
    """Start the ranks, and have them call the kernel.

    Attributes:
        address: Where the kernel listens.
        port: The same.
        payload: The run's secret and an order for each rank, pickled.
    """

    address: str
    port: int
    payload: bytes


@dataclass(slots=True)
class ActorEndedEvent(Event):
    """A rank's actor has ended, and why, in words."""

    rank: int
    reason: str


@dataclass(slots=True)
class LeaveOrder(Event):
    """Give everything back and end."""

    ranks: list[int] = field(default_factory=list)


__all__ = [
    "ActorEndedEvent",
    "LeaveOrder",
    "NoteEvent",
    "PlaceOrder",
    "PlacedEvent",
    "ReachedEvent",
    "RefusedEvent",
    "ServeOrder",
    "TakenEvent",
]
