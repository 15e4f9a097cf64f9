"""The kernel's listener for the hosts of a run; it closes as soon as every host has connected."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from notebook_accelerate.errors import AuthenticationError, ChannelClosedError
from notebook_accelerate.launch.hosts.addresses import listen
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.stream import authenticate
from notebook_accelerate.launch.processes.rank_process import Ends
from notebook_accelerate.telemetry import Channel

HANDSHAKE_SECONDS = 60.0
"""Enough for a busy machine and a stream through several machines; a silent peer costs no more than a thread."""
MAX_HANDSHAKES = 64
"""Unauthenticated connections at a time; when another one arrives, the oldest is closed."""
MAX_REPORTS = 20
"""Refused connections that are reported one by one; for the rest only their number is reported."""
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 20_000))
"""A machine that stops responding is detected within twenty seconds."""


class IncomingHost(NamedTuple):
    """A host that has authenticated: the stream to it, and its first message."""

    channel: Channel
    hello: HelloEvent


class HostListener:
    """Listens for the hosts of one run.

    Args:
        address: The one address of this machine to listen on.
        secret: The secret that a host must know.
        report: Called with a line about each refused connection, on a thread of the listener.

    Raises:
        OSError: The address is not available.
    """

    def __init__(self, address: str, secret: bytes, *, report: Callable[[str], None] = lambda _: None) -> None:
        self._secret, self._report = secret, report
        self._listener = listen(address, 0)
        self._listener.setblocking(False)
        Ends.kernel_side.add(self._listener.fileno())
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._incoming: SimpleQueue[IncomingHost] = SimpleQueue()
        self._lock = threading.Lock()
        self._unauthenticated: dict[socket.socket, None] = {}
        self._refused = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="notebook-accelerate-listener", daemon=True)
        self._thread.start()

    def next_host(self, timeout: float) -> IncomingHost | None:
        """Return the next host that has connected; None after ``timeout`` seconds."""
        try:
            return self._incoming.get(timeout=timeout)
        except Empty:
            return None

    def close(self) -> None:
        """Stop listening, and close the connections that have not been returned."""
        if self._closing.is_set():
            return
        with self._lock:
            self._closing.set()
        self._thread.join()
        Ends.kernel_side.discard(self._listener.fileno())
        self._listener.close()
        while (incoming := self.next_host(0.0)) is not None:  # arrived too late to be expected
            incoming.channel.close()
        with self._lock:
            waiting, more = list(self._unauthenticated), self._refused - MAX_REPORTS
        for connection in waiting:
            _shut_down(connection)
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
                    self._limit_unauthenticated(connection)
                    name = "notebook-accelerate-handshake"
                    threading.Thread(
                        target=self._authenticate, args=(connection, address[0]), name=name, daemon=True
                    ).start()

    def _limit_unauthenticated(self, connection: socket.socket) -> None:
        """Record a new connection and close the oldest one where there are too many.

        A host of the run authenticates within milliseconds, so the oldest unauthenticated connection is not a host.
        """
        with self._lock:
            self._unauthenticated[connection] = None
            oldest = next(iter(self._unauthenticated)) if len(self._unauthenticated) > MAX_HANDSHAKES else None
        if oldest is not None:
            _shut_down(oldest)

    def _authenticate(self, connection: socket.socket, address: str) -> None:
        try:
            stream = authenticate(connection, self._secret, listens=True, timeout=HANDSHAKE_SECONDS)
            _enable_keep_alive(connection)
            channel = Channel(stream)
            hello = _first_event(channel, HANDSHAKE_SECONDS)
            if not isinstance(hello, HelloEvent):
                channel.close()
                raise AuthenticationError("it did not name its machine")
        except (AuthenticationError, ChannelClosedError) as error:
            self._refuse(f"a connection from {address} was refused: {error}")
            return
        finally:
            with self._lock:
                self._unauthenticated.pop(connection, None)
        with self._lock:  # decided under the lock, so that `close` misses no accepted host
            expected = not self._closing.is_set()
            if expected:
                self._incoming.put(IncomingHost(channel, hello))
        if not expected:
            channel.close()

    def _refuse(self, text: str) -> None:
        with self._lock:
            self._refused += 1
            reported = self._refused <= MAX_REPORTS and not self._closing.is_set()
        if reported:
            self._report(text)


def connect_to_kernel(address: str, port: int, secret: bytes, hello: HelloEvent) -> Channel:
    """Connect to a kernel's listener and return the channel to the kernel.

    Raises:
        AuthenticationError: The peer does not know the secret.
        OSError: The connection failed.
    """
    connection = socket.create_connection((address, port), timeout=HANDSHAKE_SECONDS)
    _enable_keep_alive(connection)
    return open_channel(connection, secret, hello)


def open_channel(connection: socket.socket, secret: bytes, hello: HelloEvent) -> Channel:
    """Authenticate on a connected stream, send ``hello``, and return the channel.

    Raises:
        AuthenticationError: The peer does not know the secret.
    """
    channel = Channel(authenticate(connection, secret, listens=False, timeout=HANDSHAKE_SECONDS))
    channel.send(hello)
    return channel


def _first_event(channel: Channel, timeout: float) -> object:
    """Return the first event of a channel, None when none arrives in time; later events stay in the channel."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if found := channel.receive(left):
            channel.put_back(found[1:])
            return found[0].event
    return None


def _shut_down(connection: socket.socket) -> None:
    """Shut a connection down while another thread reads from it; that thread then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _enable_keep_alive(connection: socket.socket) -> None:
    """Have the system detect a peer that vanished, and send small messages without delay."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
