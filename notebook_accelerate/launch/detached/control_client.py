"""Send commands to the process that supervises a detached run, over the socket of that process."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from notebook_accelerate.debugging.process_stacks import ProcessStacks
from notebook_accelerate.debugging.session import RankRequests
from notebook_accelerate.errors import BrokenRunError, ChannelClosedError
from notebook_accelerate.hardware.process_liveness import ProcessIdentity
from notebook_accelerate.launch.detached import control_protocol as protocol
from notebook_accelerate.launch.kept.journal_reader import JournalReader
from notebook_accelerate.launch.state.interrupts import SLICE
from notebook_accelerate.launch.state.prompts import Prompt, PromptQueue
from notebook_accelerate.launch.state.run_events import (
    DebuggerLeft,
    PromptClosed,
    PromptOpened,
    RankExited,
    RankStarted,
)
from notebook_accelerate.telemetry import Event, InputReply, InputRequest
from notebook_accelerate.telemetry.channel import Channel, Decoder
from notebook_accelerate.telemetry.debug_protocol import Reply
from notebook_accelerate.telemetry.store import Record

CAPTURE_SECONDS = 10.0
"""Seconds to wait for the stacks of a rank that cannot reply."""
AGAIN_SECONDS = 0.1
"""Seconds between a disconnected kernel's attempts to connect again."""
SEND_SECONDS = 2.0
"""Maximum seconds that a command waits for a new connection, or for the supervisor to read."""
STATE_SECONDS = 5.0
"""Seconds to wait for the history of the run, which a suspended process does not send."""
PING_SECONDS = 1.0
"""Seconds between pings to the supervisor while the run is being stopped."""
ANSWER_SECONDS = 5.0
"""Seconds without an answer before a warning names the supervisor, and after ``grace`` before it is killed."""


class ControlClient:
    """The `RunCommands` of a detached run.

    Args:
        path: The socket of the run's process.
        process: The run's process, which is killed if it does not answer while the run is being stopped. If None, no
            process is killed.

    Raises:
        BlockingIOError: The process does not accept connections at the moment.
        OSError: The process does not listen on the socket.

    Attributes:
        report: A function to call with a warning if the process does not answer.
    """

    refusal = ""

    def __init__(self, path: Path, process: ProcessIdentity | None = None) -> None:
        self._path, self._channel = path, _connected(path)
        self._process = process
        self._reader: JournalReader | None = None
        self._on_end: Callable[[], None] = lambda: None
        self.report: Callable[[str], None] = warn
        self._heard = 0
        self._stop_watched = False
        self._left = self._over = False
        self.prompts, self.requests = PromptQueue(), RankRequests()
        self._numbers = itertools.count(1)
        self._captured: dict[int, ProcessStacks] = {}
        self._asked: dict[int, int] = {}
        self._changed = threading.Condition()
        self._known = threading.Event()
        threading.Thread(target=self._main, name="notebook-accelerate-attached", daemon=True).start()

    def follow(self, reader: JournalReader, on_end: Callable[[], None]) -> bool:
        """Start receiving the run's records. After a reconnection, continue after the last record received.

        Args:
            reader: Receives the records, on the client's thread.
            on_end: A function to call on the client's thread when the process stops sending records.

        Returns:
            Whether the run's history has arrived in time. If not, the process may still send the history later.
        """
        self._reader, self._on_end = reader, on_end
        self._send(protocol.FollowCommand(reader.restart()))
        deadline = time.monotonic() + STATE_SECONDS
        while not self._known.wait(SLICE) and self.is_following and time.monotonic() < deadline:
            if self._process is not None and self._process.is_suspended():
                break
        return self._known.is_set()

    def close(self) -> None:
        """Disconnect from the run without stopping it, and stop following it."""
        self._left = True
        self._channel.shut()

    # ---- any thread

    @property
    def connected(self) -> bool:
        """Whether this kernel is connected to the run's process."""
        return not (self._over or self._left)

    @property
    def is_following(self) -> bool:
        """Whether the run's process sends records, or will do so once it answers."""
        return self._reader is not None

    def stop(self, grace: float) -> None:
        """Stop the run. If its process does not answer, kill the process `ANSWER_SECONDS` after the grace period."""
        self._send(protocol.StopCommand(float(grace)))
        if self._process is not None and not self._stop_watched:
            self._stop_watched = True
            threading.Thread(
                target=self._watch_stop, args=(self._process, grace), name="notebook-accelerate-stop", daemon=True
            ).start()

    def _watch_stop(self, process: ProcessIdentity, grace: float) -> None:
        silent = 0.0
        while self.connected and silent < grace + ANSWER_SECONDS:
            before, silent = silent, 0.0 if self._replies() else silent + PING_SECONDS
            if before < ANSWER_SECONDS <= silent:
                self.report(silence_text(process, grace + ANSWER_SECONDS - silent))
        if self.connected:
            process.kill_tree()
        self._stop_watched = False

    def _replies(self) -> bool:
        """Return whether the supervisor replies within `PING_SECONDS`."""
        heard = self._heard
        self._send(protocol.PingCommand())
        time.sleep(PING_SECONDS)
        return heard != self._heard

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send a KeyboardInterrupt to ranks, as described in ``RunCommands.interrupt``."""
        self._send(protocol.InterruptCommand(list(ranks)))

    def show_under(self, cell: object) -> None:
        """Do nothing, because the run shows its output in its panel."""

    def hold_clock(self, rank: int) -> None:
        """Suspend the run's time limits, as described in ``RunCommands.hold_clock``."""
        self._send(protocol.ClockCommand(rank, held=True))

    def release_clock(self, rank: int) -> None:
        """End the suspension of the time limits, as described in ``RunCommands.release_clock``."""
        self._send(protocol.ClockCommand(rank, held=False))

    def _send(self, *events: Event) -> None:
        channel = self._channel
        try:
            channel.send(*events)
        except ChannelClosedError:
            channel.shut()  # Don't use the channel again, because it may have sent only a part of the command.
            with self._changed:  # Wait for a new connection, unless the run is over.
                self._changed.wait_for(lambda: self._over or self._channel is not channel, SEND_SECONDS)
            with suppress(ChannelClosedError):
                self._channel.send(*events)

    def _capture(self, rank: int) -> ProcessStacks:
        number = next(self._numbers)
        self._send(protocol.CaptureCommand(rank, number))
        with self._changed:
            self._changed.wait_for(lambda: number in self._captured, CAPTURE_SECONDS)
            return self._captured.pop(number, ProcessStacks())

    # ---- the client's thread

    def _main(self) -> None:
        while True:
            # Suppress all errors, even those from invalid data, because this thread must report the process's end.
            with suppress(Exception):
                while True:
                    found = self._channel.receive()
                    self._heard += len(found)
                    for _, event in found:
                        if protocol.fits(event):
                            self._handle(event)
            if self._left or not self._connect_again():
                break
        for rank in self.requests.open_ranks():
            self.requests.close(rank)
        self.prompts.close()
        self._use(self._channel, over=True)
        self._channel.close()
        if not self._left:
            self._stop_following()

    def _stop_following(self) -> None:
        on_end, self._on_end = self._on_end, lambda: None
        self._reader = None
        on_end()

    def _connect_again(self) -> bool:
        """Connect again, unless the run is over. Return whether there is a new connection.

        The run's process disconnects a kernel that does not read, for example because the kernel was suspended.
        """
        channel = None
        while channel is None and not self._left:
            time.sleep(AGAIN_SECONDS)
            try:
                channel = _connected(self._path)
            except BlockingIOError:
                continue
            except OSError:
                break
        if channel is None:
            return False
        self._channel.close()
        self._use(channel)
        if self._reader is not None:
            self._send(protocol.FollowCommand(self._reader.restart()))
        return not self._left

    def _use(self, channel: Channel, *, over: bool = False) -> None:
        with self._changed:
            self._channel, self._over = channel, over
            self._changed.notify_all()

    def _handle(self, event: Event) -> None:
        if isinstance(event, (protocol.RecordsEvent, protocol.HistoryEvent)):
            self._take_records(event)
        elif isinstance(event, protocol.CapturedEvent):
            with self._changed:
                self._captured[event.number] = ProcessStacks(
                    event.dump, tuple(event.native), event.suspended, event.problem
                )
                self._changed.notify_all()
        elif isinstance(event, protocol.RelayedEvent):
            for _, sent in Decoder().feed(event.payload):
                if isinstance(sent, Reply):
                    self.requests.deliver(event.rank, sent)

    def _take_records(self, event: protocol.RecordsEvent | protocol.HistoryEvent) -> None:
        reader = self._reader
        if reader is None:
            return
        try:
            if isinstance(event, protocol.HistoryEvent):
                reader.take_history(event.position, event.payload)
            else:
                reader.take_records(event.position, event.payload)
        except BrokenRunError:
            self._stop_following()
        else:
            if reader.position:
                self._known.set()

    def on_records(self, records: Sequence[Record]) -> None:
        """Open and close the requests and prompts of ranks according to new records in the run's journal."""
        for record in records:
            event = record.event
            if isinstance(event, RankStarted):
                self.requests.open(event.rank, _RankChannel(self, event.rank), partial(self._capture, event.rank))
            elif isinstance(event, RankExited):
                self.requests.close(event.rank)
                self.prompts.drop(event.rank)
            elif isinstance(event, PromptOpened):
                asked = InputRequest(event.prompt, event.password, event.shown, event.kind, event.number)
                self._asked[event.rank] = event.number
                self.prompts.put(Prompt(event.rank, asked, _RankChannel(self, event.rank), lambda _: None))
            elif isinstance(event, PromptClosed):
                self.prompts.withdraw(event.rank, self._asked.pop(event.rank, 0))
            elif isinstance(event, DebuggerLeft):
                self.prompts.drop(event.rank)


def _connected(path: Path) -> Channel:
    """Return a channel to the process that listens on the socket at a path.

    Raises:
        BlockingIOError: The process does not accept connections at the moment.
        OSError: No process listens there, or the process belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX)
    seconds = int(SEND_SECONDS)
    # This timeout applies to connect() as well.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
    try:
        with protocol.short_socket_path(path) as address:
            connection.connect(address)
        if not protocol.is_own(connection):
            raise PermissionError(f"a process of another user listens on {path}")
    except OSError:
        connection.close()
        raise
    return Channel(connection)


class _RankChannel:
    """Sends events to a rank through the run's process."""

    def __init__(self, client: ControlClient, rank: int) -> None:
        self._client, self._rank = client, rank

    def send(self, *events: Event) -> None:
        """Send events to the rank, as described in ``Sender.send``."""
        for event in events:
            if isinstance(event, InputReply):
                self._client._send(protocol.AnswerCommand(self._rank, event.number, event.text))
            else:
                self._client._send(protocol.relayed(self._rank, event))


def warn(text: str) -> None:
    """Warn the user from a thread that must keep running even if warnings are configured to raise errors."""
    with suppress(Warning):
        warnings.warn(text, stacklevel=3)


def silence_text(process: ProcessIdentity, seconds: float) -> str:
    """Return the warning about a supervisor that does not answer and will be killed after ``seconds``."""
    why = f"is suspended; resume it with: kill -CONT {process.pid}" if process.is_suspended() else "does not answer"
    return f"{process}, which supervises a detached run, {why}. It will be killed with its ranks in {seconds:.0f} s."
