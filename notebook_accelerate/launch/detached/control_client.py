"""The commands of a run that a process of its own supervises: sent over its socket."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from notebook_accelerate.debugging.process_inspection import ProcessStacks
from notebook_accelerate.debugging.rank_requests import RankRequests
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.detached import control_protocol as protocol
from notebook_accelerate.launch.detached.control_service import is_own, short_path
from notebook_accelerate.launch.state.prompts import Prompt, PromptQueue
from notebook_accelerate.telemetry import Event, InputReply, InputRequest, Stamped, encode, steady_time
from notebook_accelerate.telemetry.channel import Channel, Decoder
from notebook_accelerate.telemetry.debug_protocol import Reply

CAPTURE_SECONDS = 10.0
"""Seconds to wait for the stacks of a rank that cannot reply."""
AGAIN_SECONDS = 0.1
"""Seconds after which a kernel that has lost its connection looks whether the process is still there."""
SEND_SECONDS = 2.0
"""Seconds that a command waits for that connection."""
STATE_SECONDS = 5.0
"""Seconds to wait for what its ranks wait for now; a process that is stopped sends nothing."""


class ControlClient:
    """The `RunCommands` of a detached run.

    Args:
        path: The socket of its process.

    Raises:
        OSError: Its process does not listen there.
    """

    refusal = ""

    def __init__(self, path: Path) -> None:
        self._path, self._channel = path, _connected(path)
        self._left = self._over = False
        self.prompts, self.requests = PromptQueue(), RankRequests()
        self._numbers = itertools.count(1)
        self._captured: dict[int, ProcessStacks] = {}
        self._changed = threading.Condition()
        self._open: set[tuple[int, int]] = set()
        self._known = threading.Event()
        threading.Thread(target=self._main, name="notebook-accelerate-attached", daemon=True).start()
        self._known.wait(STATE_SECONDS)  # or debug() right after attach() would not know who is at a breakpoint

    def close(self) -> None:
        """Leave the run to itself."""
        self._left = True
        self._channel.shut()

    # ---- any thread

    def stop(self, grace: float) -> None:
        """See ``RunCommands.stop``."""
        self._send(protocol.StopCommand(grace))

    def interrupt(self, ranks: Iterable[int]) -> None:
        """See ``RunCommands.interrupt``."""
        self._send(protocol.InterruptCommand(list(ranks)))

    def show_under(self, cell: object) -> None:
        """Do nothing: the run shows its output in its panel."""

    def hold_clock(self, rank: int) -> None:
        """See ``RunCommands.hold_clock``."""
        self._send(protocol.ClockCommand(rank, held=True))

    def release_clock(self, rank: int) -> None:
        """See ``RunCommands.release_clock``."""
        self._send(protocol.ClockCommand(rank, held=False))

    def _send(self, *events: Event) -> None:
        channel = self._channel
        try:
            channel.send(*events)
        except ChannelClosedError:
            with self._changed:  # another connection may follow, unless the run is over
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
            with suppress(ChannelClosedError):
                while True:
                    for _, event in self._channel.receive():
                        self._handle(event)
            if self._left or not self._connect_again():
                break
        self._known.set()
        for rank in self.requests.open_ranks():
            self.requests.close(rank)
        self.prompts.close()
        self._use(self._channel, over=True)
        self._channel.close()

    def _connect_again(self) -> bool:
        """Connect once more, unless the run is over: its process drops a kernel that was stopped and read nothing."""
        time.sleep(AGAIN_SECONDS)
        try:
            channel = _connected(self._path)
        except OSError:
            return False
        self._channel.close()
        self._use(channel)
        return not self._left

    def _use(self, channel: Channel, *, over: bool = False) -> None:
        with self._changed:
            self._channel, self._over = channel, over
            self._changed.notify_all()

    def _handle(self, event: Event) -> None:
        if isinstance(event, protocol.OpenEvent):
            self._take_state(event)
            self._known.set()
        elif isinstance(event, protocol.CapturedEvent):
            with self._changed:
                self._captured[event.number] = ProcessStacks(event.dump, tuple(event.native), event.suspended)
                self._changed.notify_all()
        elif isinstance(event, protocol.RelayedEvent):
            for _, relayed in Decoder().feed(event.payload):
                if isinstance(relayed, InputRequest):
                    self.prompts.put(Prompt(event.rank, relayed, _RankChannel(self, event.rank), lambda _: None))
                elif isinstance(relayed, Reply):
                    self.requests.deliver(event.rank, relayed)

    def _take_state(self, state: protocol.OpenEvent) -> None:
        known = self.requests.open_ranks()
        for rank in set(known).difference(state.ranks):
            self.requests.close(rank)
        for rank in set(state.ranks).difference(known):
            self.requests.open(rank, _RankChannel(self, rank), partial(self._capture, rank))
        for rank in set(self.prompts.debugged()).difference(state.debugged):
            self.prompts.drop(rank)
        now = {(rank, number) for rank, number in state.prompts}
        for rank, number in self._open - now:
            self.prompts.withdraw(rank, number)
        self._open = now


def _connected(path: Path) -> Channel:
    """Return a channel to the process that listens at a path.

    Raises:
        OSError: Nobody listens there, or another user does.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        with short_path(path) as address:
            connection.connect(address)
        if not is_own(connection):
            raise PermissionError(f"another user listens at {path}")
    except OSError:
        connection.close()
        raise
    return Channel(connection)


class _RankChannel:
    """Sends to a rank through the process of its run."""

    def __init__(self, client: ControlClient, rank: int) -> None:
        self._client, self._rank = client, rank

    def send(self, *events: Event) -> None:
        """See ``Sender.send``."""
        for event in events:
            if isinstance(event, InputReply):
                self._client._send(protocol.AnswerCommand(self._rank, event.number, event.text))
            else:
                payload = encode([Stamped(steady_time.now(), event)])
                self._client._send(protocol.RelayedEvent(self._rank, payload))


__all__ = ["ControlClient"]
