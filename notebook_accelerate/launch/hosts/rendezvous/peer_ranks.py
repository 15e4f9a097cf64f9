"""In the first notebook: the ranks of the other notebooks, each reached through a connection to its notebook."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.debug.process_inspection import ProcessStacks
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection, RemoteRank
from notebook_accelerate.launch.hosts.remote.host_protocol import StartedEvent
from notebook_accelerate.launch.hosts.remote.listener import HostListener
from notebook_accelerate.launch.hosts.rendezvous.peer_cells import CellsEvent, ForeignCells
from notebook_accelerate.launch.hosts.rendezvous.rendezvous_protocol import NewsEvent
from notebook_accelerate.launch.processes.rank_process import ProcessBackend, RankListener, RankProcess
from notebook_accelerate.telemetry import Channel, Event, Stamped

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.hosts.rendezvous.membership import Node
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

CONNECT_SECONDS = 20.0
"""Seconds that the other notebooks have to connect."""
START_SECONDS = 120.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that every notebook sends to its own ranks in a stop."""


class PeerRank(RemoteRank):
    """A rank of another notebook; that notebook stops it and asks its own user."""

    prompts_here = False

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """See ``RankProcess.send_signal``; in a common stop each notebook signals its own ranks."""
        connection = self._connection
        assert isinstance(connection, PeerConnection)
        if number not in STOP_SIGNALS or not connection.stopping():
            super().send_signal(number, group=group)

    def in_local_time(self, messages: list[Stamped]) -> list[Stamped]:
        """See ``RankProcess.in_local_time``; cells are named as in this notebook."""
        assert isinstance(self._connection, PeerConnection)
        cells = self._connection.cells
        return [Stamped(stamp, cells.with_named_cells(event)) for stamp, event in super().in_local_time(messages)]


class PeerConnection(HostConnection):
    """The connection to another notebook.

    Attributes:
        stopping: Whether this notebook's group is being stopped.
        cells: The other notebook's cells.
        react: Called with the news of the other notebook.
    """

    stopping: Callable[[], bool] = staticmethod(lambda: False)
    handle_news: Callable[[NewsEvent], None] = staticmethod(lambda _: None)

    def __init__(self, channel: Channel, node: int, host: str) -> None:
        super().__init__(channel, node, host)
        self.cells = ForeignCells(f" of node {node}")

    def new_rank(self, event: StartedEvent) -> RemoteRank:
        """See ``HostConnection.new_rank``."""
        return PeerRank(self, event.rank, event.pid, event.local_rank)

    def handle(self, event: Event, listener: RankListener) -> None:
        """See ``HostConnection.handle``."""
        if isinstance(event, NewsEvent):
            self.handle_news(NewsEvent(event.kind, self.node, f"{self.name}: {event.text}"))
        elif isinstance(event, CellsEvent):
            self.cells.add(event.cells)
        else:
            super().handle(event, listener)

    def capture_stacks(self, rank: int) -> ProcessStacks:
        """See ``HostConnection.capture_stacks``."""
        stacks = super().capture_stacks(rank)
        return ProcessStacks(self.cells.in_text(stacks.dump), stacks.native)

    def disconnect(self) -> None:
        """See ``HostConnection.disconnect``."""
        super().disconnect()
        self.cells.clear()


class GroupBackend(ProcessBackend):
    """Starts this notebook's ranks and waits for those of the others.

    Args:
        own: Starts this notebook's ranks.
        node: Index of this notebook.
        connections: Connections to the others, with the number of ranks that each starts.
    """

    def __init__(self, own: ProcessBackend, node: int, connections: Sequence[tuple[PeerConnection, int]]) -> None:
        super().__init__(own.function, own.arguments)
        self._own, self._node, self._connections = own, node, connections

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        """See ``ProcessBackend.configure``."""
        self._own.configure(config, note, stopping)

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """See ``ProcessBackend.start_ranks``."""

        def started_here(process: RankProcess) -> None:
            process.node = self._node
            started(process)

        self._own.start_ranks(orders, started_here)
        for connection, count in self._connections:
            for _ in range(count):
                started(connection.await_started(START_SECONDS))

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        return self._own.start_rank(order)

    def close(self) -> None:
        """See ``ProcessBackend.close``."""
        super().close()
        self._own.close()


def accept_notebooks(
    listener: HostListener, nodes: Sequence[Node], stopping: Callable[[], bool]
) -> dict[int, PeerConnection]:
    """Wait until the other notebooks connect; return the connection to each that did, by its index.

    Args:
        listener: The listener they connect to.
        nodes: All nodes, in order; this is the first.
        stopping: Returns whether to stop waiting.
    """
    connections: dict[int, PeerConnection] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    departed: set[int] = set()
    while len(connections) + len(departed) < len(nodes) - 1 and time.monotonic() < deadline and not stopping():
        incoming = listener.next_host(0.05)
        if incoming is None:
            continue
        index = incoming.hello.node
        if (
            not 0 < index < len(nodes)
            or index in {*connections, *departed}
            or incoming.hello.facts.get("name") != nodes[index].name
        ):
            incoming.channel.close()
            continue
        connection = PeerConnection(incoming.channel, index, nodes[index].host)
        try:
            connection.measure_clock()
            connections[index] = connection
        except ChannelClosedError:  # it has already left
            departed.add(index)
    return connections
