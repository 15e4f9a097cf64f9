"""The kernel's end of the stream to one host, and the ranks of that host."""

from __future__ import annotations

import itertools
import selectors
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from notebook_accelerate.debugging.native_stacks import SECONDS as NATIVE_SECONDS
from notebook_accelerate.debugging.process_inspection import DUMP_SECONDS, ProcessStacks
from notebook_accelerate.errors import ChannelClosedError, LaunchError, RunStoppedError
from notebook_accelerate.launch.hosts.host_cells import ForeignCells
from notebook_accelerate.launch.hosts.remote.host_protocol import (
    CapturedStacksEvent,
    CaptureStacksOrder,
    CellsEvent,
    ClockEvent,
    DumpOrder,
    EndedEvent,
    FramesEvent,
    HostFramesEvent,
    LeaveEvent,
    OutputEvent,
    SignalOrder,
    StartedEvent,
    StopRequest,
)
from notebook_accelerate.launch.processes.rank_process import RankListener, RankProcess
from notebook_accelerate.launch.state.rank_exit import Exit
from notebook_accelerate.telemetry import Channel, Event, Stamped, encode, steady_time

CLOCK_ROUNDS = 5
CLOCK_SECONDS = 2.0
CLOSE_SECONDS = 5.0
"""Seconds that the last messages to a host have to leave."""
SLICE_SECONDS = 0.2
"""Seconds between two looks whether the run is to be stopped."""


_START_REPLIES = (StartedEvent, LeaveEvent, StopRequest)


class HostLostError(LaunchError):
    """A host was lost before it had started its ranks."""


class Outbox:
    """Sends to one host on a thread: a host that reads nothing holds up nobody else.

    Args:
        channel: The stream to the host.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: SimpleQueue[Iterable[bytes] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_queued, name="notebook-accelerate-outbox", daemon=True)
        self._thread.start()

    def send(self, *events: Event) -> None:
        """Send events; a lost host is noticed when its stream is read. Safe from any thread."""
        now = steady_time.now()
        self._queue.put((encode([Stamped(now, event) for event in events]),))

    def send_each(self, events: Iterable[Event]) -> None:
        """Send events that are made one by one, on the thread, as the host reads them."""
        self._queue.put(encode([Stamped(steady_time.now(), event)]) for event in events)

    def close(self) -> None:
        """Wait until everything was sent, or can no longer be, and end the thread."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._channel.shut()
            self._thread.join()

    def _send_queued(self) -> None:
        while (parts := self._queue.get()) is not None:
            with suppress(ChannelClosedError):
                for data in parts:
                    self._channel.send_bytes(data)


class HostConnection:
    """The connection to one host and its ranks.

    Args:
        channel: The stream to the host.
        node: Index of its machine in the run.
        host: Name of its machine.

    Attributes:
        clock_offset: Seconds to add to the host's time to get this machine's; 0 where the difference is within the
            delay.
        lost: Why the host takes part no more; "" while it does.
        ranks: Its ranks that have not been closed.
        cells: The cells of the host's notebook; None where it has none.
        on_message: Called with the host's messages about the whole run, on the thread of the selector.
    """

    def __init__(self, channel: Channel, node: int, host: str) -> None:
        self.channel, self.node, self.host = channel, node, host
        self.clock_offset = 0.0
        self.lost = ""
        self.ranks: dict[int, RemoteRank] = {}
        self.cells: ForeignCells | None = None
        self.on_message: Callable[[Event], None] = lambda _: None
        self._outbox = Outbox(channel)
        self._captured: dict[int, CapturedStacksEvent] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._selector: selectors.BaseSelector | None = None
        self._early: list[Stamped] = []

    @property
    def name(self) -> str:
        """Name of the machine in messages."""
        return node_name(self.node, self.host)

    def measure_clock(self) -> None:
        """Request the host's time and store the difference.

        The fastest of a few replies has the smallest error, half its round trip (as in NTP, RFC 5905).
        """
        best = (CLOCK_SECONDS, 0.0)
        for number in range(CLOCK_ROUNDS):
            sent = steady_time.now()
            self.send(ClockEvent(number))
            answer = self._await(partial(_is_reply, number), CLOCK_SECONDS)
            if answer is not None:
                took = steady_time.now() - sent
                best = min(best, (took, sent + took / 2 - answer.time))
        self.clock_offset = best[1] if abs(best[1]) > best[0] else 0.0

    def await_started(self, timeout: float, stopping: Callable[[], bool] = lambda: False) -> RemoteRank:
        """Wait until the host has started its next rank, and return that rank.

        Raises:
            HostLostError: The host is lost.
            LaunchError: The host reports a failure, or sends nothing for ``timeout`` seconds.
            RunStoppedError: The run is ``stopping``, or its user has stopped it on the host.
        """
        try:
            found = self._await(lambda event: isinstance(event, _START_REPLIES), timeout, stopping)
        except ChannelClosedError as error:
            raise HostLostError(f"{self.name} was lost while its ranks started: {error}") from None
        if found is None:
            raise LaunchError(f"{self.name} did not start its ranks within {timeout:g} s")
        if isinstance(found.event, StopRequest) or (isinstance(found.event, LeaveEvent) and found.event.stopped):
            raise RunStoppedError(f"{self.name}: it was stopped while its ranks were started")
        if isinstance(found.event, LeaveEvent):
            raise LaunchError(f"{self.name} could not start its ranks: {found.event.reason or 'it has left'}")
        assert isinstance(found.event, StartedEvent)
        return RemoteRank(self, found.event.rank, found.event.pid, found.event.local_rank)

    def _await(
        self, wanted: Callable[[Event], bool], timeout: float, stopping: Callable[[], bool] = lambda: False
    ) -> Stamped | None:
        """Return the next event that is ``wanted``, None when none arrives in time; other events are kept for later."""
        deadline = time.monotonic() + timeout
        while True:
            for index, stamped in enumerate(self._early):
                if wanted(stamped.event):
                    return self._early.pop(index)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if stopping():
                raise RunStoppedError("the run was stopped while its ranks were started")
            self._early += self.channel.receive(min(left, SLICE_SECONDS))

    def send(self, *events: Event) -> None:
        """Send events to the host; a lost host is noticed when its stream is read. Safe from any thread."""
        self._outbox.send(*events)

    def send_each(self, events: Iterable[Event]) -> None:
        """Send events that are too large to be kept until the host reads them; see ``Outbox.send_each``."""
        self._outbox.send_each(events)

    # ---- on the thread of the selector

    def connect(self, selector: selectors.BaseSelector, listener: RankListener, rank: int = -1) -> None:
        """Register the stream, once for all its ranks, and pass on the events of ``rank`` that have arrived already."""
        if self._selector is None:
            self._selector = selector
            selector.register(self.channel, selectors.EVENT_READ, partial(self._read, listener))
            with suppress(ChannelClosedError):  # reading it reports that
                self._early += self.channel.receive(0.0)  # what arrived with the first message
        early, self._early = self._early, []
        for stamped in early:
            if getattr(stamped.event, "rank", rank) == rank:
                self.handle(stamped.event, listener)
            else:
                self._early.append(stamped)

    def _read(self, listener: RankListener) -> bool:
        try:
            messages = self.channel.receive_available()
        except ChannelClosedError as error:
            self.mark_lost(f"{self.name} was lost: {error}", listener)
            return False
        for _, event in messages:
            self.handle(event, listener)
        return True

    def handle(self, event: Event, listener: RankListener) -> None:
        """Handle one event of the host."""
        if isinstance(event, LeaveEvent):
            self.mark_lost(f"{self.name} has left: {event.reason}" if event.reason else "", listener)
        elif isinstance(event, CapturedStacksEvent):
            with self._changed:
                self._captured[event.number] = event
                self._changed.notify_all()
        elif isinstance(event, CellsEvent):
            if self.cells is not None:
                self.cells.add(event.cells)
        elif isinstance(event, (OutputEvent, FramesEvent, HostFramesEvent, EndedEvent)):
            if event.rank in self.ranks:
                self._handle_rank(event, listener)
        else:
            self.on_message(event)

    def _handle_rank(
        self, event: OutputEvent | FramesEvent | HostFramesEvent | EndedEvent, listener: RankListener
    ) -> None:
        if isinstance(event, OutputEvent):
            listener.take_output(event.rank, event.stream, event.payload)
        elif isinstance(event, FramesEvent):
            listener.take_frames(event.rank, event.payload)
        elif isinstance(event, HostFramesEvent):
            listener.take_host_frames(event.rank, event.payload)
        else:
            self.ranks[event.rank].ended = Exit(event.code, event.signal, event.max_rss)
            listener.take_end(event.rank)

    def mark_lost(self, reason: str, listener: RankListener) -> None:
        """Record that the host is lost, and its ranks with it."""
        self.disconnect()
        with self._changed:
            self.lost = reason or f"{self.name} has left"
            self._changed.notify_all()
        for rank, process in list(self.ranks.items()):
            if process.ended is None:
                process.ended = Exit(lost=self.lost)
                listener.take_end(rank)

    def disconnect(self) -> None:
        """Unregister the stream from the selector."""
        if self._selector is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self.channel)
        self._selector = None

    def drain(self, listener: RankListener) -> None:
        """Handle the events that have arrived."""
        while not self.lost and self.channel.readable() and self._read(listener):
            pass

    def remove(self, rank: int) -> None:
        """Forget a rank that has ended."""
        self.ranks.pop(rank, None)

    def close(self, reason: str = "") -> None:
        """Close the connection, for a ``reason`` if the host is refused; it then kills the ranks it still runs."""
        self.send(LeaveEvent(reason))
        self.disconnect()
        self._outbox.close()
        self.channel.close()
        if self.cells is not None:
            self.cells.clear()

    # ---- any thread

    def capture_stacks(self, rank: int) -> ProcessStacks:
        """Have the host capture the stacks of a rank."""
        number = next(self._numbers)
        self.send(CaptureStacksOrder(rank, number))
        deadline = time.monotonic() + DUMP_SECONDS + NATIVE_SECONDS + 1.0
        with self._changed:
            while number not in self._captured and not self.lost and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            answer = self._captured.pop(number, None)
        if answer is None:
            return ProcessStacks()
        dump = answer.dump if self.cells is None else self.cells.in_text(answer.dump)
        return ProcessStacks(dump, tuple(answer.native), answer.suspended and f"{answer.suspended} on {self.host}")


class TransientConnection(HostConnection):
    """A connection for one attempt: it closes with the last of its ranks."""

    def remove(self, rank: int) -> None:
        """See ``HostConnection.remove``."""
        super().remove(rank)
        if not self.ranks:
            self.close()


def node_name(node: int, host: str) -> str:
    """Return the name of a node in messages."""
    return f"node {node} ({host})" if host else f"node {node}"


def _is_reply(number: int, event: Event) -> bool:
    return isinstance(event, ClockEvent) and event.number == number


class _RankChannel:
    """The channel to one rank, through its host."""

    def __init__(self, connection: HostConnection, rank: int) -> None:
        self._connection, self._rank = connection, rank

    def send(self, *events: Event) -> None:
        if self._connection.lost:
            raise ChannelClosedError(self._connection.lost)
        now = steady_time.now()
        self._connection.send(FramesEvent(self._rank, encode([Stamped(now, event) for event in events])))


class RemoteRank(RankProcess):
    """A rank on a remote host.

    Args:
        connection: The connection to its host.
        rank: Global index.
        pid: Its process on that host.
        local_rank: Index on its machine.
    """

    def __init__(self, connection: HostConnection, rank: int, pid: int, local_rank: int) -> None:
        super().__init__(rank, pid, local_rank=local_rank, node=connection.node, host=connection.host)
        self._connection = connection
        self.channel = _RankChannel(connection, rank)
        self.ended: Exit | None = None
        connection.ranks[rank] = self

    def poll(self) -> Exit | None:
        """See ``RankProcess.poll``."""
        return self.ended

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """See ``RankProcess.send_signal``."""
        self._connection.send(SignalOrder(self.rank, number, group))

    def connect(self, selector: selectors.BaseSelector, listener: RankListener) -> None:
        """See ``RankProcess.connect``."""
        self._connection.connect(selector, listener, self.rank)

    def drain(self, listener: RankListener, *, channel: bool) -> None:
        """Do nothing: output and frames arrive in order on the same stream."""

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Do nothing: all ranks of the host share the connection."""

    def in_local_time(self, messages: list[Stamped]) -> list[Stamped]:
        """See ``RankProcess.in_local_time``; cells of the host's notebook are named as in this one."""
        offset, cells = self._connection.clock_offset, self._connection.cells
        if cells is not None:
            messages = [Stamped(stamp, cells.with_named_cells(event)) for stamp, event in messages]
        if not offset:
            return messages
        for _, event in messages:
            event.shift(offset)
        return [Stamped(stamp + offset, event) for stamp, event in messages]

    def await_end(self, timeout: float) -> None:
        """Do not wait: the host kills and reaps its ranks when the connection closes."""

    def open_dump(self, path: str) -> None:
        """See ``RankProcess.open_dump``."""
        self._connection.send(DumpOrder(self.rank, path))

    def send_frames(self, data: bytes) -> None:
        """See ``RankProcess.send_frames``."""
        self._connection.send(FramesEvent(self.rank, data))

    def capture_stacks(self) -> ProcessStacks:
        """See ``RankProcess.capture_stacks``."""
        return self._connection.capture_stacks(self.rank)

    def close(self) -> None:
        """See ``RankProcess.close``; the host ends processes that the rank left running."""
        self._connection.remove(self.rank)
