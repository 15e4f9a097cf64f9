"""The code of a Ray actor, which runs one rank as a child process.

The actor itself never loads the user's function: it passes the payload on as a file, starts the rank like any launch on
that machine, and relays between the rank and the kernel.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from notebook_accelerate.hardware.addresses import interface_of
from notebook_accelerate.launch.hosts.remote.host import Host
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import connect_to_kernel
from notebook_accelerate.launch.processes import ports
from notebook_accelerate.launch.processes.placed import PlacedBackend, adapt_to_machine
from notebook_accelerate.telemetry.pickling import anonymous_file

if TYPE_CHECKING:
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables in which Ray lists an actor's devices."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TUNNEL_BYTES = 1 << 20
TUNNEL_SECONDS = 10.0
"""Seconds that a tunnel waits for its connection, and then for data."""


class RankSlot:
    """The rank of one actor, and its resources."""

    def __init__(self) -> None:
        self._payload = -1
        self._tunnel: Tunnel | None = None
        self._port_held = threading.Event()

    # ---- before the rank starts

    def hold_port(self) -> int:
        """Take a free port for the process group's rendezvous, and hold it until the actor ends."""
        port, _ = ports.reserve(os.getpid(), 0, fixed=False)
        self._port_held.set()
        return port

    def receive(self, payload: Any) -> tuple[int, int]:
        """Write the payload, an array in the node's object store, to a file; return this process and the descriptor."""
        self._payload = anonymous_file()
        with os.fdopen(os.dup(self._payload), "wb") as file:
            file.write(memoryview(payload))
        return os.getpid(), self._payload

    def share(self, process: int, descriptor: int) -> bool:
        """Open the file that another actor of this node has written; return whether that could be done."""
        with suppress(OSError):  # a process of another user or container
            self._payload = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        return self._payload >= 0

    def open_tunnel(self) -> None:
        """Send the stream to the kernel through calls of this actor instead of a connection of its own."""
        self._tunnel = Tunnel()

    # ---- the rank

    def serve(self, address: str, port: int, secret: bytes, node: int, host: str, order: bytes) -> None:
        """Start the rank and relay between it and the kernel until the rank has ended or the kernel is lost.

        Args:
            address: Where the kernel listens.
            port: Port of the kernel's listener.
            secret: The run's secret.
            node: Index of this machine in the run.
            host: Name of this machine.
            order: The rank's order, pickled.
        """
        completed: WorkerOrder = pickle.loads(order)
        adapt_to_machine(completed)
        hello = HelloEvent(node, host, {"rank": completed.rank})
        if self._tunnel is not None:
            address, port = self._tunnel.address
        channel = connect_to_kernel(address, port, secret, hello)
        Host(channel).serve(PlacedBackend(self._payload), [completed])

    # ---- the tunnel

    def push(self, data: bytes) -> None:
        """See `Tunnel.push`."""
        assert self._tunnel is not None
        self._tunnel.push(data)

    def pull(self) -> bytes | None:
        """See `Tunnel.pull`."""
        assert self._tunnel is not None
        return self._tunnel.pull()


class Tunnel:
    """A port of the loopback interface; calls of this actor carry what its one connection sends and receives.

    The tunnel does not know the run's secret: the stream is authenticated and encrypted from end to end.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._connection: socket.socket | None = None
        self._accepting = threading.Lock()

    def _connected(self) -> socket.socket | None:
        """Return the connection; None when there was none in time."""
        with self._accepting:
            if self._connection is None and _readable(self._listener):
                self._connection, _ = self._listener.accept()
                self._listener.close()
            return self._connection

    def push(self, data: bytes) -> None:
        """Accept data from the kernel; ``b""`` is the end."""
        while (connection := self._connected()) is None:
            pass
        with suppress(OSError):
            if data:
                connection.sendall(data)
            else:
                connection.shutdown(socket.SHUT_WR)

    def pull(self) -> bytes | None:
        """Return data for the kernel: ``b""`` at the end, None when none arrived in time."""
        connection = self._connected()
        if connection is None or not _readable(connection):
            return None
        try:
            return connection.recv(TUNNEL_BYTES)
        except OSError:
            return b""


def _readable(waiting: socket.socket) -> bool:
    """Wait for a socket, without a timeout of its own: that would also apply to a concurrent push, and truncate it."""
    waiter = select.poll()
    waiter.register(waiting, select.POLLIN)
    return bool(waiter.poll(TUNNEL_SECONDS * 1000))


def machine_facts(address: str) -> dict[str, Any]:
    """Return properties of this actor's machine for the driver: devices, and the interface of its address."""
    devices = {name: os.environ[name] for name in DEVICE_VARIABLES if os.environ.get(name)}
    interface = interface_of(address)
    network = {name: interface for name in INTERFACE_VARIABLES if interface and name not in os.environ}
    return {"devices": devices, "network": network}
