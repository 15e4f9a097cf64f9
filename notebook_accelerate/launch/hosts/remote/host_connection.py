"""The kernel's end of the stream to one host, and the ranks of that host."""

from __future__ import annotations

import itertools
import selectors
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from notebook_accelerate.debugging.process_stacks import DUMP_SECONDS, PY_SPY_SECONDS, ProcessStacks
from notebook_accelerate.errors import ChannelClosedError, LaunchError, RunStoppedError
from notebook_accelerate.launch.hosts.host_facts import ForeignCells
from notebook_accelerate.launch.hosts.remote import host_protocol as protocol
from notebook_accelerate.launch.processes.rank_process import RankListener, RankProcess
from notebook_accelerate.launch.state.rank_result import Exit
from notebook_accelerate.telemetry import Event, Stamped, encode, steady_time

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.remote.listener import IncomingHost
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


CLOCK_ROUNDS = 5
CLOCK_SECONDS = 2.0
SLICE_SECONDS = 0.2
"""Seconds between two checks of whether the user has stopped the run."""


_START_REPLIES = (protocol.StartedEvent, protocol.LeaveEvent, protocol.StopRequest)


class HostConnection:
    """The connection to one host and its ranks.

    Args:
        incoming: The host that has connected.

    Attributes:
        node: Index of the host's machine in the run.
        hello: The host's first message.
        clock_offset: Seconds to add to the host's time to get this machine's time, or 0 if the difference is smaller
            than the delay of messages.
        lost: Why the host no longer takes part, or "" while it does.
        ranks: The host's ranks that have not been closed.
        cells: The cells of the host's notebook, or None if the host is not a notebook.
        on_last_end: A function to call when the last of the host's ranks has been closed.
        on_message: A function to call, on the selector's thread, with each message about the whole run.
    """

    def __init__(self, incoming: IncomingHost) -> None:
        self._stream, self.hello, self.node = incoming.stream, incoming.hello, incoming.hello.node
        self.clock_offset = 0.0
        self.lost = ""
        self.ranks: dict[int, RemoteRank] = {}
        with_cells = self.hello.kind == protocol.NOTEBOOK
        self.cells = ForeignCells(lambda: f" of node {self.node}") if with_cells else None
        self.on_last_end: Callable[[], None] = lambda: None
        self.on_message: Callable[[Event], None] = lambda _: None
        self._captured: dict[int, SimpleQueue[protocol.CapturedStacksEvent | None]] = {}
        self._numbers = itertools.count(1)
        self._early = incoming.early

    @property
    def name(self) -> str:
        """The name of the host's node in messages."""
        return protocol.node_name(self.node, self.hello.host)

    def measure_clock(self) -> None:
        """Request the host's time, and store its difference from this machine's.

        Of several replies, the fastest one has the smallest error, half of its round-trip time (as in NTP, RFC 5905).
        """
        best = (CLOCK_SECONDS, 0.0)
        for number in range(CLOCK_ROUNDS):
            sent = steady_time.now()
            self.send(protocol.ClockEvent(number))
            answer = self._await(partial(_is_reply, number), CLOCK_SECONDS)
            if answer is not None:
                took = steady_time.now() - sent
                best = min(best, (took, sent + took / 2 - answer.time))
        self.clock_offset = best[1] if abs(best[1]) > best[0] else 0.0

    def await_started(self, order: WorkerOrder, timeout: float, stopping: Callable[[], bool] = bool) -> RemoteRank:
        """Wait until the host has started its next rank, and return it. If the host is lost, return an ended rank.

        Args:
            order: The rank's order.
            timeout: Maximum seconds to wait for the host.
            stopping: A function that returns whether the user has stopped the run.

        Raises:
            LaunchError: The host reports a failure, or sends nothing for ``timeout`` seconds.
            RunStoppedError: The run has been stopped, here or by the host's user.
        """
        local_rank = int(order.environment.get("LOCAL_RANK", 0))
        try:
            found = self._await(lambda event: isinstance(event, _START_REPLIES), timeout, stopping)
        except ChannelClosedError:  # The loss of the host will be noticed when the rank is connected.
            return RemoteRank(self, order.rank, 0, local_rank)
        if found is None:
            raise LaunchError(f"{self.name} did not start its ranks within {timeout:g} s")
        if isinstance(found.event, protocol.StartedEvent):
            return RemoteRank(self, found.event.rank, found.event.pid, local_rank)
        if not isinstance(found.event, protocol.LeaveEvent) or found.event.stopped:
            raise RunStoppedError(f"{self.name}: it was stopped while its ranks were starting")
        raise LaunchError(f"{self.name} could not start its ranks: {found.event.reason or 'it has left'}")

    def _await(
        self, wanted: Callable[[Event], bool], timeout: float, stopping: Callable[[], bool] = lambda: False
    ) -> Stamped | None:
        """Return the next event for which ``wanted`` returns True, or None if none arrives in time.

        Other events are kept for later.
        """
        deadline = time.monotonic() + timeout
        while True:
            for index, stamped in enumerate(self._early):
                if wanted(stamped.event):
                    return self._early.pop(index)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if stopping():
                raise RunStoppedError("the run was stopped while its ranks were starting")
            self._early += self._stream.receive(min(left, SLICE_SECONDS))

    def send(self, *events: Event) -> None:
        """Send events to the host. If the host is lost, do nothing. Safe to call from any thread."""
        now = steady_time.now()
        self._stream.queue((encode([Stamped(now, event) for event in events]),))

    def send_each(self, events: Iterable[Event]) -> None:
        """Send large events one by one. Each is created only when the host is ready to receive it."""
        self._stream.queue(encode([Stamped(steady_time.now(), event)]) for event in events)

    # ---- on the selector's thread

    def connect(self, selector: selectors.BaseSelector) -> None:
        """Register the stream, once for all of the host's ranks, and handle what has already arrived."""
        # Wait until the last rank is connected, so that no rank misses a message.
        if any(rank.listener is None for rank in self.ranks.values()):
            return
        early, self._early = self._early, []
        for _, event in early:
            self.handle(event)
        if self._stream.on_ready is None and not self.lost:
            self._stream.register(selector, self._read)

    def _read(self) -> None:
        try:
            for _, event in self._stream.receive(0.0):
                self.handle(event)
        except ChannelClosedError as error:
            self.mark_lost(f"{self.name} was lost: {error}")

    def handle(self, event: Event) -> None:
        """Handle an event from the host, which concerns either the whole run or one of the host's ranks."""
        if isinstance(event, protocol.RelayEvent):
            self._pass_on(event)
        elif isinstance(event, protocol.LeaveEvent):
            self.mark_lost(f"{self.name} has left: {event.reason}" if event.reason else "")
        elif isinstance(event, protocol.CapturedStacksEvent):
            if (waiting := self._captured.get(event.number)) is not None:
                waiting.put(event)
        elif isinstance(event, protocol.CellsEvent):
            if self.cells is not None:
                self.cells.add(event.cells)
        elif not isinstance(event, protocol.RankEvent):
            self.on_message(event)
        elif isinstance(event, protocol.EndedEvent) and event.rank in self.ranks:
            self.ranks[event.rank].end(Exit(event.code, event.signal, event.max_rss))

    def _pass_on(self, event: protocol.RelayEvent) -> None:
        begin = 0
        for number, source, length in event.pieces:
            data = event.payload[begin : begin + length]
            begin += length
            if (rank := self.ranks.get(number)) is not None:
                rank.dispatch(source, data)

    def mark_lost(self, reason: str) -> None:
        """Record that the host has been lost, together with its ranks."""
        self.disconnect()
        self.lost = reason or f"{self.name} has left"
        for waiting in list(self._captured.values()):
            waiting.put(None)
        for rank in list(self.ranks.values()):
            if rank.ended is None:
                rank.end(Exit(lost=self.lost))

    def disconnect(self) -> None:
        """Stop handling what arrives until `connect` is called again."""
        self._stream.on_ready = None

    def remove(self, rank: int) -> None:
        """Remove an ended rank from the ranks of this connection."""
        self.ranks.pop(rank, None)
        if not self.ranks:
            self.on_last_end()

    def close(self, reason: str = "") -> None:
        """Close the connection, after which the host kills its ranks. To refuse the host, pass a ``reason``."""
        self.send(protocol.LeaveEvent(reason))
        self.disconnect()
        self._stream.close()
        if self.cells is not None:
            self.cells.clear()

    # ---- any thread

    def capture_stacks(self, rank: int) -> ProcessStacks:
        """Make the host capture the stacks of a rank, and return them. They are empty if there is no reply in time."""
        number, replies = next(self._numbers), SimpleQueue[protocol.CapturedStacksEvent | None]()
        self._captured[number] = replies  # Use a queue, so that an interrupt of the caller leaves no lock held.
        self.send(protocol.CaptureStacksOrder(rank, number))
        answer = None
        with suppress(Empty):
            answer = None if self.lost else replies.get(timeout=DUMP_SECONDS + PY_SPY_SECONDS + 1.0)
        self._captured.pop(number, None)
        if answer is None:
            return ProcessStacks()
        dump = answer.dump if self.cells is None else self.cells.in_text(answer.dump)
        suspended = answer.suspended and f"{answer.suspended} on {self.hello.host}"
        return ProcessStacks(dump, tuple(answer.native), suspended)


def _is_reply(number: int, event: Event) -> bool:
    return isinstance(event, protocol.ClockEvent) and event.number == number


class RemoteRank(RankProcess):
    """A rank on a remote host.

    Args:
        connection: The connection to the rank's host.
        rank: The rank's global index.
        pid: The id of the rank's process on that host.
        local_rank: The rank's index on its machine.
    """

    def __init__(self, connection: HostConnection, rank: int, pid: int, local_rank: int) -> None:
        super().__init__(rank, pid, local_rank=local_rank, node=connection.node, host=connection.hello.host)
        self._connection = connection
        self.channel = self
        self.listener: RankListener | None = None
        self.ended: Exit | None = None
        connection.ranks[rank] = self

    def dispatch(self, source: str, data: bytes) -> None:
        """Pass on a piece of the rank's frames or output to the listener; see ``RelayEvent``."""
        assert self.listener is not None, "pieces are handled only once a listener is connected"
        if source == protocol.CHANNEL:
            self.listener.on_frames(self.rank, data)
        elif source == protocol.SAMPLES:
            self.listener.on_host_frames(self.rank, data)
        else:
            self.listener.on_output(self.rank, source, data)

    def end(self, ended: Exit) -> None:
        """Record how the rank ended."""
        self.ended = ended
        if self.listener is not None:
            self.listener.on_end(self.rank)

    def send(self, *events: Event) -> None:
        if self._connection.lost:
            raise ChannelClosedError(self._connection.lost)
        now = steady_time.now()
        self.send_frames(encode([Stamped(now, event) for event in events]))

    def poll(self) -> Exit | None:
        return self.ended

    def send_signal(self, number: int, *, group: bool = False) -> None:
        self._connection.send(protocol.SignalOrder(self.rank, number, group))

    def connect(self, selector: selectors.BaseSelector, listener: RankListener) -> None:
        self.listener = listener
        self._connection.connect(selector)

    def drain(self, listener: RankListener, *, channel: bool) -> None:
        """Do nothing, because output and frames arrive over the same stream, and so in the right order."""

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Do nothing, because all ranks of the host share the connection."""

    def in_local_time(self, messages: list[Stamped]) -> list[Stamped]:
        """Convert the times of messages to this machine's clock, and name the cells of the host's notebook."""
        offset, cells = self._connection.clock_offset, self._connection.cells
        if cells is not None:
            messages = [Stamped(stamp, cells.with_named_cells(event)) for stamp, event in messages]
        if not offset:
            return messages
        for _, event in messages:
            event.shift(offset)
        return [Stamped(stamp + offset, event) for stamp, event in messages]

    def await_end(self, timeout: float) -> None:
        """Do nothing, because the host kills and reaps its ranks when the connection closes."""

    def open_dump(self, path: str) -> None:
        self._connection.send(protocol.DumpOrder(self.rank, path))

    def send_frames(self, data: bytes) -> None:
        self._connection.send(protocol.FramesEvent(self.rank, data))

    def capture_stacks(self) -> ProcessStacks:
        return self._connection.capture_stacks(self.rank)

    def close(self) -> None:
        """Remove the rank from the connection. The host kills the processes that the rank has left running."""
        self._connection.remove(self.rank)
