"""Run ranks on a Ray cluster, where one actor per node acts as the host of the node's ranks.

This is the kernel's part. It starts a driver process (see ``ray_driver``), listens until every node's actor has
connected, and then makes the actors start their ranks, like other hosts. The kernel itself never imports Ray; the
reason is in ``ray_driver``.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.config.plain_values import redact
from notebook_accelerate.errors import ChannelClosedError, LaunchError, RunStoppedError
from notebook_accelerate.launch.hosts.host_backend import FunctionBackend, take_ranks
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
from notebook_accelerate.launch.hosts.remote.listener import HostListener, IncomingHost
from notebook_accelerate.launch.hosts.remote.stream import new_secret
from notebook_accelerate.launch.processes import kernel_descriptors
from notebook_accelerate.launch.processes.interpreters import log_tail, start_interpreter
from notebook_accelerate.launch.processes.rank_process import RankProcess
from notebook_accelerate.telemetry import Channel, Event

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


POLL_SECONDS = 0.2
REASON_SECONDS = 45.0
"""How many seconds to wait for Ray's reason after a connection breaks. The driver's own limit is shorter."""
LEAVE_SECONDS, GIVE_UP_SECONDS = 10.0, 3.0


class DriverProcess:
    """The process that acts as the kernel's driver on a Ray cluster.

    Args:
        cluster: The cluster to use. Its secrets are removed from Ray's messages.

    Attributes:
        channel: Sends orders to the driver.
        ends: For each node whose actor has exited, the reason, or "" if the actor's ranks have finished.
        connected: The nodes with open connections. When the last connection is closed, the driver is ended.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.channel.queues = True  # Otherwise, a driver that does not read would block the kernel.
        kernel_descriptors.add(ours.fileno())
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - kept open while the process runs
        call = (
            f"from notebook_accelerate.launch.hosts.ray.ray_driver import main; main({theirs.fileno()}, {os.getpid()})"
        )
        self._process = start_interpreter(call, [theirs.fileno()], self._log.fileno())
        theirs.close()
        self._received: deque[Event] = deque()
        self.ends: dict[int, str] = {}
        self.connected: set[int] = set()

    def next(self, kind: type[Event], seconds: float, what: str, waiting: Callable[[str], None]) -> Any:
        """Wait for the driver's next event of a certain type.

        Args:
            kind: The type of the event.
            seconds: Maximum seconds to wait.
            what: What the driver is doing, for the error message.
            waiting: A function to call with each note for the user, and repeatedly with "" in between. It
                may raise an error.

        Raises:
            LaunchError: The driver refused the launch, has exited, or took too long.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self._received:
                self.receive(POLL_SECONDS, what)
            event = self._received.popleft() if self._received else None
            if isinstance(event, kind):
                return event
            waiting(redact(event.text, self._cluster) if isinstance(event, ClusterNoteEvent) else "")
        raise LaunchError(
            f"{what} took longer than {seconds:g} s; pass a longer RayCluster(start_timeout=...){self._log_tail()}"
        )

    def _log_tail(self) -> str:
        return redact(log_tail(self._log), self._cluster)

    def receive(self, seconds: float, what: str) -> None:
        """Wait up to ``seconds`` for messages from the driver, and store those that arrive.

        Raises:
            LaunchError: The driver refused the launch, or has exited.
        """
        try:
            events = [event for _, event in self.channel.receive(seconds)]
        except ChannelClosedError:
            raise LaunchError(f"{what} failed: the driver process ended{self._log_tail()}") from None
        for event in events:
            if isinstance(event, RefusedEvent):
                raise LaunchError(redact(event.text, self._cluster))
            if isinstance(event, ActorEndedEvent):
                self.ends[event.node] = redact(event.text, self._cluster)
            else:
                self._received.append(event)

    def end_reason(self, node: int) -> str:
        """Return why a node's actor has exited, or "" if Ray does not report a reason in time."""
        deadline = time.monotonic() + REASON_SECONDS
        while node not in self.ends and (left := deadline - time.monotonic()) > 0:
            try:
                self.receive(left, "the run on Ray")
            except LaunchError as error:
                return str(error)
        return self.ends.get(node, "")

    def end(self, seconds: float = LEAVE_SECONDS) -> None:
        """Tell the driver to release its resources and exit. If that takes longer than ``seconds``, kill the driver.

        If the driver is killed, the cluster releases the resources as soon as it notices.
        """
        if self._process.returncode is not None:
            return
        with suppress(ChannelClosedError):
            self.channel.send(ReleaseOrder())
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        kernel_descriptors.discard(self.channel.fileno())
        self.channel.close()
        self._log.close()


class RayHostConnection(HostConnection):
    """The connection to one node's actor for one attempt. If it breaks, the reason comes from Ray.

    Args:
        incoming: The actor's stream and first message.
        driver: The driver process, which asks Ray for the reason.
    """

    def __init__(self, incoming: IncomingHost, driver: DriverProcess) -> None:
        super().__init__(incoming)
        self._driver = driver
        self.on_last_end = self._end
        driver.connected.add(self.node)

    def mark_lost(self, reason: str) -> None:
        if reason and (end_reason := self._driver.end_reason(self.node)):
            reason = f"{self.name} was lost: {end_reason}"
        super().mark_lost(reason)

    def _end(self) -> None:
        self.close()
        self._driver.connected.discard(self.node)
        if not self._driver.connected:
            self._driver.end()


class RayBackend(FunctionBackend):
    """Starts the ranks on the Ray cluster that the launch configuration names."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError("on='ray' needs Ray; install it: pip install 'notebook-accelerate[ray]'")
        super().__init__(function, arguments)
        self._cluster = RayCluster()
        self._cpu = False
        self._note: Callable[[str], None] = print
        self._stopping: Callable[[], bool] = bool

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        self._cluster = config.cluster or RayCluster()
        self._cpu, self._note, self._stopping = config.cpu, note, stopping

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        driver = DriverProcess(self._cluster)
        connections: dict[int, RayHostConnection] = {}
        try:
            address, nodes = self._place(driver, len(orders))
            secret = new_secret()
            with closing(HostListener(address or "127.0.0.1", secret, report=self._note)) as listener:
                driver.channel.send(ServeOrder(listener.address, listener.port, secret))
                self._await_connections(listener, driver, nodes, connections)
            by_node = _by_node(orders, nodes, connections[0].hello.port)
            for node, own in enumerate(by_node):
                with suppress(ChannelClosedError):  # A lost node is noticed while waiting for its ranks.
                    connections[node].measure_clock()
                self.send(connections[node], own)
            for node, own in enumerate(by_node):
                take_ranks(connections[node], own, started, self._cluster.start_timeout, self._stopping)
        except BaseException:
            for connection in connections.values():
                connection.close()
            driver.end(GIVE_UP_SECONDS)
            raise

    def _place(self, driver: DriverProcess, ranks: int) -> tuple[str, list[tuple[str, int]]]:
        """Make the driver place the ranks. Return the address of this machine for the nodes, and the nodes."""
        cluster = self._cluster
        wanted = replace(
            cluster,
            address=address_of(cluster),
            gpus=0 if self._cpu and cluster.gpus is None else cluster.gpus,
            resources=dict(cluster.resources or {}),
            runtime_env=dict(cluster.runtime_env or {}),
        )
        driver.channel.send(PlaceOrder(ranks, pickle.dumps(wanted)))
        limit = cluster.start_timeout
        connected = driver.next(ConnectedEvent, limit, f"reaching {cluster.description}", self._handle_note)
        driver.next(ReservedEvent, cluster.seconds_to_wait + limit, "reserving resources", self._handle_note)
        placed = driver.next(PlacedEvent, limit, "starting Ray's actors", self._handle_note)
        return connected.address, placed.nodes

    def _handle_note(self, text: str) -> None:
        """Show the user a note, and raise an error if the user has stopped the run."""
        if text:
            self._note(text)
        if self._stopping():
            raise RunStoppedError("the run was stopped while it waited for the Ray cluster")

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        order = super().complete(order)
        if "working_dir" in (self._cluster.runtime_env or {}):
            order.cwd = None
        return order

    def _await_connections(
        self,
        listener: HostListener,
        driver: DriverProcess,
        nodes: Sequence[tuple[str, int]],
        found: dict[int, RayHostConnection],
    ) -> None:
        """Wait until the actors of all nodes have connected, and add the connections to ``found``."""
        deadline = time.monotonic() + self._cluster.start_timeout
        while len(found) < len(nodes):
            self._handle_note("")
            driver.receive(0.0, "starting the ranks")
            for node, text in driver.ends.items():
                if text:
                    raise LaunchError(f"the host of node {node} could not be started on Ray: {text}")
            if time.monotonic() > deadline:
                missing = ", ".join(address for node, (address, _) in enumerate(nodes) if node not in found)
                raise LaunchError(
                    f"the actors on {missing} did not connect to {listener.address}:{listener.port} within "
                    f"{self._cluster.start_timeout:g} s; if a firewall blocks the nodes' connections, "
                    "pass on='ray://host:10001'"
                )
            if (incoming := listener.next_host(POLL_SECONDS)) is not None:
                found[incoming.hello.node] = RayHostConnection(incoming, driver)


def _by_node(orders: Sequence[WorkerOrder], nodes: Sequence[tuple[str, int]], port: int) -> list[list[WorkerOrder]]:
    """Divide the orders among the nodes, and add the environment variables that say where each rank is placed."""
    remaining = iter(orders)
    by_node = [list(itertools.islice(remaining, size)) for _, size in nodes]
    for node, own in enumerate(by_node):
        for local_rank, order in enumerate(own):
            order.environment |= {
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(own)),
                "NODE_RANK": str(node),
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": str(len(nodes)),
                "MASTER_ADDR": nodes[0][0],
                "MASTER_PORT": str(port),
            }
    return by_node


def address_of(cluster: RayCluster) -> str:
    """Return the address to which the driver connects.

    "auto" means the cluster of the notebook's ``ray.init()``, or else RAY_ADDRESS.
    """
    if cluster.address != "auto":
        return cluster.address
    ray: Any = sys.modules.get("ray")
    if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized():
        with suppress(Exception):  # A notebook that uses Ray's client does not have this address.
            return str(ray.get_runtime_context().gcs_address)
    return os.environ.get("RAY_ADDRESS") or "auto"


# ---- messages between a kernel and its driver process on a Ray cluster


@dataclass(slots=True)
class PlaceOrder(Event):
    """A request to reserve resources for ranks and place them.

    Attributes:
        ranks: The number of ranks to place.
        payload: The pickled ``RayCluster``, including the address.
    """

    ranks: int
    payload: bytes


@dataclass(slots=True)
class ConnectedEvent(Event):
    """The driver has connected to the cluster.

    Attributes:
        address: The address by which the nodes can reach the kernel's machine, or "" if they cannot.
    """

    address: str


@dataclass(slots=True)
class ClusterNoteEvent(Event):
    """A message for the user while the launch waits."""

    text: str


@dataclass(slots=True)
class ReservedEvent(Event):
    """The resources have been reserved, and the actors are starting."""


@dataclass(slots=True)
class RefusedEvent(Event):
    """The launch is not possible, for the reason in ``text``."""

    text: str


@dataclass(slots=True)
class PlacedEvent(Event):
    """Every rank has been assigned to a node, and every node has an actor.

    Attributes:
        nodes: The address of each node and the number of ranks there, in order.
    """

    nodes: list[tuple[str, int]]


@dataclass(slots=True)
class ServeOrder(Event):
    """A request to make the actors connect to the kernel as hosts.

    Attributes:
        address: The address on which the kernel listens.
        port: The port on which the kernel listens.
        payload: The run's secret.
    """

    address: str
    port: int
    payload: bytes


@dataclass(slots=True)
class ActorEndedEvent(Event):
    """A node's actor has exited. ``text`` is the reason, or "" if the actor's ranks have finished."""

    node: int
    text: str


@dataclass(slots=True)
class ReleaseOrder(Event):
    """A request to release all resources and exit."""
