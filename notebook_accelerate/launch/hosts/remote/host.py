"""A host: runs ranks on its machine for a kernel elsewhere, and relays between the ranks and that kernel."""

from __future__ import annotations

import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.errors import ChannelClosedError, RunStoppedError
from notebook_accelerate.launch.hosts.remote.host_protocol import (
    CapturedStacksEvent,
    CaptureStacksOrder,
    ClockEvent,
    DumpOrder,
    EndedEvent,
    FramesEvent,
    HostFramesEvent,
    JournalEvent,
    LeaveEvent,
    OutputEvent,
    RunOverEvent,
    SignalOrder,
    StartedEvent,
)
from notebook_accelerate.launch.processes.orphan_guard import orphan_guard
from notebook_accelerate.launch.processes.selecting import DispatchSelector, HasFileno, dispatch
from notebook_accelerate.launch.processes.zygote import guards_orphans
from notebook_accelerate.telemetry import Channel, Event, Stamped, encode
from notebook_accelerate.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend, RankProcess
    from notebook_accelerate.telemetry.store import Record
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

POLL_SECONDS = 0.1
"""Seconds between polls of the ranks, on systems that cannot notify of the end of a process."""
GUARD_SECONDS = 1.0
"""Seconds between two looks whether the orphan guard runs."""


class Host:
    """Serves one kernel; a thread receives the kernel's messages from construction on.

    Args:
        channel: The stream to the kernel; `close` closes it.

    Attributes:
        lost: Why the stream has ended without the kernel's leave; "" while it has not.
        refused: Why the kernel has refused this host; "" if it has not.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ranks: dict[int, RankProcess] = {}
        self._left = threading.Event()
        self.lost = self.refused = ""
        self._guard_due = 0.0
        self._messages: deque[Event] = deque()
        self._wake, self._waker = socket.socketpair()
        self._selector = DispatchSelector()
        self.watch(self._wake, lambda: self._wake.recv(4096))
        # A separate thread receives orders: the main thread may be blocked until the kernel reads what it sends.
        self._listener = threading.Thread(target=self._listen, name="notebook-accelerate-host", daemon=True)
        self._listener.start()

    def watch(self, source: HasFileno, call: Callable[[], object]) -> None:
        """Call ``call`` on the thread that uses the host whenever ``source`` is readable."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def next_message(self) -> Event | None:
        """Wait for the kernel's next message that is not for a rank; None when the kernel has left or is lost."""
        while not self._messages:
            if self._left.is_set():
                return self._messages.popleft() if self._messages else None
            dispatch(self._selector, None)
        return self._messages.popleft()

    def run_ranks(self, backend: ProcessBackend, orders: Sequence[WorkerOrder]) -> None:
        """Start ranks and relay until all have ended; kill them when the kernel leaves or is lost.

        Args:
            backend: Starts the ranks.
            orders: One order for each rank.

        Raises:
            LaunchError: A rank could not be started; the error has been sent to the kernel.
        """
        self._start(backend, orders)
        sampler = Sampler({rank: process.pid for rank, process in self._ranks.items()}, self.sampled)
        sampler.start()
        try:
            self._relay()
        finally:
            self._kill()
            sampler.stop()

    def leave(self, reason: str = "", *, stopped: bool = False) -> None:
        """Let the kernel know why this host leaves; safe from any thread. The ranks are killed."""
        self.send(LeaveEvent(reason, stopped))
        self._leave()

    def close(self) -> None:
        """Stop serving, and close the stream to the kernel."""
        self._left.set()
        self._channel.shut()
        self._listener.join()
        self._channel.close()
        self._selector.close()
        self._wake.close()
        self._waker.close()

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
        while self._ranks and not self._left.is_set():
            polled = [rank for rank, process in self._ranks.items() if process.needs_polling]
            waits = [POLL_SECONDS if polled else GUARD_SECONDS]
            if (due := self.seconds_until_due()) is not None:
                waits.append(due)
            dispatch(self._selector, min(waits))
            for rank in polled:
                self.take_end(rank)
            if time.monotonic() >= self._guard_due:
                self._guard_due = time.monotonic() + GUARD_SECONDS
                orphan_guard.ensure(needed=not guards_orphans())
            self.take_step()

    def seconds_until_due(self) -> float | None:
        """Return the seconds until `take_step` must be called; None: when something arrives."""
        return None

    def take_step(self) -> None:
        """Handle messages that cannot wait for the end of the ranks; called repeatedly while they run."""
        while self._messages and _is_urgent(self._messages[0]):
            self.handle_message(self._messages.popleft())

    def handle_message(self, message: Event) -> None:
        """Handle a message about the whole run, on the thread that uses the host."""

    def _kill(self) -> None:
        for process in list(self._ranks.values()):
            process.send_signal(signal.SIGKILL, group=True)
            process.await_end(5.0)
            process.drain(self, channel=True)  # the last output: nothing is lost
            self.release(process)

    # ---- from the ranks: RankListener

    def started(self, process: RankProcess) -> None:
        """Report that a rank has started, and listen to it."""
        self._ranks[process.rank] = process
        self.send(StartedEvent(process.rank, process.pid, process.local_rank))
        process.connect(self._selector, self)

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        """See ``RankListener.take_output``."""
        self.send(OutputEvent(rank, stream, data))

    def take_frames(self, rank: int, data: bytes) -> None:
        """See ``RankListener.take_frames``; output that the rank wrote before the frames is sent first."""
        if process := self._ranks.get(rank):
            process.drain(self, channel=False)
        self.send(FramesEvent(rank, data))

    def take_host_frames(self, rank: int, data: bytes) -> None:
        """See ``RankListener.take_host_frames``."""
        self.send(HostFramesEvent(rank, data))

    def take_end(self, rank: int) -> None:
        """See ``RankListener.take_end``."""
        process = self._ranks.get(rank)
        end = None if process is None else process.poll()
        if process is None or end is None:
            return
        process.drain(self, channel=True)
        self.release(process)
        self.send(EndedEvent(rank, end.code, end.signal, end.max_rss))

    def release(self, process: RankProcess) -> None:
        """Close a rank that has ended, and whose output was read."""
        process.disconnect(self._selector)
        process.close()
        self._ranks.pop(process.rank, None)

    def sampled(self, records: list[Record]) -> None:
        """Send samples of the ranks' resource use."""
        for record in records:
            self.take_host_frames(record.rank, encode([Stamped(record.time, record.event)]))

    def send(self, event: Event) -> None:
        """Send an event to the kernel, unless it or this host has left. Safe from any thread."""
        if self._left.is_set():
            return
        try:
            self._channel.send(event)
        except ChannelClosedError:
            self._leave()

    # ---- from the kernel

    def _listen(self) -> None:
        try:
            while not self._left.is_set():
                for _, event in self._channel.receive():
                    self._handle(event)
        except ChannelClosedError as error:
            if not self._left.is_set():
                self.lost = str(error)
            self._leave()

    def _leave(self) -> None:
        """Record that the kernel has left or is lost."""
        self._left.set()
        self._wake_up()

    def _wake_up(self) -> None:
        try:
            self._waker.send(b"!", socket.MSG_DONTWAIT)
        except OSError:  # it wakes up already, or is closed
            return

    def _handle(self, event: Event) -> None:
        if isinstance(event, LeaveEvent):
            self.refused = event.reason
            self._leave()
        elif isinstance(event, ClockEvent):
            self.send(event)
        elif not isinstance(event, (SignalOrder, FramesEvent, DumpOrder, CaptureStacksOrder)):
            self._messages.append(event)
            self._wake_up()
        elif (process := self._ranks.get(event.rank)) is not None:
            self._carry_out(event, process)

    def _carry_out(self, order: SignalOrder | FramesEvent | DumpOrder | CaptureStacksOrder, rank: RankProcess) -> None:
        if isinstance(order, SignalOrder):
            rank.send_signal(order.number, group=order.group)
        elif isinstance(order, FramesEvent):
            rank.send_frames(order.payload)
        elif isinstance(order, DumpOrder):
            rank.open_dump(order.path)
        else:
            capture = partial(self._capture_stacks, order.number, rank)
            threading.Thread(target=capture, name="notebook-accelerate-stacks", daemon=True).start()

    def _capture_stacks(self, number: int, rank: RankProcess) -> None:
        stacks = rank.capture_stacks()
        self.send(CapturedStacksEvent(number, stacks.dump, list(stacks.native), stacks.suspended))


def _is_urgent(message: Event) -> bool:
    """Whether a message cannot wait for the end of the ranks."""
    return isinstance(message, JournalEvent) or (isinstance(message, RunOverEvent) and message.held)


__all__ = ["Host"]
