"""Run ranks on this machine for a kernel elsewhere, and relay messages between the ranks and the kernel."""

from __future__ import annotations

import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.errors import ChannelClosedError, RunStoppedError
from notebook_accelerate.launch.hosts.remote.host_protocol import (
    CHANNEL,
    SAMPLES,
    CapturedStacksEvent,
    CaptureStacksOrder,
    ClockEvent,
    DumpOrder,
    EndedEvent,
    FramesEvent,
    JournalEvent,
    LeaveEvent,
    RankEvent,
    RelayEvent,
    RunOverEvent,
    SignalOrder,
    StartedEvent,
)
from notebook_accelerate.launch.hosts.remote.stream import CHUNK, RateLimiter
from notebook_accelerate.launch.processes.event_loop import DispatchSelector, HasFileno, dispatch
from notebook_accelerate.launch.processes.orphan_guard import orphan_guard
from notebook_accelerate.telemetry import Event, Stamped, encode
from notebook_accelerate.telemetry.sampler import ResourceSampler

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.remote.stream import Stream
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend, RankProcess
    from notebook_accelerate.launch.state.rank_result import Exit
    from notebook_accelerate.telemetry.store import Record
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


POLL_SECONDS = 0.1
"""Seconds between polls of the ranks, on systems that cannot report when a process exits."""
RELAY_SECONDS = 0.1
"""Seconds between two relays of steady output, because the kernel sends a front end at most ten messages a second."""
GUARD_SECONDS = 1.0
"""Seconds between two checks that the orphan guard is running."""


class Host:
    """Serves one kernel, by running ranks and relaying messages.

    Args:
        stream: The stream to the kernel, which `close` closes.

    Attributes:
        lost: Why the stream ended even though the kernel has not left, or "" otherwise.
        refused: Why the kernel has refused this host, or "" if it has not.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ranks: dict[int, RankProcess] = {}
        self._left = False
        self.lost = self.refused = ""
        self._guard_due = 0.0
        self._pace, self._relayed = RateLimiter(RELAY_SECONDS, burst=50), 0
        self._pieces: list[tuple[int, str, bytes]] = []  # Hold the data that has been read from ranks but not sent yet.
        self._messages: deque[Event] = deque()
        # Send to ranks on a separate thread, because one that does not read, such as a suspended one, must block
        # neither the other ranks nor the signals sent to it.
        self._to_ranks = ThreadPoolExecutor(1, "notebook-accelerate-host")
        self._selector = DispatchSelector()
        stream.register(self._selector, self._receive)

    def watch(self, source: HasFileno, call: Callable[[], object]) -> None:
        """Call ``call`` on the host's thread whenever ``source`` is readable."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def next_message(self) -> Event | None:
        """Wait for the kernel's next message that is not for a rank. Return None if the kernel left or was lost."""
        while not self._messages and not self._left:
            dispatch(self._selector, None)
        return self._messages.popleft() if self._messages else None

    def run_ranks(self, backend: ProcessBackend, orders: Sequence[WorkerOrder]) -> None:
        """Start ranks and relay messages until all ranks have finished. Kill them if the kernel leaves or is lost.

        Args:
            backend: Starts the ranks on this machine.
            orders: One order for each rank.

        Raises:
            LaunchError: A rank could not be started. The kernel has already been notified.
        """
        self._start(backend, orders)
        sampler = ResourceSampler({rank: process.pid for rank, process in self._ranks.items()}, self.sampled)
        sampler.start()
        try:
            self._relay()
        finally:
            self._kill()
            sampler.stop()

    def disconnect(self, reason: str = "", *, stopped: bool = False) -> None:
        """Leave, and send the reason to the kernel. The ranks of this host are killed."""
        self._relay_pieces()
        self.send(LeaveEvent(reason, stopped))
        self._left = True

    def close(self) -> None:
        """Stop serving, and close the stream to the kernel."""
        self._left = True
        self._stream.close()
        self._to_ranks.shutdown()
        self._selector.close()

    def _start(self, backend: ProcessBackend, orders: Sequence[WorkerOrder]) -> None:
        try:
            backend.start_ranks(orders, self.started)
        except BaseException as error:
            self.send(LeaveEvent(f"{type(error).__name__}: {error}", isinstance(error, RunStoppedError)))
            self._kill()
            raise
        finally:
            backend.close()

    def _relay(self) -> None:
        while self._ranks and not self._left:
            polled = [rank for rank, process in self._ranks.items() if process.needs_polling]
            waits = [POLL_SECONDS if polled else GUARD_SECONDS]
            if (due := self.seconds_until_due()) is not None:
                waits.append(due)
            dispatch(self._selector, min(waits))
            self._relay_pieces()
            self._pace.after(self._relayed)
            self._relayed = 0
            for rank in polled:
                self.on_end(rank)
            if time.monotonic() >= self._guard_due:
                self._guard_due = time.monotonic() + GUARD_SECONDS
                orphan_guard.ensure()
            self.handle_urgent()

    def seconds_until_due(self) -> float | None:
        """Return the seconds until `handle_urgent` must be called, or None if it can wait until something arrives."""
        return None

    def handle_urgent(self) -> None:
        """Handle messages that cannot wait until the ranks have ended. This is called repeatedly while they run."""
        while self._messages and _is_urgent(self._messages[0]):
            self.handle_message(self._messages.popleft())

    def handle_message(self, message: Event) -> None:
        """Handle a message about the whole run, on the host's thread."""

    def _kill(self) -> None:
        for process in list(self._ranks.values()):
            process.send_signal(signal.SIGKILL, group=True)
            process.await_end(5.0)
            process.drain(self, channel=True)  # Relay the last output too.
            self.release(process)
        self._relay_pieces()

    # ---- messages from the ranks (RankListener)

    def started(self, process: RankProcess) -> None:
        """Report that a rank has started, and start listening to the rank."""
        self._ranks[process.rank] = process
        self.send(StartedEvent(process.rank, process.pid))
        process.connect(self._selector, self)

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        self._add_piece(rank, stream, data)

    def on_frames(self, rank: int, data: bytes) -> None:
        """Relay a rank's frames, after any output that the rank wrote earlier."""
        if process := self._ranks.get(rank):
            process.drain(self, channel=False)
        self._add_piece(rank, CHANNEL, data)

    def on_host_frames(self, rank: int, data: bytes) -> None:
        self._add_piece(rank, SAMPLES, data)

    def _add_piece(self, rank: int, source: str, data: bytes) -> None:
        self._pieces.append((rank, source, data))
        self._relayed += len(data)
        if self._relayed > CHUNK:
            self._relay_pieces()

    def _relay_pieces(self) -> None:
        """Send everything that was read from the ranks. Call this before sending a message that must come later."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self.send(_relayed(pieces))

    def on_end(self, rank: int) -> None:
        process = self._ranks.get(rank)
        end = None if process is None else process.poll()
        if process is None or end is None:
            return
        process.drain(self, channel=True)
        self.release(process)
        self._relay_pieces()
        self.report_end(rank, end)

    def report_end(self, rank: int, end: Exit) -> None:
        """Report how a rank ended, after all of the rank's output has been sent."""
        self.send(EndedEvent(rank, end.code, end.signal, end.max_rss))

    def release(self, process: RankProcess) -> None:
        """Close a rank whose process has exited and whose output has been read."""
        process.disconnect(self._selector)
        process.close()
        self._ranks.pop(process.rank, None)

    def sampled(self, records: list[Record]) -> None:
        """Send samples of the ranks' resource use. The sampler calls this on its own thread."""
        frames = [(rank, SAMPLES, encode([Stamped(stamp, event)])) for rank, stamp, event in records]
        if frames:
            self.send(_relayed(frames))

    def send(self, event: Event) -> None:
        """Send an event to the kernel, unless the kernel or this host has left. Safe to call from any thread."""
        if not self._left:
            with suppress(ChannelClosedError):  # The error will be noticed when the stream is read.
                self._stream.send(event)

    # ---- messages from the kernel

    def _receive(self) -> None:
        try:
            for _, event in self._stream.receive(0.0):
                self._handle(event)
        except ChannelClosedError as error:
            if not self._left:
                self.lost = str(error)
            self._left = True

    def _handle(self, event: Event) -> None:
        if isinstance(event, LeaveEvent):
            self.refused, self._left = event.reason, True
        elif isinstance(event, ClockEvent):
            self.send(event)
        elif not isinstance(event, RankEvent):
            self._messages.append(event)
        elif (process := self._ranks.get(event.rank)) is not None:
            self._carry_out(event, process)

    def _carry_out(self, order: RankEvent, rank: RankProcess) -> None:
        if isinstance(order, SignalOrder):
            rank.send_signal(order.number, group=order.group)
        elif isinstance(order, FramesEvent):
            self._to_ranks.submit(rank.send_frames, order.payload)
        elif isinstance(order, DumpOrder):
            rank.open_dump(order.path)
        elif isinstance(order, CaptureStacksOrder):
            capture = partial(self._capture_stacks, order.number, rank)
            threading.Thread(target=capture, name="notebook-accelerate-stacks", daemon=True).start()

    def _capture_stacks(self, number: int, rank: RankProcess) -> None:
        stacks = rank.capture_stacks()
        self.send(CapturedStacksEvent(number, stacks.dump, list(stacks.native), stacks.suspended))


def _relayed(pieces: Sequence[tuple[int, str, bytes]]) -> RelayEvent:
    lengths = [(rank, source, len(data)) for rank, source, data in pieces]
    return RelayEvent(lengths, b"".join([data for _, _, data in pieces]))


def _is_urgent(message: Event) -> bool:
    """Return whether a message cannot wait until the ranks have ended."""
    return isinstance(message, JournalEvent) or (isinstance(message, RunOverEvent) and message.held)
