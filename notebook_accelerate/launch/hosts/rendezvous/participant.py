"""A notebook as a participant of the rendezvous: its node, its connection and its current round."""

from __future__ import annotations

import torch

from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.signed_messages import Directory, MessageSigner
from notebook_accelerate.telemetry import Channel


class Participant:
    """The state that all parts of the child process share.

    Args:
        channel: The channel to the kernel.
        order: The kernel's first message.

    Attributes:
        node: This notebook.
        connection: The connection to the store; None while there is none.
        attempt: Number of the current attempt, from 0.
        generation: How many notebooks had left before they were admitted when this round started.
        left: Names of the nodes that continue after the last decision; empty before it.
    """

    def __init__(self, channel: Channel, order: protocol.RendezvousOrder) -> None:
        self.channel, self.order = channel, order
        self.signer = MessageSigner(order.secret, order.run_id)
        self.node = Node.from_dict({**order.node, "torch": torch.__version__})
        self.connection: stores.Connection | None = None
        self.attempt, self.generation = 0, 0
        self.remaining: list[str] = []

    @property
    def endpoint(self) -> str:
        """Address of the rendezvous."""
        return f"{self.order.address}:{self.order.port}"

    @property
    def hosting(self) -> bool:
        """Whether this process hosts the store."""
        return self.connection is not None and self.connection.hosting

    @property
    def directory(self) -> Directory:
        """The run's part of the store."""
        assert self.connection is not None
        return Directory(self.connection.store, f"notebook_accelerate/{self.order.run_id}", self.signer)

    @property
    def round_name(self) -> str:
        """Name of the round in the store: one per attempt, and a new one when a notebook leaves early."""
        return f"{self.attempt}.{self.generation}"

    @property
    def round(self) -> Directory:
        """The current round's part of the store."""
        return self.directory.under(self.round_name)
