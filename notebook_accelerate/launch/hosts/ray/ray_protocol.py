"""The messages between a kernel and its driver process on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from notebook_accelerate.telemetry import Event


@dataclass(slots=True)
class PlaceOrder(Event):
    """Reserve resources for ranks and place them.

    Attributes:
        ranks: Number of ranks.
        payload: The ``RayCluster``, with its address, pickled.
    """

    ranks: int
    payload: bytes


@dataclass(slots=True)
class ConnectedEvent(Event):
    """The cluster has answered.

    Attributes:
        address: Address of the kernel's machine as seen by the nodes; "" if they cannot reach it.
    """

    address: str


@dataclass(slots=True)
class ClusterNoteEvent(Event):
    """A message for the user while the launch waits."""

    text: str


@dataclass(slots=True)
class ReservedEvent(Event):
    """The resources are reserved; actors start."""


@dataclass(slots=True)
class RefusedEvent(Event):
    """The launch is not possible, with the reason."""

    text: str


@dataclass(slots=True)
class PlacedEvent(Event):
    """Every rank has its node, and every node an actor.

    Attributes:
        nodes: The address of each node and the number of its ranks, in order.
    """

    nodes: list[tuple[str, int]]


@dataclass(slots=True)
class ServeOrder(Event):
    """Have the actors connect to the kernel as hosts.

    Attributes:
        address: Address of the kernel's listener.
        port: Port of the kernel's listener.
        payload: The run's secret.
    """

    address: str
    port: int
    payload: bytes


@dataclass(slots=True)
class ActorEndedEvent(Event):
    """A node's actor has ended, with the reason; "" when its ranks have ended."""

    node: int
    text: str


@dataclass(slots=True)
class ReleaseOrder(Event):
    """Release all resources and end."""
