"""A thread that carries local sockets over the messages of one ZeroMQ socket."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from notebook_accelerate.launch.hosts.remote.stream import DATA, Link, ProtocolError
from notebook_accelerate.launch.processes.rank_process import Ends

TICK_SECONDS = 2.0
"""Seconds between checks for peers that are gone."""
SOON_SECONDS = 0.05
"""Seconds after the end of a connection in which libzmq passes on what arrived before."""
FLUSH_SECONDS = 5.0
"""Seconds that the last messages have to leave."""
SMALL = 1 << 14
"""Bytes of a wake-up that is never delayed."""
MESSAGES = 100
"""Messages that are read before other sockets have their turn."""
EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED
EVENTS |= zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
"""The events of libzmq's monitor that are requested; EVENT_HANDSHAKE_FAILED_PROTOCOL must not be one of them.

libzmq 4.3.5 emits it for a forged message of an established connection, too. That resets `errno`, so that libzmq stops
reading the connection instead of ending it; if the peer then disconnects, the next heartbeat fails the assertion
`!_io_error`, and the process aborts (compare zeromq/libzmq#4841).
"""


class Exchange(ABC):
    """A thread that serves the links of one ZeroMQ socket; no other thread uses the socket.

    Args:
        name: Name of the thread.

    Attributes:
        pause_seconds: Average seconds between wake-ups that carry little; each costs several times what a short message
            costs.
        burst: Wake-ups that carry little before the first is delayed.
    """

    pause_seconds: float
    burst: int

    def __init__(self, name: str) -> None:
        self._context = zmq.Context()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = local_pair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._handlers: list[tuple[Any, Callable[[], None]]] = []
        self._interest: dict[Link, int] = {}
        self._next_tick = self._due = 0.0
        self._carried = 0
        self._flush = FLUSH_SECONDS
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _handle(self, zmq_socket: Any, call: Callable[[], None]) -> None:
        """Call ``call`` whenever a ZeroMQ socket has a message."""
        self._handlers.append((zmq_socket, call))
        self._selector.register(zmq_socket.fileno(), selectors.EVENT_READ)

    def _wake_up(self) -> None:
        with suppress(OSError):
            self._waker.send(b"!")

    def _run(self) -> None:
        try:
            while not self._is_over():
                busy = self._handle_messages()
                timeout = 0.0 if busy else max(0.0, self._next_tick - time.monotonic())
                self._handle_local(self._selector.select(timeout))
                if (now := time.monotonic()) >= self._next_tick:
                    self._next_tick = now + TICK_SECONDS
                    self._tick()
                    self._end_abandoned(now)
                if 0 < self._carried < SMALL:
                    self._pause()
                self._carried = 0
        finally:
            self._finish()

    def _handle_messages(self) -> bool:
        """Handle messages of the ZeroMQ sockets; return whether there were any.

        The descriptor of a ZeroMQ socket becomes readable only when its state changes, so this must be called after any
        use of a socket and before waiting.
        """
        ready = [call for zmq_socket, call in self._handlers if zmq_socket.getsockopt(zmq.EVENTS) & zmq.POLLIN]
        for call in ready:
            call()
        return bool(ready)

    def _pause(self) -> None:
        """Wait, so that a steady flow of short messages is handled in batches; the first few are not delayed."""
        now = time.monotonic()
        self._due = max(self._due, now - self.burst * self.pause_seconds) + self.pause_seconds
        if self._due > now:
            time.sleep(self._due - now)

    def _handle_local(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, events in ready:
            if key.fileobj is self._wake:
                self._wake.recv(64)
            elif isinstance(link := key.data, Link) and not link.closed:
                self._carried += link.on_ready(events)
                self._watch(link)

    def _finish(self) -> None:
        for link in list(self._links()):
            self._release(link)
        self._destroy(self._flush)

    def _destroy(self, seconds: float) -> None:
        """Close all sockets; messages that have not left have so many seconds."""
        self._context.destroy(linger=int(1000 * seconds))
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def _watch(self, link: Link) -> None:
        """Wait for what a link is interested in now; release a link that is closed."""
        wanted, before = link.interest(), self._interest.get(link, 0)
        if link.closed:
            self._release(link)
        elif wanted != before:
            if not before:
                self._selector.register(link.descriptor, wanted, link)
            elif wanted:
                self._selector.modify(link.descriptor, wanted, link)
            else:
                self._selector.unregister(link.descriptor)
            self._interest[link] = wanted

    def _release(self, link: Link) -> None:
        """Close a link's local socket."""
        if self._interest.pop(link, 0):
            self._selector.unregister(link.descriptor)
        link.release()

    def _receive(self, link: Link, message: bytes) -> None:
        """Give a message to a link; one that is not of this protocol ends the link."""
        self._carried += len(message) if message.startswith(DATA) else 0
        try:
            link.on_message(message)
        except ProtocolError:
            link.close()
        self._watch(link)

    def _end_abandoned(self, now: float) -> None:
        for link in list(self._links()):
            if link.is_abandoned(now, FLUSH_SECONDS):
                link.close()
                self._watch(link)

    @abstractmethod
    def _links(self) -> Iterable[Link]:
        """Return the links."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Return whether nothing is left to serve."""

    @abstractmethod
    def _tick(self) -> None:
        """Check for peers that are gone: every `TICK_SECONDS`, and `SOON_SECONDS` after the end of a connection."""


class KernelSideSocket(socket.socket):
    """A local socket of the kernel, which forked ranks do not keep open.

    Attributes:
        after_close: Called once it is closed.
    """

    after_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Close it; closing twice does nothing."""
        Ends.kernel_side.discard(self.fileno())
        super().close()
        if self.after_close is not None:
            self.after_close()


def local_pair() -> tuple[KernelSideSocket, KernelSideSocket]:
    """Return two connected local sockets."""
    first, second = (KernelSideSocket(fileno=each.detach()) for each in socket.socketpair())
    Ends.kernel_side |= {first.fileno(), second.fileno()}
    return first, second


def read_event(monitor_socket: Any) -> tuple[int, int]:
    """Return the next event of a monitor and its value, for most events a descriptor."""
    event = recv_monitor_message(monitor_socket)
    return event["event"], event["value"]
