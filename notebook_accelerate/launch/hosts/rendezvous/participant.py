"""A notebook's seat at the meeting: who it is there, what it is connected to, and which round it takes part in."""

from __future__ import annotations

import torch

from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as say
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.signed_messages import Directory, MessageSigner
from notebook_accelerate.telemetry import Channel


class Participant:
    """What all that the child process does has in common.

    Args:
        channel: To the kernel.
        order: Its first message.

    Attributes:
        node: This notebook.
        connection: To the store; None while there is none.
        attempt: Number of the attempt at hand, from 0.
        generation: How many notebooks had left before they were counted when this round began.
        left: Names of those that go on after the last decision; empty before it.
    """

    def __init__(self, channel: Channel, order: say.RendezvousOrder) -> None:
        self.channel, self.order = channel, order
        self.seal = MessageSigner(order.secret, order.run_id)
        self.node = Node.from_dict({**order.node, "torch": torch.__version__})
        self.connection: stores.Connection | None = None
        self.attempt, self.generation = 0, 0
        self.left: list[str] = []

    @property
    def where(self) -> str:
        """Where the notebooks meet."""
        return f"{self.order.address}:{self.order.port}"

    @property
    def hosting(self) -> bool:
        """Whether the store is in this process."""
        return self.connection is not None and self.connection.hosting

    @property
    def directory(self) -> Directory:
        """What the run keeps in the store."""
        assert self.connection is not None
        return Directory(self.connection.store, f"notebook_accelerate/{self.order.run_id}", self.seal)

    @property
    def round_name(self) -> str:
        """What the round is called in the store: each attempt is one, and begins anew when somebody leaves."""
        return f"{self.attempt}.{self.generation}"

    @property
    def round(self) -> Directory:
        """What the round at hand keeps in the store."""
        return self.directory.under(self.round_name)


__all__ = ["Participant"]
