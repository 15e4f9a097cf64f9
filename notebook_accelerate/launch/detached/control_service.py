"""Serves kernels that attach to a detached run: carries out their commands, and relays what ranks reply and ask."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.detached import control_protocol as protocol
from notebook_accelerate.launch.processes.selecting import DispatchSelector, Signal, dispatch
from notebook_accelerate.telemetry import Event, Stamped, encode, steady_time
from notebook_accelerate.telemetry.channel import Channel, Decoder

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry.debug_protocol import Reply

SEND_SECONDS = 5
"""Seconds after which a kernel that reads nothing is dropped."""
_CREDENTIALS = struct.Struct("3i")


class ControlService:
    """Listens on a socket of the file system, on a thread of its own.

    Args:
        run: The run.
        path: The socket, in a folder that only the user can enter.

    Raises:
        OSError: The socket cannot be opened.
    """

    def __init__(self, run: Run, path: Path) -> None:
        self._commands, self._path = run.commands, path
        self._listener = listen(path)
        self._selector = DispatchSelector()
        self._wake, self._over = Signal(), False
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake.clear)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._clients: dict[Channel, OpenState] = {}
        self._relayed: deque[Event] = deque()
        self._captures = ThreadPoolExecutor(1, "notebook-accelerate-capture")
        self._last_client = time.monotonic()
        requests, prompts = self._commands.requests, self._commands.prompts
        requests.relay = self._relay
        requests.on_change = prompts.on_change = self._wake.set
        self._thread = threading.Thread(target=self._main, name="notebook-accelerate-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket and the connections."""
        self._over = True
        self._wake.set()
        self._thread.join()
        self._captures.shutdown()
        self._selector.close()
        self._listener.close()
        self._wake.close()
        with suppress(OSError):
            self._path.unlink()

    # ---- any thread

    @property
    def unattended_seconds(self) -> float:
        """Seconds since the last kernel has left; 0.0 while one is attached."""
        return 0.0 if self._clients else time.monotonic() - self._last_client

    def _relay(self, rank: int, reply: Reply) -> None:
        self._put(protocol.RelayedEvent(rank, encode([Stamped(steady_time.now(), reply)])))

    def _put(self, event: Event) -> None:
        self._relayed.append(event)
        self._wake.set()

    # ---- the service's thread

    def _main(self) -> None:
        while not self._over:
            dispatch(self._selector, None)
            events = [self._relayed.popleft() for _ in range(len(self._relayed))]
            for channel, known in list(self._clients.items()):
                try:
                    news = [*known.news(self._commands), *events]
                    if news:
                        channel.send(*news)
                except ChannelClosedError:
                    self._drop(channel)
            if self._clients:
                self._last_client = time.monotonic()
        for channel in list(self._clients):
            self._drop(channel)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if not is_own(connection):
                connection.close()
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
            channel = Channel(connection)
            self._clients[channel] = OpenState()
            self._selector.register(channel, selectors.EVENT_READ, partial(self._receive, channel))

    def _receive(self, channel: Channel) -> None:
        try:
            for _, event in channel.receive_available():
                self._handle(event)
        except ChannelClosedError:
            self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        if self._clients.pop(channel, None) is not None:
            self._last_client = time.monotonic()
            self._selector.unregister(channel)
            channel.close()

    def _handle(self, event: Event) -> None:
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
            commands.requests.forward(event.rank, [message.event for message in Decoder().feed(event.payload)])
        elif isinstance(event, protocol.CaptureCommand):
            self._captures.submit(self._capture, event)  # takes seconds where the rank is stopped

    def _capture(self, order: protocol.CaptureCommand) -> None:
        stacks = self._commands.requests.capture_stacks(order.rank)
        self._put(protocol.CapturedEvent(order.number, stacks.dump, list(stacks.native), stacks.suspended))


class OpenState:
    """What one kernel knows of the ranks that wait."""

    def __init__(self) -> None:
        self._known: Any = None

    def news(self, commands: Any) -> list[Event]:
        """Return the events that tell it what has changed."""
        prompts = {(each.rank, each.request.number): each for each in commands.prompts.open_prompts()}
        now = (commands.requests.open_ranks(), commands.prompts.debugged(), sorted(prompts))
        before, self._known = self._known, now
        if now == before:
            return []
        shown = set(before[2]) if before is not None else set()
        stamp = steady_time.now()
        found: list[Event] = [
            protocol.RelayedEvent(rank, encode([Stamped(stamp, prompt.request)]))
            for (rank, number), prompt in prompts.items()
            if (rank, number) not in shown
        ]
        # Last: a kernel that has received it has the prompts, too.
        return [*found, protocol.OpenEvent(now[0], now[1], [list(key) for key in now[2]])]


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at a path, which only the user can connect to.

    Raises:
        OSError: It cannot be created.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with short_path(path) as address:
            before = os.umask(0o177)
            try:
                listener.bind(address)
            finally:
                os.umask(before)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


class short_path:  # noqa: N801 - a context manager
    """The address of a socket, through its folder's descriptor where the path is longer than addresses may be."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) < 100:
            return str(self._path)
        self._descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._descriptor}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def is_own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder's mode decides
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())


__all__ = ["ControlService", "is_own", "listen", "short_path"]
