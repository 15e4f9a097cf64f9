"""In the first notebook: the ranks of the other notebooks, each reached through a connection to its notebook."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.debug.process_inspection import ProcessStacks
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection, RemoteRank
from notebook_accelerate.launch.hosts.remote.host_protocol import StartedEvent
from notebook_accelerate.launch.hosts.remote.listener import HostListener
from notebook_accelerate.launch.hosts.rendezvous.peer_cells import CellsEvent, ForeignCells
from notebook_accelerate.launch.hosts.rendezvous.rank_mirror import LADDER
from notebook_accelerate.launch.hosts.rendezvous.rendezvous_protocol import NewsEvent
from notebook_accelerate.launch.processes.rank_process import ProcessBackend, RankListener, RankProcess
from notebook_accelerate.telemetry import Channel, Event, Stamped

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.rendezvous.membership import Node
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

VISIT_SECONDS = 20.0
"""Seconds that the other notebooks have to connect."""
START_SECONDS = 120.0


class PeerRank(RemoteRank):
    """A rank of another notebook; that notebook stops it and asks its own user."""

    asks_here = False

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """See ``RankProcess.send_signal``; in a common stop each notebook signals its own ranks."""
        link = self._link
        assert isinstance(link, PeerConnection)
        if number not in LADDER or not link.stopping():
            super().send_signal(number, group=group)

    def dated(self, messages: list[Stamped]) -> list[Stamped]:
        """See ``RankProcess.dated``; cells are named as in this notebook."""
        assert isinstance(self._link, PeerConnection)
        cells = self._link.cells
        return [Stamped(stamp, cells.named(event)) for stamp, event in super().dated(messages)]


class PeerConnection(HostConnection):
    """The connection to another notebook.

    Attributes:
        stopping: Whether this notebook's group is being stopped.
        cells: The other notebook's cells.
        react: Called with the news of the other notebook.
    """

    stopping: Callable[[], bool] = staticmethod(lambda: False)
    react: Callable[[NewsEvent], None] = staticmethod(lambda _: None)

    def __init__(self, channel: Channel, node: int, host: str) -> None:
        super().__init__(channel, node, host)
        self.cells = ForeignCells(f" of node {node}")

    def new_rank(self, event: StartedEvent) -> RemoteRank:
        """See ``HostConnection.new_rank``."""
        return PeerRank(self, event.rank, event.pid, event.local_rank)

    def take(self, event: Event, hearing: RankListener) -> None:
        """See ``HostConnection.take``."""
        if isinstance(event, NewsEvent):
            self.react(NewsEvent(event.kind, self.node, f"{self.name}: {event.text}"))
        elif isinstance(event, CellsEvent):
            self.cells.learn(event.cells)
        else:
            super().take(event, hearing)

    def look(self, rank: int) -> ProcessStacks:
        """See ``HostConnection.look``."""
        seen = super().look(rank)
        return ProcessStacks(self.cells.in_text(seen.dump), seen.native)

    def disconnect(self) -> None:
        """See ``HostConnection.disconnect``."""
        super().disconnect()
        self.cells.forget()


class Together(ProcessBackend):
    """Starts this notebook's ranks and waits for those of the others.

    Args:
        own: Starts this notebook's ranks.
        node: Index of this notebook.
        links: Connections to the others, with the number of ranks that each starts.
    """

    def __init__(self, own: ProcessBackend, node: int, links: Sequence[tuple[PeerConnection, int]] = ()) -> None:
        super().__init__(own.function, own.arguments)
        self._own, self._node, self._links = own, node, links

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """See ``ProcessBackend.start_ranks``."""

        def begun(process: RankProcess) -> None:
            process.node = self._node
            started(process)

        self._own.start_ranks(orders, begun)
        for link, count in self._links:
            for _ in range(count):
                started(link.await_started(START_SECONDS))

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        return self._own.start_rank(order)

    def close(self) -> None:
        """See ``ProcessBackend.close``."""
        self._own.close()


def receive(door: HostListener, nodes: Sequence[Node], stopping: Callable[[], bool]) -> dict[int, PeerConnection]:
    """Wait until the other notebooks connect; return the connection to each that did, by its index.

    Args:
        door: The listener they connect to.
        nodes: All nodes, in order; this is the first.
        stopping: Returns whether to stop waiting.
    """
    links: dict[int, PeerConnection] = {}
    deadline = time.monotonic() + VISIT_SECONDS
    gone: set[int] = set()
    while len(links) + len(gone) < len(nodes) - 1 and time.monotonic() < deadline and not stopping():
        visitor = door.next_visitor(0.05)
        if visitor is None:
            continue
        index = visitor.hello.node
        if (
            not 0 < index < len(nodes)
            or index in {*links, *gone}
            or visitor.hello.facts.get("name") != nodes[index].name
        ):
            visitor.channel.close()
            continue
        link = PeerConnection(visitor.channel, index, nodes[index].host)
        try:
            link.measure_clock()
            links[index] = link
        except ChannelClosedError:  # it has already left
            gone.add(index)
    return links


__all__ = ["PeerConnection", "PeerRank", "Together", "receive"]
