"""A host without a notebook: a command, or the actor of a node of a Ray cluster."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.launch.hosts.remote.host import Host
from notebook_accelerate.launch.hosts.remote.host_protocol import FunctionEvent, StartOrder
from notebook_accelerate.launch.processes.placed import PlacedBackend, adapt_to_machine
from notebook_accelerate.telemetry.pickling import anonymous_file

if TYPE_CHECKING:
    from notebook_accelerate.telemetry import Channel, Event
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


class FunctionHost(Host):
    """A host that receives the function before the orders of its ranks.

    Args:
        channel: The stream to the kernel.
        environment: This machine's variables for ranks; those of an order replace them.
    """

    def __init__(self, channel: Channel, environment: Mapping[str, str] | None = None) -> None:
        self._function, self._environment = anonymous_file(), environment or {}
        super().__init__(channel)

    def handle_message(self, message: Event) -> None:
        """Handle a message of the kernel that is not for a rank; returns when the ranks that it starts have ended."""
        if isinstance(message, FunctionEvent):
            os.write(self._function, message.payload)
        elif isinstance(message, StartOrder):
            self.run_function(self.orders_in(message))

    def orders_in(self, message: StartOrder) -> list[WorkerOrder]:
        """Return the orders of this host's ranks."""
        orders: list[WorkerOrder] = pickle.loads(message.payload)
        return orders

    def run_function(self, orders: Sequence[WorkerOrder]) -> None:
        """Run ranks with the function that was received; see `run_ranks`."""
        for order in orders:
            order.environment = {**self._environment, **order.environment}
            adapt_to_machine(order)
        function, self._function = self._function, anonymous_file()
        self.run_ranks(PlacedBackend(function), orders)

    def close(self) -> None:
        """See ``Host.close``."""
        super().close()
        os.close(self._function)


__all__ = ["FunctionHost"]
