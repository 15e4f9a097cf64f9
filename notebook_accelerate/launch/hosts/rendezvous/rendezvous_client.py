"""The kernel's end of a rendezvous: starts the child process, exchanges messages with it, and ends it."""

from __future__ import annotations

import os
import platform
import secrets
import signal
import socket
import tempfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from notebook_accelerate.errors import ChannelClosedError, LaunchError
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous.child_process import start
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.processes.pickled_start import log_tail
from notebook_accelerate.launch.processes.rank_process import Ends
from notebook_accelerate.telemetry import Channel, Event

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.plan.planner import LaunchPlan

SECRET_VARIABLE = "NOTEBOOK_ACCELERATE_SECRET"  # noqa: S105 - the name of a variable
END_SECONDS = 8.0
"""Seconds that the child has to take leave of the others at the common end."""
LEAVE_SECONDS = 3.0
"""Seconds that it has to report that this notebook leaves early."""


class RendezvousClient:
    """The child process of one run.

    Args:
        config: The run's configuration.
        plan: This notebook's plan.
    """

    def __init__(self, config: LaunchConfig, plan: LaunchPlan) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - kept as long as the child
        self.channel, theirs = Channel.pair()
        Ends.kernel_side.add(self.channel.fileno())
        with theirs:
            self._process = start(theirs.fileno(), self._log.fileno())
        self.channel.send(_order(config, plan))

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def send(self, order: Event) -> None:
        """Send an order to the child; `receive` reports a child that has died."""
        with suppress(ChannelClosedError):
            self.channel.send(order)

    def receive(self) -> list[Event]:
        """Return the events that the child has sent.

        Raises:
            LaunchError: The child has died.
        """
        try:
            return [event for _, event in self.channel.receive_available()]
        except ChannelClosedError:
            raise LaunchError(f"the rendezvous process has ended{log_tail(self._log)}") from None

    def close(self, leaving: str) -> None:
        """End the child; kill it when it takes too long.

        Args:
            leaving: The reason for the other notebooks that still wait for this one; "" after the common end.
        """
        if leaving:
            self.send(protocol.LeaveOrder(leaving))
        if not self._process.ended(LEAVE_SECONDS if leaving else END_SECONDS):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.ended(END_SECONDS)
        self._process.close()
        Ends.kernel_side.discard(self.channel.fileno())
        self.channel.close()
        self._log.close()


def shared_secret(config: LaunchConfig) -> str:
    """Return the secret that the notebooks of a run share; "" without one."""
    return str((config.rdzv_conf or {}).get("secret") or os.environ.get(SECRET_VARIABLE, ""))


def _order(config: LaunchConfig, plan: LaunchPlan) -> protocol.RendezvousOrder:
    settings: dict[str, Any] = {k: v for k, v in (config.rdzv_conf or {}).items() if k != "secret"}
    address, port = config.rendezvous_address
    node = Node(
        name=secrets.token_hex(8),
        host=platform.node() or socket.gethostname(),
        pid=os.getpid(),
        node_rank=config.node_rank,
        processes=plan.num_processes,
        accelerator=plan.accelerator,
        num_nodes=config.num_nodes,
        min_nodes=config.min_nodes or config.num_nodes,
        max_restarts=config.max_restarts,
    )
    return protocol.RendezvousOrder(
        config.rdzv_backend, address, port, config.rdzv_id, config.num_nodes, node.as_dict(), settings,
        shared_secret(config),
    )  # fmt: skip
