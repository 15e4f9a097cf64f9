"""Serve the processes that attach to a run, by sending them the run's records and executing their commands."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accelerate.debugging.process_stacks import ProcessStacks
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.detached import control_protocol as protocol
from notebook_accelerate.launch.kept import journal_format
from notebook_accelerate.launch.kept.journal_file import last_lines, thinned_frames
from notebook_accelerate.launch.kept.journal_reader import JournalContents
from notebook_accelerate.launch.kept.run_folder import header_of
from notebook_accelerate.launch.processes import kernel_descriptors
from notebook_accelerate.launch.processes.event_loop import DispatchSelector, WakeDescriptor, dispatch
from notebook_accelerate.launch.state.run_events import RunEnded, RunEvent
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import Event, Stamped, encode, steady_time
from notebook_accelerate.telemetry.channel import Channel, Decoder
from notebook_accelerate.telemetry.debug_protocol import Request

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry.debug_protocol import Reply
    from notebook_accelerate.telemetry.store import Record

BATCH_SECONDS = 0.02
"""Seconds during which records are collected before they are sent to kernels."""
UNREAD_SECONDS = 30.0
"""Seconds after which a kernel that does not read is disconnected. The kernel reconnects once it resumes."""
CHECK_SECONDS = 1.0
"""Seconds between checks for kernels that do not read."""
MAX_UNREAD_BYTES = 64 << 20
"""Maximum bytes to queue for a kernel after the message that it is reading. A kernel with more is disconnected."""
MAX_COMMAND_BYTES = 64 << 20
"""Maximum size of a frame from a kernel, in bytes."""
DRAIN_SECONDS = 2.0
"""Maximum seconds to wait for kernels to read their queued messages when the run has ended."""
MAX_CAPTURES = 16
"""Maximum number of stack captures waiting or in progress. A capture takes seconds if the rank is suspended."""
MAX_ASKED = 10_000
"""Maximum number of requests that wait for a rank's reply. The replies to older requests are discarded."""
MAX_HELD_BYTES = 16 << 20
"""Maximum bytes of encoded records to hold for kernels. A kernel that needs older ones receives the history."""
PART_BYTES = 1 << 20
"""Approximate size of each part of the history, in bytes."""


class AttachedKernel:
    """An attached kernel, with a queue of messages that it has not read. Sending never blocks.

    Args:
        connection: The socket of the kernel's connection.

    Attributes:
        channel: The channel that receives the kernel's commands.
        position: The position of the next record to send, or None if the kernel does not follow the run.
        history: The position after the history, and the parts of the history that are still to be sent, or None.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        kernel_descriptors.add(connection.fileno())
        self._socket, self.channel = connection, Channel(connection, MAX_COMMAND_BYTES)
        self.position: int | None = None
        self.history: tuple[int, Iterator[bytes]] | None = None
        self._unread: deque[memoryview] = deque()
        self._read_at = time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection."""
        kernel_descriptors.discard(self._socket.fileno())
        self.channel.close()

    @property
    def has_unread(self) -> bool:
        """Whether messages are queued for the kernel."""
        return bool(self._unread)

    def send(self, event: Event) -> None:
        """Send as much of an event as the kernel accepts without blocking, and queue the rest.

        Raises:
            ChannelClosedError: The kernel is gone, or reads too slowly.
        """
        if not self._unread:
            self._read_at = time.monotonic()
        elif sum(map(len, self._unread)) - len(self._unread[0]) > MAX_UNREAD_BYTES:
            raise ChannelClosedError("the kernel reads too slowly")
        self._unread.append(memoryview(encode([Stamped(steady_time.now(), event)])))
        self.send_unread()

    def send_unread(self) -> None:
        """Send as much of the queue as the kernel accepts without blocking.

        Raises:
            ChannelClosedError: The kernel is gone, or does not read.
        """
        if self._unread and time.monotonic() - self._read_at > UNREAD_SECONDS:
            raise ChannelClosedError("the kernel does not read")
        try:
            while self._unread:
                self._unread[0] = self._unread[0][self._socket.send(self._unread[0]) :]
                self._read_at = time.monotonic()
                if not self._unread[0]:
                    self._unread.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosedError(f"the kernel is gone: {error}") from None


class ControlService:
    """Serves kernels over a Unix domain socket. The service's thread never waits for any single kernel.

    Args:
        run: The run to serve.
        path: The path of the socket, in a folder that only this user can enter. If None, the service does not listen,
            and `admit` receives its connections.
        stream: The run's records. If None, a new stream is created.

    Raises:
        OSError: The socket cannot be created.
    """

    def __init__(self, run: Run, path: Path | None = None, stream: RecordStream | None = None) -> None:
        self._commands, self._path = internals(run).commands, path
        self._selector = DispatchSelector()
        self._wake, self._over = WakeDescriptor(), False
        self._stream, self._batch_due = stream or RecordStream(run), 0.0
        self._stream.wake = self._wake.set
        # Create the socket last, so that an error in the stream does not leave a socket file behind.
        self._listener = listener = None if path is None else protocol.listen(path)
        run.add_done_callback(lambda _: self._wake.set())
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake.clear)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, lambda: self.admit(listener))
        self._admitted: deque[socket.socket] = deque()
        self._kernels: set[AttachedKernel] = set()
        self._asked: dict[tuple[int, int], AttachedKernel] = {}
        self._replies: deque[tuple[int, Reply]] = deque()
        self._captured: deque[tuple[AttachedKernel, Event]] = deque()
        self._captures, self._capturing = ThreadPoolExecutor(1, "notebook-accelerate-capture"), 0
        self._last_attached = time.monotonic()
        self._commands.requests.relay = self._relay
        self._thread = threading.Thread(target=self._main, name="notebook-accelerate-control", daemon=True)
        self._thread.start()

    # ---- any thread

    def close(self, *, wait: bool = True) -> None:
        """Wait up to `DRAIN_SECONDS` for kernels to read their messages, then close all sockets.

        Args:
            wait: Whether to return only after that. If False, the service's thread does it later.
        """
        self._over = True
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._wake.set()
        if wait:
            self._thread.join()

    def admit(self, listener: socket.socket) -> None:
        """Accept a connection and serve it, unless it comes from a process of another user."""
        with suppress(OSError):
            connection, _ = listener.accept()
            if protocol.is_own(connection):
                self._admitted.append(connection)
                self._wake.set()
            else:
                connection.close()

    @property
    def unattended_seconds(self) -> float:
        """The number of seconds since the last kernel left, or 0.0 while a kernel is attached."""
        return 0.0 if self._kernels else time.monotonic() - self._last_attached

    def _relay(self, rank: int, reply: Reply) -> None:
        self._replies.append((rank, reply))
        self._wake.set()

    # ---- the service's thread

    def _main(self) -> None:
        while not self._over:
            dispatch(self._selector, self._select_timeout())
            self._send_pending()
            if self._kernels:
                self._last_attached = time.monotonic()
        self._drain()
        for kernel in list(self._kernels):
            self._drop(kernel)
        self._stream.close()
        self._captures.shutdown(cancel_futures=True)
        self._selector.close()
        self._wake.close()
        self._commands.requests.relay = _do_nothing

    def _select_timeout(self) -> float | None:
        """Return how many seconds to wait for commands and new records, or None for no limit."""
        if self._stream.is_followed and self._stream.has_waiting:
            return max(0.0, self._batch_due - time.monotonic())
        return CHECK_SECONDS if self._kernels else None

    def _drain(self) -> None:
        """Send the run's last events, and wait up to `DRAIN_SECONDS` until all kernels have read them."""
        if self._listener is not None and self._path is not None:
            self._selector.unregister(self._listener)
            protocol.stop_listening(self._listener, self._path)
        deadline = time.monotonic() + DRAIN_SECONDS
        self._batch_due = 0.0
        self._send_pending()
        while any(kernel.has_unread for kernel in self._kernels) and (left := deadline - time.monotonic()) > 0:
            dispatch(self._selector, left)
            self._send_pending()

    def _send_pending(self) -> None:
        while self._admitted:
            kernel = AttachedKernel(self._admitted.popleft())
            self._kernels.add(kernel)
            self._selector.register(kernel, selectors.EVENT_READ, partial(self._receive, kernel))
        self._stream.is_followed = any(kernel.position is not None for kernel in self._kernels)
        if self._stream.is_followed and time.monotonic() >= self._batch_due:
            self._stream.advance(hold=True)
            self._batch_due = time.monotonic() + BATCH_SECONDS
        while self._replies:
            rank, reply = self._replies.popleft()
            self._reply(self._asked.pop((rank, reply.number), None), protocol.relayed(rank, reply))
        while self._captured:
            self._capturing -= 1
            self._reply(*self._captured.popleft())
        for kernel in list(self._kernels):
            with self._dropped_on_error(kernel):
                kernel.send_unread()
                while not kernel.has_unread and (news := self._next_records(kernel)) is not None:
                    kernel.send(news)
                self._watch(kernel)

    def _next_records(self, kernel: AttachedKernel) -> Event | None:
        """Return the next message with records for a kernel. A kernel that is too far behind gets the history."""
        if kernel.position is None:
            return None
        if kernel.history is None and not self._stream.holds(kernel.position):
            kernel.history = self._stream.history()
            if kernel.history is None:
                return None
        if kernel.history is not None:
            position, parts = kernel.history
            if (part := next(parts, None)) is not None:
                return protocol.HistoryEvent(0, part)
            kernel.position, kernel.history = position, None
            return protocol.HistoryEvent(position, b"")
        if (held := self._stream.after(kernel.position)) is None:
            return None
        kernel.position, data = held
        return protocol.RecordsEvent(kernel.position, data)

    def _watch(self, kernel: AttachedKernel) -> None:
        """Watch whether a kernel's connection is writable, but only while messages are queued for the kernel."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if kernel.has_unread else 0)
        if self._selector.get_key(kernel).events != events:
            self._selector.modify(kernel, events, partial(self._receive, kernel))

    def _receive(self, kernel: AttachedKernel) -> None:
        with self._dropped_on_error(kernel):
            for _, event in kernel.channel.receive_available():
                if not protocol.fits(event):
                    raise ChannelClosedError(f"received a {type(event).__name__} with fields of the wrong types")
                self._handle(kernel, event)

    @contextmanager
    def _dropped_on_error(self, kernel: AttachedKernel) -> Iterator[None]:
        """Disconnect a kernel if an error occurs in the block.

        A faulty kernel must not end the service, because the service is needed to stop the run.
        """
        try:
            yield
        except Exception:  # noqa: BLE001 - a bad peer must not end the service
            self._drop(kernel)

    def _drop(self, kernel: AttachedKernel) -> None:
        if kernel in self._kernels:
            self._kernels.remove(kernel)
            self._asked = {key: each for key, each in self._asked.items() if each is not kernel}
            self._last_attached = time.monotonic()
            self._selector.unregister(kernel)
            kernel.close()

    def _handle(self, kernel: AttachedKernel, event: Event) -> None:
        commands = self._commands
        if isinstance(event, protocol.StopCommand):
            commands.stop(event.grace)
        elif isinstance(event, protocol.InterruptCommand):
            commands.interrupt(event.ranks)
        elif isinstance(event, protocol.ClockCommand):
            (commands.hold_clock if event.held else commands.release_clock)(event.rank)
        elif isinstance(event, protocol.AnswerCommand):
            for prompt in commands.prompts.open_prompts():
                if (prompt.rank, prompt.request.number) == (event.rank, event.number):
                    commands.prompts.withdraw(event.rank, event.number)
                    prompt.answer(event.text)
        elif isinstance(event, protocol.RelayedEvent):
            self._forward(kernel, event)
        elif isinstance(event, protocol.CaptureCommand):
            self._start_capture(kernel, event)
        elif isinstance(event, protocol.PingCommand):
            self._reply(kernel, protocol.PongEvent())
        elif isinstance(event, protocol.FollowCommand):
            kernel.position, kernel.history = event.position, None

    def _reply(self, kernel: AttachedKernel | None, event: Event) -> None:
        """Send an event to the kernel that requested it, unless that kernel has left."""
        if kernel in self._kernels:
            with self._dropped_on_error(kernel):
                kernel.send(event)
                self._watch(kernel)

    def _forward(self, kernel: AttachedKernel, event: protocol.RelayedEvent) -> None:
        requests = [message.event for message in Decoder().feed(event.payload)]
        for request in requests:
            if not isinstance(request, Request) or not protocol.fits(request):
                raise ChannelClosedError(f"a {type(request).__name__} is not a request to a rank")
            self._asked[event.rank, request.number] = kernel
            if len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]
        self._commands.requests.forward(event.rank, requests)

    def _start_capture(self, kernel: AttachedKernel, order: protocol.CaptureCommand) -> None:
        if self._capturing >= MAX_CAPTURES:
            problem = f"its stacks were not read: {MAX_CAPTURES} captures are in progress; try again in a few seconds"
            self._reply(kernel, protocol.CapturedEvent(order.number, "", problem=problem))
        else:
            self._capturing += 1
            self._captures.submit(self._capture, kernel, order)

    def _capture(self, kernel: AttachedKernel, order: protocol.CaptureCommand) -> None:
        stacks = ProcessStacks()
        with suppress(Exception):  # The kernel waits for a reply, so send one even after an error.
            stacks = self._commands.requests.capture_stacks(order.rank)
        found = protocol.CapturedEvent(order.number, stacks.dump, list(stacks.native), stacks.suspended, stacks.problem)
        self._captured.append((kernel, found))
        self._wake.set()


# ---- the run's records, by position


class RecordStream:
    """Numbers the records of a run from the beginning, and encodes them as frames of a journal.

    Any thread may append to the run's journal. A single thread reads the stream.

    Args:
        run: The run whose records to number.

    Attributes:
        wake: A function to call when records arrive after all earlier ones have been read.
        is_followed: Whether kernels follow the run. If not, records are not held, but only counted when they arrive.
        end: The position after the last record that was read from the journal.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.wake: Callable[[], None] = lambda: None
        self.is_followed = False
        journal = internals(run).journal
        self._contents = JournalContents(journal=journal)
        self._waiting: list[Record] = []
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        with journal.locked():
            self._run_events = len(journal.records)
            # Positions start at 1. A new kernel starts at 0, which is never held, so the kernel receives the history.
            self.end = self._begin = self._run_events + 1
            self._unsubscribe = journal.subscribe(self._on_records, ordered=True)

    def close(self) -> None:
        """Stop reading the journal. The stream then no longer keeps itself and its run alive."""
        self._unsubscribe()
        self._unsubscribe = _do_nothing

    def _on_records(self, records: Sequence[Record]) -> None:
        if self.is_followed and not self._waiting:
            self.wake()
        self._waiting.extend(records)
        if not self.is_followed:
            self.advance(hold=False)

    @property
    def has_waiting(self) -> bool:
        """Whether the journal has records that have not been read yet."""
        return bool(self._waiting)

    def advance(self, *, hold: bool) -> None:
        """Read all new records of the journal.

        Args:
            hold: Whether to hold the records because kernels follow the run.
        """
        with internals(self._run).journal.locked():
            count = self._readable()
            records = self._waiting[:count]
            del self._waiting[:count]
        if not records:
            return
        for record in records:
            if isinstance(record.event, RunEvent):
                self._run_events += 1
            else:
                self._contents.note(record)
        self.end += len(records)
        if hold:
            self._hold(b"".join(journal_format.encode_records(records)))
        else:
            self._held.clear()
            self._held_bytes, self._begin = 0, self.end

    def _readable(self) -> int:
        """Return how many waiting records may be sent.

        The end of the run is sent only once it has been saved, so that a kernel that has received the end also finds it
        and the results in the run's folder.
        """
        if self._run.done or internals(self._run).journal.state.unsaved:
            return len(self._waiting)
        ends = (index for index, record in enumerate(self._waiting) if isinstance(record.event, RunEnded))
        return next(ends, len(self._waiting))

    def _hold(self, data: bytes) -> None:
        self._held.append((self.end, data))
        self._held_bytes += len(data)
        while self._held_bytes > MAX_HELD_BYTES and len(self._held) > 1:
            self._begin, dropped = self._held.popleft()
            self._held_bytes -= len(dropped)

    def holds(self, position: int) -> bool:
        """Return whether all records from ``position`` on are held."""
        return self._begin <= position <= self.end

    def after(self, position: int) -> tuple[int, bytes] | None:
        """Return the next held records from ``position`` on, and the position after them, or None at the end."""
        found = None
        for part in reversed(self._held):  # Search from the end, because most kernels have read almost everything.
            if part[0] <= position:
                break
            found = part
        return found

    def history(self) -> tuple[int, Iterator[bytes]] | None:
        """Return a position and all records before it, as parts of a journal.

        Return None while the end of the run is being saved.
        """
        with internals(self._run).journal.locked():
            self.advance(hold=True)
            if self._waiting:
                return None
            if not self._contents.header:
                self._contents.header = header_of(self._run)
            lines = last_lines(internals(self._run).journal)
            frames = thinned_frames(self._contents, (), self._run_events)
            return self.end, _parts(frames, lines)


def _do_nothing(*_: object) -> None:
    """Replace a function that refers to a run, so that the run is freed once its user has dropped it."""


def _parts(frames: Sequence[bytes], lines: Sequence[Record]) -> Iterator[bytes]:
    """Yield ``frames``, then the frames for ``lines``, in parts of about `PART_BYTES`."""
    part: list[bytes] = []
    size = 0
    for source in (frames, journal_format.encode_records(lines)):
        for frame in source:
            part.append(frame)
            size += len(frame)
            if size >= PART_BYTES:
                yield b"".join(part)
                part, size = [], 0
    yield b"".join(part)
