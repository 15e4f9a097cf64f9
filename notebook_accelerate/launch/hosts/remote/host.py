"""A host: runs ranks on its machine for a kernel elsewhere, and relays between the ranks and that kernel."""

from __future__ import annotations

import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.errors import ChannelClosedError, RunStoppedError
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
"""Seconds between polls of the ranks, on systems that cannot notify of the end of a process."""
RELAY_SECONDS = 0.1
"""Seconds between two relays of a steady flow: the kernel sends a front end no more than ten messages a second."""
GUARD_SECONDS = 1.0
"""Seconds between two looks whether the orphan guard runs."""


class Host:
    """Serves one kernel.

    Args:
        stream: The stream to the kernel; `close` closes it.

    Attributes:
        lost: Why the stream has ended without the kernel's leave; "" while it has not.
        refused: Why the kernel has refused this host; "" if it has not.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ranks: dict[int, RankProcess] = {}
        self._left = False
        self.lost = self.refused = ""
        self._guard_due = 0.0
        self._pace, self._relayed = RateLimiter(RELAY_SECONDS, burst=50), 0
        self._pieces: list[tuple[int, str, bytes]] = []  # read from the ranks, and not yet sent
        self._messages: deque[Event] = deque()
        # A rank that reads nothing, as a suspended one, must not hold up the others, nor the signal that ends it.
        self._to_ranks = ThreadPoolExecutor(1, "notebook-accelerate-host")
        self._selector = DispatchSelector()
        stream.watch(self._selector, self._receive)

    def watch(self, source: HasFileno, call: Callable[[], object]) -> None:
        """Call ``call`` on the thread that uses the host whenever ``source`` is readable."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def next_message(self) -> Event | None:
        """Wait for the kernel's next message that is not for a rank; None when the kernel has left or is lost."""
        while not self._messages and not self._left:
            dispatch(self._selector, None)
        return self._messages.popleft() if self._messages else None

    def run_ranks(self, backend: ProcessBackend, orders: Sequence[WorkerOrder]) -> None:
        """Start ranks and relay until all have ended; kill them when the kernel leaves or is lost.

        Args:
            backend: Starts the ranks.
            orders: One order for each rank.

        Raises:
            LaunchError: A rank could not be started; the error has been sent to the kernel.
        """
        self._start(backend, orders)
        sampler = ResourceSampler({rank: process.pid for rank, process in self._ranks.items()}, self.sampled)
        sampler.start()
        try:
            self._relay()
        finally:
            self._kill()
            sampler.stop()

    def leave(self, reason: str = "", *, stopped: bool = False) -> None:
        """Let the kernel know why this host leaves; its ranks are killed."""
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
                self.take_end(rank)
            if time.monotonic() >= self._guard_due:
                self._guard_due = time.monotonic() + GUARD_SECONDS
                orphan_guard.ensure()
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
        self._relay_pieces()

    # ---- from the ranks: RankListener

    def started(self, process: RankProcess) -> None:
        """Report that a rank has started, and listen to it."""
        self._ranks[process.rank] = process
        self.send(StartedEvent(process.rank, process.pid))
        process.connect(self._selector, self)

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        self._add_piece(rank, stream, data)

    def take_frames(self, rank: int, data: bytes) -> None:
        """See ``RankListener.take_frames``; output that the rank wrote before the frames is sent first."""
        if process := self._ranks.get(rank):
            process.drain(self, channel=False)
        self._add_piece(rank, CHANNEL, data)

    def take_host_frames(self, rank: int, data: bytes) -> None:
        self._add_piece(rank, SAMPLES, data)

    def _add_piece(self, rank: int, source: str, data: bytes) -> None:
        self._pieces.append((rank, source, data))
        self._relayed += len(data)
        if self._relayed > CHUNK:
            self._relay_pieces()

    def _relay_pieces(self) -> None:
        """Send what was read from the ranks: at the end of each turn, and before what must follow it."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self.send(_relayed(pieces))

    def take_end(self, rank: int) -> None:
        process = self._ranks.get(rank)
        end = None if process is None else process.poll()
        if process is None or end is None:
            return
        process.drain(self, channel=True)
        self.release(process)
        self._relay_pieces()
        self.report_end(rank, end)

    def report_end(self, rank: int, end: Exit) -> None:
        """Report that a rank has ended, and how; all its output was sent."""
        self.send(EndedEvent(rank, end.code, end.signal, end.max_rss))

    def release(self, process: RankProcess) -> None:
        """Close a rank that has ended, and whose output was read."""
        process.disconnect(self._selector)
        process.close()
        self._ranks.pop(process.rank, None)

    def sampled(self, records: list[Record]) -> None:
        """Send samples of the ranks' resource use; called on the sampler's thread."""
        frames = [(rank, SAMPLES, encode([Stamped(stamp, event)])) for rank, stamp, event in records]
        if frames:
            self.send(_relayed(frames))

    def send(self, event: Event) -> None:
        """Send an event to the kernel, unless it or this host has left. Safe from any thread."""
        if not self._left:
            with suppress(ChannelClosedError):  # noticed when the stream is read
                self._stream.send(event)

    # ---- from the kernel

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
    """Whether a message cannot wait for the end of the ranks."""
    return isinstance(message, JournalEvent) or (isinstance(message, RunOverEvent) and message.held)


# ---- the messages between a kernel and a host
#
# They carry the frames and the output of ranks as bytes, which the host does not decode.

NOTEBOOK, COMMAND = "notebook", "command"
"""The kinds of hosts: one has a cell with the function, the other receives the function from the kernel."""
CHANNEL, SAMPLES = "channel", "samples"
"""Sources of the pieces of a `RelayEvent`, besides the streams "stdout" and "stderr"."""


@dataclass(slots=True)
class HelloEvent(Event):
    """The first message of a host, about itself.

    Attributes:
        node: Index of its machine in the run; -1 if the kernel is to choose it.
        host: Name of its machine.
        versions: Its versions by name: python, torch, notebook_accelerate.
        kind: `NOTEBOOK` or `COMMAND`.
        pid: Its process.
        processes: Ranks it starts; 0: as many as the first notebook.
        accelerator: Device type of its ranks.
        num_nodes: The number of nodes that it was launched with; 0: it does not know.
        rdzv_id: The name of the run that it wants to join; "" joins any.
        port: A port that it holds for the store of the process group; 0: none.
    """

    node: int = -1
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    kind: str = COMMAND
    pid: int = 0
    processes: int = 0
    accelerator: str = "cpu"
    num_nodes: int = 0
    rdzv_id: str = ""
    port: int = 0

    @property
    def title(self) -> str:
        """Its machine and process in messages."""
        return f"{self.host} ({'kernel' if self.kind == NOTEBOOK else 'process'} {self.pid})"


def node_name(node: int, host: str) -> str:
    """Return the name of a node in messages."""
    return f"node {node} ({host})" if host else f"node {node}"


@dataclass(slots=True)
class WaitingEvent(Event):
    """A line for the user of a host that has joined: who has arrived or joined, and who is missing."""

    text: str


@dataclass(slots=True)
class HostPlanEvent(Event):
    """All hosts of an attempt have joined.

    Attributes:
        first: Name of the first notebook's machine.
        clock_offset: Seconds to add to this host's time to get the first notebook's.
        payload: The host's ``LaunchPlan``, pickled.
    """

    first: str
    clock_offset: float
    payload: bytes


@dataclass(slots=True)
class FunctionEvent(Event):
    """A part of the launched function and its arguments, pickled, for a host without a notebook."""

    payload: bytes


@dataclass(slots=True)
class StartOrder(Event):
    """Start the ranks of an attempt; the payload is the list of their orders, pickled."""

    payload: bytes


@dataclass(slots=True)
class JournalEvent(Event):
    """Records of the run's journal for another notebook, pickled; without results and exception objects."""

    payload: bytes


@dataclass(slots=True)
class StopRequest(Event):
    """The user of the host stops the run, whose ranks have ``grace`` seconds to end."""

    grace: float


@dataclass(slots=True)
class CellsEvent(Event):
    """Cells that a host's notebook has run: by file name, the cell's name in that notebook and its source."""

    cells: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class RunOverEvent(Event):
    """The run is over: ``status``, the error's class and its text, as in the journal's ``RunEnded``.

    Attributes:
        held: Whether its ranks are held for inspection; the same message without it follows when they are released.
    """

    status: str
    error: str = ""
    message: str = ""
    held: bool = False


@dataclass(slots=True)
class ClockEvent(Event):
    """A request for the time; the reply carries the same number, and its stamp is the other end's time."""

    number: int


@dataclass(slots=True)
class RelayEvent(Event):
    """What the ranks of a host have sent and written: one event for all that the host reads at a time.

    Attributes:
        pieces: Of each piece, in order: its rank, its source, and its length. Pieces of `CHANNEL` are bytes of the
            rank's channel, those of `SAMPLES` are complete frames that the host sends on the rank's behalf, and the
            others are bytes that the rank wrote to a stream, none at its end.
        payload: The pieces, one after the other.
    """

    pieces: list[tuple[int, str, int]]
    payload: bytes


@dataclass(slots=True)
class RankEvent(Event):
    """Base of the messages about one rank."""

    rank: int


@dataclass(slots=True)
class StartedEvent(RankEvent):
    """The process of a rank has started."""

    pid: int


@dataclass(slots=True)
class FramesEvent(RankEvent):
    """Bytes for the rank's channel."""

    payload: bytes


@dataclass(slots=True)
class EndedEvent(RankEvent):
    """A rank's process has ended, as in ``launch.state.rank_result.Exit``; all its output and frames were sent."""

    code: int | None
    signal: int | None
    max_rss: int


@dataclass(slots=True)
class SignalOrder(RankEvent):
    """Send a signal to a rank, or to everything in its process group."""

    number: int
    group: bool = False


@dataclass(slots=True)
class DumpOrder(RankEvent):
    """The rank dumps its stacks into this file on the host's machine: keep it open."""

    path: str


@dataclass(slots=True)
class CaptureStacksOrder(RankEvent):
    """Capture the stacks of a rank that cannot answer."""

    number: int


@dataclass(slots=True)
class CapturedStacksEvent(Event):
    """The stacks of a rank; see ``debugging.process_stacks.ProcessStacks``."""

    number: int
    dump: str
    native: list[str] = field(default_factory=list)
    suspended: str = ""


@dataclass(slots=True)
class LeaveEvent(Event):
    """The sender leaves.

    Attributes:
        reason: Why; "" when its part of the run is over. From the kernel: why the host cannot take part.
        stopped: Whether its user has stopped the run.
    """

    reason: str = ""
    stopped: bool = False
