"""The code of a Ray actor, which acts as the host of one node. The node's ranks are forked from its server process.

The actor itself never loads the user's function.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import psutil

from notebook_accelerate.hardware.addresses import interface_of
from notebook_accelerate.launch.hosts.joining import FunctionHost
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent, RankEvent, SignalOrder
from notebook_accelerate.launch.hosts.remote.listener import connect_to_kernel
from notebook_accelerate.launch.processes import ports

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.rank_process import RankProcess
    from notebook_accelerate.launch.state.rank_result import Exit

RAY_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TUNNEL_BYTES = 1 << 20
TUNNEL_SECONDS = 10.0
"""How many seconds a tunnel waits for its connection, and then for data."""
KILLED_SECONDS = 1.0
"""When Ray ends an actor, the actor exits within this many seconds after its ranks have been killed."""


class ActorHost(FunctionHost):
    """The host that runs in an actor.

    Ray's workers kill their child processes before they exit, for example when their node is lost (Ray 2.60,
    `QuickExit`). In this case, the ranks' failures are only a consequence, and this host is lost a moment later.
    Therefore, the host waits for a moment before it reports that a SIGKILL ended a rank without a request from the
    kernel.
    """

    _killed_by_order = _has_waited = False

    def report_end(self, rank: int, end: Exit) -> None:
        if end.signal == signal.SIGKILL and not (self._killed_by_order or self._has_waited):
            self._has_waited = True  # Wait only once, because all other ranks are killed after this failure.
            time.sleep(KILLED_SECONDS)
        super().report_end(rank, end)

    def _carry_out(self, order: RankEvent, rank: RankProcess) -> None:
        self._killed_by_order |= isinstance(order, SignalOrder) and order.number == signal.SIGKILL
        super()._carry_out(order, rank)


class NodeHost:
    """The object whose methods the driver calls in the actor of a node.

    If the actor cannot reach the kernel, it connects to a local port, the tunnel, and everything on that connection is
    carried by calls to the actor's methods. The tunnel does not need the run's secret, because the stream is
    authenticated and encrypted from end to end.
    """

    def __init__(self) -> None:
        self._tunnel: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._accepting = threading.Lock()

    def open_tunnel(self) -> None:
        """Use calls to this actor's methods for the stream to the kernel, instead of a direct connection."""
        self._tunnel = socket.create_server(("127.0.0.1", 0), backlog=1)

    def serve(
        self, address: str, port: int, secret: bytes, node: int, host: str, own_address: str, devices: dict[str, str]
    ) -> None:
        """Run ranks for the kernel until the kernel leaves or is lost.

        Args:
            address: The address on which the kernel listens.
            port: The port on which the kernel listens.
            secret: The run's secret.
            node: Index of this machine in the run.
            host: Name of this machine.
            own_address: Address of this machine.
            devices: The environment variables that list the devices of this machine's ranks.
        """
        where: tuple[str, int] = self._tunnel.getsockname() if self._tunnel else (address, port)
        rendezvous, _ = ports.reserve(os.getpid(), 0, fixed=False)  # The port is reserved until the actor ends.
        interface = interface_of(own_address)
        network = {name: interface for name in RAY_INTERFACE_VARIABLES if interface and name not in os.environ}
        stream = connect_to_kernel(*where, secret, HelloEvent(node, host, port=rendezvous))
        with closing(ActorHost(stream, {**network, **devices})) as serving:
            while (message := serving.next_message()) is not None:
                serving.handle_message(message)

    def _connected(self) -> socket.socket | None:
        """Return the tunnel's connection, or None if none is made in time."""
        with self._accepting:
            if self._connection is None and self._tunnel is not None and _readable(self._tunnel):
                connection, peer = self._tunnel.accept()
                if _is_own(peer):
                    self._connection = connection
                    self._tunnel.close()
                else:
                    connection.close()
            return self._connection

    def push(self, data: bytes) -> None:
        """Pass data from the kernel into the tunnel. Empty ``data`` means the end."""
        while (connection := self._connected()) is None:
            pass
        with suppress(OSError):
            if data:
                connection.sendall(data)
            else:
                connection.shutdown(socket.SHUT_WR)

    def pull(self) -> bytes | None:
        """Return data for the kernel. Return empty bytes at the end, or None if no data arrives in time."""
        connection = self._connected()
        if connection is None or not _readable(connection):
            return None
        try:
            return connection.recv(TUNNEL_BYTES)
        except OSError:
            return b""


def _is_own(peer: tuple[str, int]) -> bool:
    """Return whether this process opened the connection. Check this, because any user of the machine can connect."""
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections  # Before version 6 of psutil.
    # libzmq opens an IPv6 socket, so the address is an IPv4-mapped one.
    own = [(each.laddr.ip.removeprefix("::ffff:"), each.laddr.port) for each in connections("tcp") if each.laddr]
    return peer in own


def _readable(waiting: socket.socket) -> bool:
    """Wait up to `TUNNEL_SECONDS` for a socket to become readable. Return whether it is.

    This uses poll, because a socket timeout would also apply to a concurrent push and could truncate its data.
    """
    waiter = select.poll()
    waiter.register(waiting, select.POLLIN)
    return bool(waiter.poll(TUNNEL_SECONDS * 1000))
