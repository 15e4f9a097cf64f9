"""The kernel's end of the stream to one host, and the ranks of that host."""

from __future__ import annotations

import itertools
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from notebook_accelerate.debug.native_stacks import SECONDS as NATIVE_SECONDS
from notebook_accelerate.debug.process_inspection import DUMP_SECONDS, ProcessStacks
from notebook_accelerate.errors import ChannelClosedError, LaunchError
from notebook_accelerate.launch.hosts.remote.host_protocol import (
    AsideEvent,
    ClockEvent,
    DumpOrder,
    EndedEvent,
    FarewellEvent,
    FramesEvent,
    LookAnswer,
    LookOrder,
    OutputEvent,
    SignalOrder,
    StartedEvent,
)
from notebook_accelerate.launch.processes.rank_process import RankListener, RankProcess
from notebook_accelerate.launch.state.rank_exit import Exit
from notebook_accelerate.telemetry import Channel, Event, Stamped, encode

CLOCK_ROUNDS = 5
CLOCK_SECONDS = 2.0


class HostConnection:
    """The connection to one host and its ranks.

    Args:
        channel: The stream to the host.
        node: Index of its machine in the run.
        host: Name of its machine.
    """

    def __init__(self, channel: Channel, node: int, host: str) -> None:
        self.channel, self.node, self.host = channel, node, host
        self.clock_offset = 0.0
        """Seconds to add to the host's time to get this machine's; 0 where the difference is within the delay."""
        self.lost = ""
        self.ranks: dict[int, RemoteRank] = {}
        self._looks: dict[int, LookAnswer] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._selector: selectors.BaseSelector | None = None
        self._early: list[Stamped] = []

    @property
    def name(self) -> str:
        """Name of the machine in messages."""
        return f"node {self.node} ({self.host})"

    def measure_clock(self) -> None:
        """Request the host's time and store the difference.

        The fastest of a few replies has the smallest error, half its round trip (as in NTP, RFC 5905).
        """
        best = (CLOCK_SECONDS, 0.0)
        for number in range(CLOCK_ROUNDS):
            asked = time.time()
            self.channel.send(ClockEvent(number))
            answer = self._await(partial(_answers, number), CLOCK_SECONDS)
            if answer is not None:
                took = time.time() - asked
                best = min(best, (took, asked + took / 2 - answer.time))
        self.clock_offset = best[1] if abs(best[1]) > best[0] else 0.0

    def await_started(self, timeout: float) -> RemoteRank:
        """Wait until the host has started its next rank, and return that rank.

        Raises:
            LaunchError: The host reports a failure, is lost, or sends nothing for ``timeout`` seconds.
        """
        try:
            found = self._await(lambda event: isinstance(event, (StartedEvent, FarewellEvent)), timeout)
        except ChannelClosedError as error:
            raise LaunchError(f"{self.name} was lost while its ranks started: {error}") from None
        if found is None:
            raise LaunchError(f"{self.name} did not start its ranks within {timeout:g} s")
        if isinstance(found.event, FarewellEvent):
            raise LaunchError(f"{self.name} could not start its ranks: {found.event.reason or 'it has left'}")
        assert isinstance(found.event, StartedEvent)
        return self.new_rank(found.event)

    def new_rank(self, event: StartedEvent) -> RemoteRank:
        """Return the rank that ``event`` reports as started."""
        return RemoteRank(self, event.rank, event.pid, event.local_rank)

    def _await(self, wanted: Callable[[Event], bool], timeout: float) -> Stamped | None:
        """Return the next event that is ``wanted``, None when none arrives in time; other events are kept for later."""
        deadline = time.monotonic() + timeout
        while True:
            for place, stamped in enumerate(self._early):
                if wanted(stamped.event):
                    return self._early.pop(place)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._early += self.channel.receive(left)

    def send(self, event: Event) -> None:
        """Send an event to the host; a lost host is noticed when its stream is read."""
        with suppress(ChannelClosedError):
            self.channel.send(event)

    # ---- on the thread of the selector

    def connect(self, selector: selectors.BaseSelector, hearing: RankListener, rank: int) -> None:
        """Register the stream, once for all its ranks, and pass on the events of ``rank`` that have arrived already."""
        if self._selector is None:
            self._selector = selector
            selector.register(self.channel, selectors.EVENT_READ, partial(self._read, hearing))
        early, self._early = self._early, []
        for stamped in early:
            if getattr(stamped.event, "rank", rank) == rank:
                self.take(stamped.event, hearing)
            else:
                self._early.append(stamped)

    def _read(self, hearing: RankListener) -> bool:
        try:
            messages = self.channel.receive_available()
        except ChannelClosedError as error:
            self.lose(f"{self.name} was lost: {error}", hearing)
            return False
        for _, event in messages:
            self.take(event, hearing)
        return True

    def take(self, event: Event, hearing: RankListener) -> None:
        """Handle one event of the host."""
        if isinstance(event, FarewellEvent):
            self.lose(f"{self.name} has left: {event.reason}" if event.reason else "", hearing)
        elif isinstance(event, LookAnswer):
            with self._changed:
                self._looks[event.number] = event
                self._changed.notify_all()
        elif isinstance(event, OutputEvent) and event.rank in self.ranks:
            hearing.take_output(event.rank, event.stream, event.payload)
        elif isinstance(event, FramesEvent) and event.rank in self.ranks:
            hearing.take_frames(event.rank, event.payload)
        elif isinstance(event, AsideEvent) and event.rank in self.ranks:
            hearing.take_aside(event.rank, event.payload)
        elif isinstance(event, EndedEvent) and event.rank in self.ranks:
            self.ranks[event.rank].ended = Exit(event.code, event.signal, event.max_rss)
            hearing.take_end(event.rank)

    def lose(self, reason: str, hearing: RankListener) -> None:
        """Record that the host is lost, and its ranks with it."""
        self.disconnect()
        with self._changed:
            self.lost = reason or f"{self.name} has left"
            self._changed.notify_all()
        for rank, process in list(self.ranks.items()):
            if process.ended is None:
                process.ended = Exit(lost=self.lost)
                hearing.take_end(rank)

    def disconnect(self) -> None:
        """Unregister the stream from the selector."""
        if self._selector is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self.channel)
        self._selector = None

    def drain(self, hearing: RankListener) -> None:
        """Handle the events that have arrived."""
        while not self.lost and self.channel.readable() and self._read(hearing):
            pass

    def forget(self, rank: int) -> None:
        """Remove a rank; the connection closes with the last one."""
        self.ranks.pop(rank, None)
        if not self.ranks:
            self.close()

    def close(self) -> None:
        """Close the connection; the host then kills the ranks it still runs."""
        self.send(FarewellEvent())
        self.disconnect()
        self.channel.close()

    # ---- any thread

    def look(self, rank: int) -> ProcessStacks:
        """Have the host capture the stacks of a rank."""
        number = next(self._numbers)
        self.send(LookOrder(rank, number))
        deadline = time.monotonic() + DUMP_SECONDS + NATIVE_SECONDS + 1.0
        with self._changed:
            while number not in self._looks and not self.lost and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            answer = self._looks.pop(number, None)
        return ProcessStacks(answer.dump, tuple(answer.native)) if answer is not None else ProcessStacks()


def _answers(number: int, event: Event) -> bool:
    return isinstance(event, ClockEvent) and event.number == number


class _Way:
    """The channel to one rank, through its host."""

    def __init__(self, link: HostConnection, rank: int) -> None:
        self._link, self._rank = link, rank

    def send(self, *events: Event) -> None:
        now = time.time()
        self._link.channel.send(FramesEvent(self._rank, encode([Stamped(now, event) for event in events])))


class RemoteRank(RankProcess):
    """A rank on a remote host.

    Args:
        link: The connection to its host.
        rank: Global index.
        pid: Its process on that host.
        local_rank: Index on its machine.
    """

    def __init__(self, link: HostConnection, rank: int, pid: int, local_rank: int) -> None:
        super().__init__(rank, pid, local_rank=local_rank, node=link.node, host=link.host)
        self._link = link
        self.channel = _Way(link, rank)
        self.ended: Exit | None = None
        link.ranks[rank] = self

    def poll(self) -> Exit | None:
        """See ``RankProcess.poll``."""
        return self.ended

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """See ``RankProcess.send_signal``."""
        self._link.send(SignalOrder(self.rank, number, group))

    def connect(self, selector: selectors.BaseSelector, hearing: RankListener) -> None:
        """See ``RankProcess.connect``."""
        self._link.connect(selector, hearing, self.rank)

    def drain(self, hearing: RankListener, *, channel: bool) -> None:
        """Do nothing: output and frames arrive in order on the same stream."""

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Do nothing: all ranks of the host share the connection, and it closes with the last one."""

    def dated(self, messages: list[Stamped]) -> list[Stamped]:
        """See ``RankProcess.dated``."""
        offset = self._link.clock_offset
        if not offset:
            return messages
        for _, event in messages:
            event.shift(offset)
        return [Stamped(stamp + offset, event) for stamp, event in messages]

    def await_end(self, timeout: float) -> None:
        """Do not wait: the host kills and reaps its ranks when the connection closes."""

    def open_dump(self, path: str) -> None:
        """See ``RankProcess.open_dump``."""
        self._link.send(DumpOrder(self.rank, path))

    def pass_on(self, data: bytes) -> None:
        """See ``RankProcess.pass_on``."""
        self._link.send(FramesEvent(self.rank, data))

    def look(self) -> ProcessStacks:
        """See ``RankProcess.look``."""
        return self._link.look(self.rank)

    def close(self) -> None:
        """See ``RankProcess.close``; the host ends processes that the rank left running."""
        self._link.forget(self.rank)


__all__ = ["HostConnection", "RemoteRank"]
