"""Streams of events between the kernel and its hosts. One thread carries them as messages of a ZeroMQ socket.

CurveZMQ encrypts and authenticates the messages, and ZeroMQ's heartbeats detect lost peers. A stream adds a window, as
in TCP: each message states how much its sender has read. Tests with libzmq 4.3.5 have shown that ZeroMQ's high-water
marks cannot replace the window:

- A receiver that has reached its mark reads nothing from the connection, not even the replies to its own heartbeats,
and ends the connection to a living peer after `KEEP_ALIVE`.
- A ROUTER reads from all of its peers or from none. A host whose ranks write a lot would delay a message that the
kernel awaits from another host. With a separate socket for each host, each would need its own port.
- A ROUTER counts as writable if any of its peers has room, so waiting for a host that does not read would become a busy
loop.
- Marks count the messages in each of the two sockets, and the buffers of the system come on top. With a mark of 64 on
both sides, 160 messages were in flight.
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
import selectors
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.processes.event_loop import WakeDescriptor
from notebook_accelerate.telemetry import Decoder, Event, Stamped, encode, steady_time

CHUNK = 1 << 16
WINDOW = 1 << 22
"""Maximum number of bytes that one end sends before the other end has read the first of them."""
SLICE_SECONDS = 0.1
"""Maximum seconds that a call to `Exchange.dispatch` takes. Its thread also has to stop runs, for example."""
HEADER = struct.Struct("!QQ?")
"""The header of a message, which is followed by data or by nothing.

It contains the number of bytes that the sender has sent before this message, the number of bytes that the sender has
read, and whether this is the sender's last message. CurveZMQ rejects messages that are repeated or out of order, but
does not notice when one is missing. The first number reveals that.
"""
TICK_SECONDS = 2.0
"""Seconds between checks for lost peers."""
SOON_SECONDS = 0.05
"""How many seconds libzmq may take, after a connection has ended, to deliver what arrived before the end."""
FLUSH_SECONDS = 5.0
"""How many seconds a closed stream waits for a sign that its last messages have arrived."""


class Stream:
    """One end of a stream of events. Any thread may send, but only one thread receives.

    The connection must last until the peer has closed its end, which the peer also does to confirm that this end has
    closed. Otherwise, when the socket is closed, libzmq may drop messages that it has already encoded, whatever the
    linger time is.

    Args:
        exchange: Carries the stream.
        send_message: Sends a message to the peer. It is called on the exchange's thread.

    Attributes:
        ended: Whether nothing more will arrive, because the peer has closed its end or is lost.
        gone: Whether a message could not be sent, and none has arrived since then.
        lost: Whether the peer is gone, and everything that it sent has arrived.
        on_ready: The function that `Exchange.dispatch` calls when something has arrived; see `register`.
    """

    def __init__(self, exchange: Exchange, send_message: Callable[[bytes], None]) -> None:
        self._exchange, self._send_message, self._changed = exchange, send_message, exchange.changed
        self.ended = self.gone = self.lost = self._closed = self._end_sent = self._peer_ended = False
        self.on_ready: Callable[[], object] | None = None
        self._decoder = Decoder()
        self._arrived: deque[bytes] = deque()
        self._queue: deque[Iterator[bytes]] = deque()
        self._buffer = bytearray()
        self._put = self._sent = self._acknowledged = 0
        self._received = self._taken = self._reported = 0
        self._deadline = 0.0

    # ---- any thread

    def send(self, *events: Event) -> None:
        """Send events. If the other end does not read, wait.

        Raises:
            ChannelClosedError: The other end or this end has been closed.
        """
        now = steady_time.now()
        data = encode([Stamped(now, event) for event in events])
        with self._changed:
            self._changed.wait_for(lambda: self._is_at_end or self._put - self._acknowledged < WINDOW)
            if self._is_at_end:
                raise ChannelClosedError("the other end has closed")
            self._put += len(data)
            self._queue.append(iter((data,)))
        self._exchange.request_step(self)

    def queue(self, parts: Iterable[bytes]) -> None:
        """Send encoded frames without waiting. The items of ``parts`` are taken as the peer reads.

        If the stream is over, do nothing.
        """
        if not self._is_at_end:
            self._queue.append(iter(parts))
            self._exchange.request_step(self)

    def close(self) -> None:
        """Close this end. Data sent before that is still delivered, unless the other end does not read."""
        with self._changed:
            self._closed, self._deadline = True, time.monotonic() + FLUSH_SECONDS
            self._arrived.clear()
            self._changed.notify_all()
        self._exchange.request_step(self)
        self._exchange.after_close()

    @property
    def _is_at_end(self) -> bool:
        return self.ended or self._closed

    # ---- the receiving thread

    def register(self, selector: selectors.BaseSelector, call: Callable[[], object]) -> None:
        """Call ``call`` on the selector's thread whenever events, or the end of the stream, can be received."""
        self.on_ready = call
        if self._exchange not in selector.get_map():
            selector.register(self._exchange, selectors.EVENT_READ, self._exchange.dispatch)
        if self._arrived or self.ended:
            self._exchange.announce(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for data or for the end, up to ``timeout`` seconds. Return whether there is data."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._is_at_end, timeout)
            return bool(self._arrived)

    def receive(self, timeout: float | None = None) -> list[Stamped]:
        """Wait for events, up to ``timeout`` seconds. Return some of those that have arrived, possibly none.

        Raises:
            ChannelClosedError: The stream has ended, and everything that arrived has been returned.
        """
        with self._changed:
            if not self.wait(timeout):
                if self._is_at_end:
                    raise ChannelClosedError("the other end has closed")
                return []
            data = self._arrived.popleft()
            while self._arrived and len(data) < CHUNK:
                data += self._arrived.popleft()
            self._taken += len(data)
        if self._taken - self._reported >= WINDOW // 4:
            self._exchange.request_step(self)
        if self._arrived or self.ended:
            self._exchange.announce(self)
        return self._decoder.feed(data)

    # ---- the exchange's thread

    def handle(self, message: bytes) -> None:
        """Handle a message from the peer. A message that violates the protocol ends the stream."""
        with self._changed:
            if len(message) < HEADER.size:
                self.ended = True
            else:
                sent, read, last = HEADER.unpack_from(message)
                if self._acknowledged < read <= self._sent:
                    self._acknowledged, self._deadline = read, time.monotonic() + FLUSH_SECONDS
                if sent != self._received:
                    self.ended = True
                elif not self.ended:
                    self._accept(message[HEADER.size :])
                if last:
                    self._peer_ended = self.ended = True
            self._changed.notify_all()

    def _accept(self, data: bytes) -> None:
        self._received += len(data)
        # End the stream if the peer has sent more than it may send without an acknowledgement.
        if self._received - self._taken > WINDOW + CHUNK:
            self.ended = True
        elif data and not self._closed:
            self._arrived.append(data)

    def lose(self) -> None:
        """End the stream, because the peer is gone."""
        with self._changed:
            self.ended = self.lost = self._peer_ended = self._end_sent = True
            self._changed.notify_all()

    def step(self, now: float) -> int:
        """Send as much data as the window allows, and the end if this end is closed. Return the number of bytes."""
        with self._changed:
            before = self._sent
            if self.ended or (self._closed and now >= self._deadline):
                self._queue.clear()
                self._buffer.clear()
            while not self._end_sent and self._sent - self._acknowledged < WINDOW and (data := self._next_data()):
                self._send_one(data)
            if self._taken - self._reported >= WINDOW // 4 and not self._is_at_end:
                self._send_one()
            if not self._end_sent and (self.ended or (self._closed and not self._buffer and not self._queue)):
                self._end_sent, self._deadline = True, now + FLUSH_SECONDS
                self._send_one()
            return self._sent - before

    def ping(self) -> None:
        """Send a message without data, because a ROUTER notices that a peer is gone only when it sends something."""
        with self._changed:
            self._send_one()

    def _send_one(self, data: bytes = b"") -> None:
        self._send_message(HEADER.pack(self._sent, self._taken, self._end_sent) + data)
        self._sent += len(data)
        self._reported = self._taken

    def _next_data(self) -> bytes:
        while len(self._buffer) < CHUNK and self._queue:
            if (part := next(self._queue[0], None)) is None:
                self._queue.popleft()
            else:
                self._buffer += part
        data = bytes(self._buffer[:CHUNK])
        del self._buffer[:CHUNK]
        return data

    def is_over(self, now: float) -> bool:
        """Return whether the stream no longer needs its connection."""
        return self._closed and self._end_sent and (self._peer_ended or now >= self._deadline)


class Exchange(ABC):
    """A thread that carries the streams of one ZeroMQ socket, which no other thread uses.

    A selector can wait until something has arrived (`fileno`), and then calls `dispatch`.

    Args:
        name: The thread's name.
        pace: Limits how often the thread wakes up for little data, because waking up costs several times as much as
            sending a short message.

    Attributes:
        changed: A condition that guards all streams, and that is notified when a stream changes.
    """

    def __init__(self, name: str, pace: RateLimiter) -> None:
        self._context, self._poller = zmq.Context(), zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self.changed = threading.Condition()
        self._wake, self._ready = WakeDescriptor(), WakeDescriptor()
        self._handle(self._wake.fileno(), self._wake.clear)
        self._due: set[Stream] = set()
        self._arrived: dict[Stream, None] = {}  # Hold the streams with arrived data, in order.
        self._next_tick = 0.0
        self._pace, self._carried = pace, 0
        self._linger = FLUSH_SECONDS
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- any thread

    def request_step(self, stream: Stream) -> None:
        """Make the exchange's thread call ``stream.step``.

        This does not use a lock, because an interrupt of the caller could leave the lock held.
        """
        self._due.add(stream)
        self._wake.set()

    def announce(self, stream: Stream) -> None:
        """Make `dispatch` call ``stream.on_ready``."""
        if stream.on_ready is not None:
            self._arrived[stream] = None
            self._ready.set()

    def after_close(self) -> None:
        """Do what is needed after a stream has been closed, which is nothing by default."""
        return

    # ---- the receiving thread

    def fileno(self) -> int:
        """Return a descriptor that is readable when `dispatch` should be called."""
        return self._ready.fileno()

    def dispatch(self) -> None:
        """Call ``on_ready`` of each stream that has received something."""
        self._ready.clear()
        deadline = time.monotonic() + SLICE_SECONDS
        for stream in list(self._arrived):
            if time.monotonic() >= deadline:
                self._ready.set()
                break
            del self._arrived[stream]
            if stream.on_ready is not None:
                stream.on_ready()

    # ---- the exchange's thread

    def _handle(self, source: Any, call: Callable[[], None]) -> None:
        """Call ``call`` whenever a ZeroMQ socket or a descriptor is readable."""
        self._handlers[source] = call
        self._poller.register(source, zmq.POLLIN)

    def _run(self) -> None:
        try:
            while not self._is_over():
                wait = max(0.0, self._next_tick - time.monotonic())
                for source, _ in self._poller.poll(math.ceil(1000 * wait)):
                    self._handlers[source]()
                if (now := time.monotonic()) >= self._next_tick:
                    self._next_tick = now + TICK_SECONDS
                    self._tick()
                    self._due.update(self._streams())
                while self._due:
                    self._carried += self._due.pop().step(now)
                self._pace.after(self._carried)
                self._carried = 0
        finally:
            for stream in self._streams():
                stream.lose()
                self.announce(stream)
            self._destroy(self._linger)

    def _take(self, stream: Stream, message: bytes) -> None:
        """Pass a message that has arrived to its stream."""
        self._carried += max(0, len(message) - HEADER.size)
        stream.gone = False
        stream.handle(message)
        self._due.add(stream)
        self.announce(stream)

    def _tick_soon(self) -> None:
        self._next_tick = min(self._next_tick, time.monotonic() + SOON_SECONDS)

    def _lose(self, stream: Stream) -> None:
        stream.lose()
        self.announce(stream)

    def _destroy(self, seconds: float) -> None:
        """Close all sockets. Messages that have not been sent yet get ``seconds`` to leave."""
        self._context.destroy(linger=int(1000 * seconds))
        self._wake.close()
        self._ready.close()

    @abstractmethod
    def _streams(self) -> Iterable[Stream]:
        """Return the streams that this exchange carries at the moment."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Return whether there is nothing left to carry, so that the thread can end."""

    @abstractmethod
    def _tick(self) -> None:
        """Check for lost peers. This is called every `TICK_SECONDS`, and soon after a connection has ended."""


# ---- the keys of both ends (CurveZMQ, ZeroMQ RFC 26), and the options of their sockets
#
# The keys are derived from the run's secret and never sent, so an end without the secret can neither connect nor accept
# connections. libzmq authenticates both ends, encrypts with new keys for each connection, and ends a connection whose
# peer does not answer.

SECRET_BYTES = 32
MESSAGE_BYTES = (1 << 18) + 64
"""Maximum size of a message in bytes."""
KEEP_ALIVE = (5.0, 15.0)
"""The interval of libzmq's heartbeats, and how long a peer may be silent before libzmq ends the connection, in seconds.

The values are torch's defaults for ``keep_alive_interval``, and for ``keep_alive_interval`` times
``keep_alive_max_attempt``.
"""
_MAX_SECONDS = 3276.0
"""The maximum of each of these values, because libzmq stores their sum in 16 bits, in tenths of a second."""


def new_secret() -> bytes:
    """Create a random secret for one run."""
    return secrets.token_bytes(SECRET_BYTES)


class Keys(NamedTuple):
    """The keys of both ends, encoded in Z85 (ZeroMQ RFC 32)."""

    kernel_public: bytes
    kernel_secret: bytes
    host_public: bytes
    host_secret: bytes


@functools.lru_cache(maxsize=16)
def derive_keys(secret: bytes) -> Keys:
    """Derive the keys of both ends from the secret. Scrypt (RFC 7914) makes it expensive to guess a short secret."""
    data = hashlib.scrypt(secret, salt=b"notebook_accelerate/2", n=1 << 14, r=8, p=1, dklen=64)
    kernel, host = z85.encode(data[:32]), z85.encode(data[32:])
    return Keys(zmq.curve_public(kernel), kernel, zmq.curve_public(host), host)


def configure(zmq_socket: Any, keep_alive: tuple[float, float]) -> None:
    """Set the options that the sockets of both ends share."""
    zmq_socket.sndhwm = zmq_socket.rcvhwm = 0  # High-water marks are not needed, because streams have windows.
    zmq_socket.maxmsgsize = MESSAGE_BYTES
    interval, silent = (max(1, int(1000 * min(seconds, _MAX_SECONDS))) for seconds in keep_alive)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent)
    # A peer with other settings uses this value as its limit, which includes the interval until the next heartbeat.
    zmq_socket.setsockopt(zmq.HEARTBEAT_TTL, silent + interval)


# ---- batches of small messages

SMALL = 1 << 14
"""Pieces of work with at least this many bytes are never delayed."""


class RateLimiter:
    """Delays small pieces of work that keep coming, so that they are done in batches. The first few are not delayed.

    Args:
        seconds: Average seconds between two pieces of work.
        burst: The number of pieces of work that are done without delay.
    """

    def __init__(self, seconds: float, burst: int) -> None:
        self._seconds, self._burst = seconds, burst
        self._next = 0.0

    def after(self, size: int) -> None:
        """Wait until the next piece of work is due, if the last one was small.

        Args:
            size: The size of the last piece in bytes. If it is `SMALL` or more, the next one follows immediately.
        """
        if not 0 < size < SMALL:
            return
        now = time.monotonic()
        self._next = max(self._next, now - self._burst * self._seconds) + self._seconds
        if self._next > now:
            time.sleep(self._next - now)
