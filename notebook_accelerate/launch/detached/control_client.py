"""The commands of a run that a process of its own supervises: sent over its socket."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from notebook_accelerate.debugging.process_inspection import ProcessStacks
from notebook_accelerate.debugging.rank_requests import RankRequests
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.detached import control_protocol as protocol
from notebook_accelerate.launch.detached.control_service import short_path
from notebook_accelerate.launch.state.prompts import Prompt, PromptQueue
from notebook_accelerate.telemetry import Event, InputReply, InputRequest, Stamped, encode, steady_time
from notebook_accelerate.telemetry.channel import Channel, Decoder
from notebook_accelerate.telemetry.debug_protocol import Reply

CAPTURE_SECONDS = 10.0
"""Seconds to wait for the stacks of a rank that cannot reply."""
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
        connection = socket.socket(socket.AF_UNIX)
        try:
            with short_path(path) as address:
                connection.connect(address)
        except OSError:
            connection.close()
            raise
        self.prompts, self.requests = PromptQueue(), RankRequests()
        self._channel = Channel(connection)
        self._numbers = itertools.count(1)
        self._captured: dict[int, ProcessStacks] = {}
        self._changed = threading.Condition()
        self._open: set[tuple[int, int]] = set()
        self._known = threading.Event()
        threading.Thread(target=self._main, name="notebook-accelerate-attached", daemon=True).start()
        self._known.wait(STATE_SECONDS)  # or debug() right after attach() would not know who is at a breakpoint

    def close(self) -> None:
        """Leave the run to itself."""
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
        with suppress(ChannelClosedError):  # the run is over
            self._channel.send(*events)

    def _capture(self, rank: int) -> ProcessStacks:
        number = next(self._numbers)
        self._send(protocol.CaptureCommand(rank, number))
        with self._changed:
            self._changed.wait_for(lambda: number in self._captured, CAPTURE_SECONDS)
            return self._captured.pop(number, ProcessStacks())

    # ---- the client's thread

    def _main(self) -> None:
        with suppress(ChannelClosedError):
            while True:
                for _, event in self._channel.receive():
                    self._handle(event)
        self._known.set()
        for rank in self.requests.open_ranks():
            self.requests.close(rank)
        self.prompts.close()
        self._channel.close()

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
