"""Where the hosts of a run knock: the kernel listens until each has come, and not longer."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from notebook_accelerate.errors import AuthenticationError, ChannelClosedError
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.stream import AuthenticatedStream, greet
from notebook_accelerate.launch.processes.rank_process import Ends
from notebook_accelerate.telemetry import Channel

GREETING_SECONDS = 60.0
"""For the busiest machine, and a stream that goes through several; a silent stranger costs no more than a thread."""
MAX_GREETINGS = 64
"""Strangers that are spoken to at a time; when more knock, the one that has been there longest is sent off."""
MAX_REPORTS = 20
"""Refused connections that are told of one by one; of more only how many there were."""
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 20_000))
"""A machine that has gone silent is noticed within twenty seconds."""


class IncomingHost:
    """A host that has proved that it belongs to the run.

    Attributes:
        channel: The stream to it.
        hello: What it said of itself.
        address: Where it called from.
    """

    def __init__(self, channel: Channel, hello: HelloEvent, address: str) -> None:
        self.channel, self.hello, self.address = channel, hello, address


class HostListener:
    """Listens for the hosts of one run.

    Args:
        address: Address of this machine to listen on, and no other.
        secret: What a host must know.
        port: Port to listen on; 0 means any.
        report: Called with a line about each connection that was refused, on a thread of the door.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(
        self, address: str, secret: bytes, *, port: int = 0, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self._secret, self._report = secret, report
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((address, port))
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        Ends.kernel_side.add(self._listener.fileno())
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._visitors: SimpleQueue[IncomingHost] = SimpleQueue()
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._refused = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="notebook-accelerate-door", daemon=True)
        self._thread.start()

    def next_visitor(self, timeout: float) -> IncomingHost | None:
        """Return the next host that has come; None after ``timeout`` seconds."""
        try:
            return self._visitors.get(timeout=timeout)
        except Empty:
            return None

    def close(self) -> None:
        """Listen no longer."""
        if self._closing.is_set():
            return
        with self._lock:
            self._closing.set()
        self._thread.join()
        Ends.kernel_side.discard(self._listener.fileno())
        self._listener.close()
        while (visitor := self.next_visitor(0.0)) is not None:  # nobody expected it any more
            visitor.channel.close()
        with self._lock:
            strangers, more = list(self._strangers), self._refused - MAX_REPORTS
        for stranger in strangers:
            _hang_up(stranger)
        if more > 0:
            self._report(f"{more} more connections were refused")

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                if not selector.select(0.05):
                    continue
                with suppress(OSError):
                    connection, address = self._listener.accept()
                    self._make_room_for(connection)
                    name = "notebook-accelerate-greeting"
                    threading.Thread(target=self._greet, args=(connection, address[0]), name=name, daemon=True).start()

    def _make_room_for(self, connection: socket.socket) -> None:
        """Note a stranger; a host of the run is no stranger any more after milliseconds, so the oldest is none."""
        with self._lock:
            self._strangers[connection] = None
            oldest = next(iter(self._strangers)) if len(self._strangers) > MAX_GREETINGS else None
        if oldest is not None:
            _hang_up(oldest)

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            sealed = greet(connection, self._secret, listens=True, timeout=GREETING_SECONDS)
            keep_alive(connection)
            channel = Channel(sealed)
            hello = first_event(channel, GREETING_SECONDS)
            if not isinstance(hello, HelloEvent):
                channel.close()
                raise AuthenticationError("it did not say which machine it is")
        except (AuthenticationError, ChannelClosedError) as error:
            self._refuse(f"a connection from {address} was refused: {error}")
            return
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
        with self._lock:  # a door that closes between does not close on who was let in
            expected = not self._closing.is_set()
            if expected:
                self._visitors.put(IncomingHost(channel, hello, address))
        if not expected:
            channel.close()

    def _refuse(self, text: str) -> None:
        with self._lock:
            self._refused += 1
            told = self._refused <= MAX_REPORTS and not self._closing.is_set()
        if told:
            self._report(text)


def call(address: str, port: int, secret: bytes, hello: HelloEvent, timeout: float = GREETING_SECONDS) -> Channel:
    """Call a kernel's door and return the channel to it.

    Raises:
        AuthenticationError: Who answered does not know the secret.
        OSError: Nobody answered.
    """
    connection = socket.create_connection((address, port), timeout=timeout)
    keep_alive(connection)
    return introduce(connection, secret, hello, timeout)


def introduce(
    connection: socket.socket, secret: bytes, hello: HelloEvent, timeout: float = GREETING_SECONDS
) -> Channel:
    """Greet who is at the other end of a connected stream, and return the channel to it.

    Raises:
        AuthenticationError: The other end does not know the secret.
    """
    sealed: AuthenticatedStream = greet(connection, secret, listens=False, timeout=timeout)
    channel = Channel(sealed)
    channel.send(hello)
    return channel


def first_event(channel: Channel, timeout: float) -> object:
    """Return the first event of a channel; None when none comes in time. What follows is for the next who receives."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if found := channel.receive(left):
            channel.put_back(found[1:])
            return found[0].event
    return None


def _hang_up(connection: socket.socket) -> None:
    """End a connection under the thread that reads from it, which then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def keep_alive(connection: socket.socket) -> None:
    """Have the system notice a peer that has gone without a word, and send small messages at once."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


__all__ = ["HostListener", "IncomingHost", "call", "introduce"]
