"""Ranks on a Ray cluster: one actor per rank, which starts the rank as a separate process on its machine.

This is the kernel's part. It starts a driver process (see ``ray_driver``), listens until every actor's host has
connected, and passes the ranks behind those connections to the supervisor. The kernel itself never imports Ray;
``ray_driver`` gives the reason.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.errors import ChannelClosedError, LaunchError, RunStoppedError
from notebook_accelerate.launch.hosts.ray import ray_protocol as say
from notebook_accelerate.launch.hosts.ray.ray_driver import versions
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection, RemoteRank
from notebook_accelerate.launch.hosts.remote.listener import HostListener
from notebook_accelerate.launch.hosts.remote.stream import new_secret
from notebook_accelerate.launch.processes.pickled_start import PickledBackend, log_tail, start_interpreter
from notebook_accelerate.launch.processes.rank_process import Ends, RankListener, RankProcess
from notebook_accelerate.telemetry import Channel, Event

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

LOOK_SECONDS = 0.2
REASON_SECONDS = 45.0
"""Seconds that a broken connection waits for Ray's reason: longer than the driver's own limit."""
LEAVE_SECONDS, GIVE_UP_SECONDS = 10.0, 3.0
CARRIED = ("ACCELERATE_", "NOTEBOOK_ACCELERATE_")
"""Prefixes of the kernel's environment variables that remote ranks receive too."""
NOT_CARRIED = ("NOTEBOOK_ACCELERATE_SECRET", "NOTEBOOK_ACCELERATE_ON")


class DriverProcess:
    """The kernel's driver process.

    Args:
        payload: Descriptor of the file with the function and its arguments.
    """

    def __init__(self, payload: int) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        Ends.kernel_side.add(ours.fileno())
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - kept as long as the process
        call = (
            "from notebook_accelerate.launch.hosts.ray.ray_driver import main; "
            f"main({theirs.fileno()}, {payload}, {os.getpid()})"
        )
        self._process = start_interpreter(call, [theirs.fileno(), payload], self._log.fileno())
        theirs.close()
        self._come: deque[Event] = deque()
        self._open: set[int] = set()

    def next(self, kind: type[Event], seconds: float, what: str, waiting: Callable[[Event], None]) -> Any:
        """Wait for the driver's next event of a kind.

        Args:
            kind: The type of the event.
            seconds: Maximum seconds to wait.
            what: The awaited operation, for the error message.
            waiting: Called with other events, and with an empty note when none arrived for a moment; may raise.

        Raises:
            LaunchError: The driver refuses, has ended, or took too long.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self._come:
                self._come += self._heard(LOOK_SECONDS, what)
            event = self._come.popleft() if self._come else say.NoteEvent("")
            if isinstance(event, kind):
                return event
            if isinstance(event, say.RefusedEvent):
                raise LaunchError(event.text)
            if isinstance(event, say.ActorEndedEvent):
                raise LaunchError(f"rank {event.rank} could not be started on Ray: {event.reason}")
            waiting(event)
        raise LaunchError(f"{what} took longer than {seconds:g} s (RayCluster(start_timeout=...)){self.last_words()}")

    def _heard(self, seconds: float, what: str) -> list[Event]:
        try:
            return [event for _, event in self.channel.receive(seconds)]
        except ChannelClosedError:
            raise LaunchError(f"{what} failed: the driver process ended{self.last_words()}") from None

    def look(self) -> None:
        """Handle the events that the driver has sent.

        Raises:
            LaunchError: The driver or an actor has ended.
        """
        self._come += self._heard(0.0, "starting the ranks")
        for event in self._come:
            if isinstance(event, say.RefusedEvent):
                raise LaunchError(event.text)
            if isinstance(event, say.ActorEndedEvent) and event.reason:
                raise LaunchError(f"rank {event.rank} could not be started on Ray: {event.reason}")

    def why(self, rank: int) -> str:
        """Return why a rank's actor has ended; "" when Ray does not report it in time."""
        deadline = time.monotonic() + REASON_SECONDS
        while not (found := self._told_of(rank)) and (left := deadline - time.monotonic()) > 0:
            try:
                self._come += self._heard(left, "the run on Ray")
            except LaunchError as error:
                return str(error)
        return found[0].reason if found else ""

    def _told_of(self, rank: int) -> list[say.ActorEndedEvent]:
        return [event for event in self._come if isinstance(event, say.ActorEndedEvent) and event.rank == rank]

    def opened(self, rank: int) -> None:
        """Record that a connection to a rank's actor is in use."""
        self._open.add(rank)

    def closed(self, rank: int) -> None:
        """Record that a rank's connection is closed; the driver ends with the last one."""
        self._open.discard(rank)
        if not self._open:
            self.end()

    def end(self, seconds: float = LEAVE_SECONDS) -> None:
        """Have the driver release its resources and end; kill it when that takes longer than ``seconds``.

        The end of the driver also releases them, as soon as the cluster notices it.
        """
        if self._process.returncode is not None:
            return
        with suppress(ChannelClosedError):
            self.channel.send(say.LeaveOrder())
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        Ends.kernel_side.discard(self.channel.fileno())
        self.channel.close()
        self._log.close()

    def last_words(self) -> str:
        """Return the end of what the driver printed, for an error message."""
        return log_tail(self._log)


class RayHostConnection(HostConnection):
    """The connection to one actor; when it breaks, Ray is asked for the reason.

    Args:
        channel: The stream to the actor.
        node: Index of its machine.
        host: Name of its machine.
        rank: The actor's rank.
        driver: Returns Ray's reason.
    """

    def __init__(self, channel: Channel, node: int, host: str, rank: int, driver: DriverProcess) -> None:
        super().__init__(channel, node, host)
        self._rank, self._driver = rank, driver
        driver.opened(rank)

    def measure_clock(self) -> None:
        """See ``HostConnection.measure_clock``.

        Raises:
            LaunchError: The actor has ended since it connected.
        """
        try:
            super().measure_clock()
        except ChannelClosedError as error:
            raise LaunchError(f"{self.name} was lost before its rank started: {self._why() or error}") from None

    def _why(self) -> str:
        return self._driver.why(self._rank)

    def await_started(self, timeout: float) -> RemoteRank:
        """See ``HostConnection.await_started``."""
        try:
            return super().await_started(timeout)
        except LaunchError as error:
            why = self._why()
            raise LaunchError(f"{error}; {why}" if why else str(error)) from None

    def lose(self, reason: str, hearing: RankListener) -> None:
        """See ``HostConnection.lose``."""
        if reason and (why := self._why()):
            reason = f"{self.name} was lost: {why}"
        super().lose(reason, hearing)

    def forget(self, rank: int) -> None:
        """See ``HostConnection.forget``."""
        super().forget(rank)
        self._driver.closed(self._rank)


class RayBackend(PickledBackend):
    """Starts the ranks on the cluster that the launch names."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError("on='ray' needs Ray, which is not installed; pip install 'notebook-accelerate[ray]'")
        super().__init__(function, arguments)
        self._cluster = RayCluster()
        self._cpu = False
        self._note: Callable[[str], None] = print
        self._stopping: Callable[[], bool] = bool

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        """See ``ProcessBackend.configure``."""
        self._cluster = config.cluster or RayCluster()
        self._cpu, self._note, self._stopping = config.cpu, note, stopping

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """Not supported: a cluster places all ranks at once."""
        raise NotImplementedError

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """See ``ProcessBackend.start_ranks``."""
        driver = DriverProcess(self._payload)
        links: list[RayHostConnection] = []
        try:
            here, placed = self._place(driver, len(orders))
            secret = new_secret()
            with _opened(here, secret, self._note) as door:
                payload = pickle.dumps((secret, [self._ready(order, placed) for order in orders]))
                driver.channel.send(say.ServeOrder(door.address, door.port, payload))
                links = self._links(door, driver, len(orders))
            for link in links:
                started(link.await_started(self._cluster.start_timeout))
        except BaseException:
            for link in links:
                link.channel.close()
            driver.end(GIVE_UP_SECONDS)
            raise

    def _place(self, driver: DriverProcess, ranks: int) -> tuple[str, say.PlacedEvent]:
        """Have the driver place the ranks; return this machine's address as seen by the nodes, and the placement."""
        cluster = self._cluster
        wait = cluster.wait if cluster.when_full == "wait" else 0.0
        driver.channel.send(
            say.PlaceOrder(
                address_of(cluster),
                ranks,
                cluster.cpus,
                0 if self._cpu and cluster.gpus is None else cluster.gpus,
                dict(cluster.resources or {}),
                cluster.strategy,
                dict(cluster.runtime_env or {}),
                wait,
                versions(),
            )
        )
        limit = cluster.start_timeout
        reached = driver.next(say.ReachedEvent, limit, f"reaching {cluster.description}", self._hear)
        driver.next(say.TakenEvent, wait + limit, "reserving resources", self._hear)
        return reached.here, driver.next(say.PlacedEvent, limit, "starting Ray's actors", self._hear)

    def _hear(self, event: Event) -> None:
        """Show the driver's notes to the user, and check whether the run is to be stopped."""
        if isinstance(event, say.NoteEvent) and event.text:
            self._note(event.text)
        if self._stopping():
            raise RunStoppedError("the run was stopped while it waited for the Ray cluster")

    def _ready(self, order: WorkerOrder, placed: say.PlacedEvent) -> bytes:
        """Return a rank's order, completed for its placement and pickled."""
        place = placed.places[order.rank]
        carried = {
            name: value for name, value in os.environ.items() if name.startswith(CARRIED) and name not in NOT_CARRIED
        }
        given = {
            "LOCAL_RANK": str(place["local_rank"]),
            "LOCAL_WORLD_SIZE": str(place["local_size"]),
            "NODE_RANK": str(place["node"]),
            "GROUP_RANK": str(place["node"]),
            "MASTER_ADDR": placed.places[0]["address"],
            "MASTER_PORT": str(placed.port),
        }
        order.environment = {**carried, **place["environment"], **order.environment, **given}
        order = self.complete(order)
        order.base_environment = None  # use the node's environment
        if "working_dir" in (self._cluster.runtime_env or {}):
            order.cwd = None
        return pickle.dumps(order)

    def _links(self, door: HostListener, driver: DriverProcess, ranks: int) -> list[RayHostConnection]:
        """Wait until every actor's host has connected."""
        found: dict[int, RayHostConnection] = {}
        deadline = time.monotonic() + self._cluster.start_timeout
        while len(found) < ranks:
            self._hear(say.NoteEvent(""))
            driver.look()
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(ranks) if rank not in found)
                raise LaunchError(
                    f"the actors of ranks {missing} did not call back at {door.address}:{door.port} within "
                    f"{self._cluster.start_timeout:g} s; if a firewall keeps the nodes from reaching this machine, "
                    "pass on='ray://host:10001'"
                )
            visitor = door.next_visitor(LOOK_SECONDS)
            if visitor is not None:
                rank = int(visitor.hello.facts["rank"])
                found[rank] = RayHostConnection(visitor.channel, visitor.hello.node, visitor.hello.host, rank, driver)
        links = [found[rank] for rank in range(ranks)]
        clocks: dict[int, float] = {}
        for link in links:  # one measurement per machine, whatever its number of actors
            if link.node not in clocks:
                link.measure_clock()
            link.clock_offset = clocks.setdefault(link.node, link.clock_offset)
        return links


class _opened:  # noqa: N801 - a context manager, used as a function
    """A listener that is open inside a with block."""

    def __init__(self, address: str, secret: bytes, report: Callable[[str], None]) -> None:
        self._door = HostListener(address or "127.0.0.1", secret, report=report)

    def __enter__(self) -> HostListener:
        return self._door

    def __exit__(self, *_: object) -> None:
        self._door.close()


def address_of(cluster: RayCluster) -> str:
    """Return the address for the driver; for "auto" that of the notebook's ``ray.init()``, or RAY_ADDRESS."""
    if cluster.address != "auto":
        return cluster.address
    ray: Any = sys.modules.get("ray")
    if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized():
        with suppress(Exception):  # Ray's client has no such address
            return str(ray.get_runtime_context().gcs_address)
    return os.environ.get("RAY_ADDRESS") or "auto"


__all__ = ["RayBackend", "address_of"]
