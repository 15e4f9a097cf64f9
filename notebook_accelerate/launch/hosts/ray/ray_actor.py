"""The code of a Ray actor, which is the host of one node and starts the ranks there as child processes.

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
"""If Ray ends an actor, the actor exits within this many seconds after its ranks were killed."""


class ActorHost(FunctionHost):
    """The host in an actor.

    Ray's workers kill their child processes before they exit, for example when their node is lost (Ray 2.60,
    `QuickExit`). The ranks have then not failed by themselves, and this host is lost a moment later. It therefore waits
    for that moment before it reports that a rank was killed by a SIGKILL that the kernel did not request.
    """

    _killed_by_order = _has_waited = False

    def report_end(self, rank: int, end: Exit) -> None:
        if end.signal == signal.SIGKILL and not (self._killed_by_order or self._has_waited):
            self._has_waited = True  # Wait only once, because after this failure the other ranks are killed too.
            time.sleep(KILLED_SECONDS)
        super().report_end(rank, end)

    def _carry_out(self, order: RankEvent, rank: RankProcess) -> None:
        self._killed_by_order |= isinstance(order, SignalOrder) and order.number == signal.SIGKILL
        super()._carry_out(order, rank)


class NodeHost:
    """The work of the actor of one node. The driver calls its methods.

    If the actor cannot reach the kernel, it connects to a local port, the tunnel. Calls of this actor then
    carry what that connection sends and receives. The tunnel does not know the run's secret, because the stream is
    authenticated and encrypted from end to end.
    """

    def __init__(self) -> None:
        self._tunnel: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._accepting = threading.Lock()

    def open_tunnel(self) -> None:
        """Send the stream to the kernel through calls of this actor instead of a direct connection."""
        self._tunnel = socket.create_server(("127.0.0.1", 0), backlog=1)

    def serve(
        self, address: str, port: int, secret: bytes, node: int, host: str, own_address: str, devices: dict[str, str]
    ) -> None:
        """Run ranks for the kernel until it leaves or is lost.

        Args:
            address: Address at which the kernel listens.
            port: Port of the kernel's listener.
            secret: The run's secret.
            node: Index of this machine in the run.
            host: Name of this machine.
            own_address: Address of this machine.
            devices: The variables that list the devices of its ranks.
        """
        where: tuple[str, int] = self._tunnel.getsockname() if self._tunnel else (address, port)
        rendezvous, _ = ports.reserve(os.getpid(), 0, fixed=False)  # Held until the actor ends.
        interface = interface_of(own_address)
        network = {name: interface for name in RAY_INTERFACE_VARIABLES if interface and name not in os.environ}
        stream = connect_to_kernel(*where, secret, HelloEvent(node, host, port=rendezvous))
        with closing(ActorHost(stream, {**network, **devices})) as serving:
            while (message := serving.next_message()) is not None:
                serving.handle_message(message)

    def _connected(self) -> socket.socket | None:
        """Return the tunnel's connection, or None if it did not arrive in time."""
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
        """Accept data for the tunnel from the kernel. Empty bytes mean the end."""
        while (connection := self._connected()) is None:
            pass
        with suppress(OSError):
            if data:
                connection.sendall(data)
            else:
                connection.shutdown(socket.SHUT_WR)

    def pull(self) -> bytes | None:
        """Return data for the kernel: empty bytes at the end, or None if no data arrived in time."""
        connection = self._connected()
        if connection is None or not _readable(connection):
            return None
        try:
            return connection.recv(TUNNEL_BYTES)
        except OSError:
            return b""


def _is_own(peer: tuple[str, int]) -> bool:
    """Return whether this process opened a connection, because any user of the machine can connect to the tunnel."""
    process = psutil.Process()
    connections = getattr(process, "net_connections", None) or process.connections  # psutil before version 6
    # libzmq opens an IPv6 socket, so its address is an IPv4-mapped one.
    own = [(each.laddr.ip.removeprefix("::ffff:"), each.laddr.port) for each in connections("tcp") if each.laddr]
    return peer in own


def _readable(waiting: socket.socket) -> bool:
    """Wait for a socket with poll. A timeout of the socket would also apply to a concurrent push and truncate it."""
    waiter = select.poll()
    waiter.register(waiting, select.POLLIN)
    return bool(waiter.poll(TUNNEL_SECONDS * 1000))
