"""Streams of events between the kernel and its hosts, carried by one thread over the messages of a ZeroMQ socket.

CurveZMQ encrypts and authenticates the messages, and ZeroMQ's heartbeats find peers that are gone. A stream adds a
window, as TCP has one: each message says how much its sender has read. ZeroMQ's high-water marks cannot replace it
(measured with libzmq 4.3.5):

- A receiver at its mark reads nothing from the connection, not even the replies to its own heartbeats, and ends the
  connection to a living peer after `KEEP_ALIVE`.
- A ROUTER reads from all of its peers or from none. A host whose ranks write much would hold up the message that the
  kernel waits for from another host. A socket for each host would need a port for each host.
- A ROUTER counts as writable when any of its peers has room, so a host that does not read would make a busy loop of
  waiting for room.
- Marks count messages in each of two sockets, besides the buffers of the system: with a mark of 64 on both sides, 160
  messages were under way.
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
"""Bytes that one end sends before the other has read the first of them."""
SLICE_SECONDS = 0.1
"""Seconds of a call of `Exchange.dispatch`: the thread that calls it has other things to do, as to stop a run."""
HEADER = struct.Struct("!QQ?")
"""The first bytes of a message, followed by data or by nothing: the bytes that its sender has sent before this message,
those that it has read, and whether this is its last message.

CurveZMQ rejects messages that are repeated or out of order. It does not notice missing ones, so the first count does.
"""
TICK_SECONDS = 2.0
"""Seconds between checks for peers that are gone."""
SOON_SECONDS = 0.05
"""Seconds after the end of a connection in which libzmq passes on what arrived before."""
FLUSH_SECONDS = 5.0
"""Seconds that a stream that was closed waits for a sign that its last messages arrive."""


class Stream:
    """One end of a stream of events; any thread may send, one thread receives.

    The connection must last until the peer has sent its end, which it also does to confirm this one's: with its socket,
    libzmq may drop messages that it has encoded, whatever the linger time is.

    Args:
        exchange: Carries the stream.
        send_message: Sends a message to the peer; called on the exchange's thread.

    Attributes:
        ended: Whether nothing more arrives: the peer has ended or is lost.
        gone: Whether a message could not be sent, and none has arrived since.
        lost: Whether the peer is gone, and all that it sent has arrived.
        on_ready: Called by `Exchange.dispatch` when something has arrived; see `watch`.
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
        """Send events; waits while the other end reads nothing.

        Raises:
            ChannelClosedError: The other end has closed, or this one.
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
        """Send encoded frames without waiting, unless the stream has ended; taken from ``parts`` as the peer reads."""
        if not self._is_at_end:
            self._queue.append(iter(parts))
            self._exchange.request_step(self)

    def close(self) -> None:
        """Close this end; what was sent before still leaves, unless the other end reads nothing."""
        with self._changed:
            self._closed, self._deadline = True, time.monotonic() + FLUSH_SECONDS
            self._arrived.clear()
            self._changed.notify_all()
        self._exchange.request_step(self)
        self._exchange.after_close()

    @property
    def _is_at_end(self) -> bool:
        return self.ended or self._closed

    # ---- the thread that receives

    def watch(self, selector: selectors.BaseSelector, call: Callable[[], object]) -> None:
        """Call ``call`` on the thread that waits on a selector whenever events, or the end, can be received."""
        self.on_ready = call
        if self._exchange not in selector.get_map():
            selector.register(self._exchange, selectors.EVENT_READ, self._exchange.dispatch)
        if self._arrived or self.ended:
            self._exchange.announce(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (None: no limit) for data or the end; return whether there is data."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._is_at_end, timeout)
            return bool(self._arrived)

    def receive(self, timeout: float | None = None) -> list[Stamped]:
        """Wait up to ``timeout`` seconds (None: no limit) and return some of the events, possibly none.

        Raises:
            ChannelClosedError: The other end has closed, and all it sent was returned.
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

    def take(self, message: bytes) -> None:
        """Handle a message of the peer; one that is not of this protocol ends the stream."""
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
        if self._received - self._taken > WINDOW + CHUNK:  # more than is allowed without an acknowledgement
            self.ended = True
        elif data and not self._closed:
            self._arrived.append(data)

    def lose(self) -> None:
        """End the stream: the peer is gone."""
        with self._changed:
            self.ended = self.lost = self._peer_ended = self._end_sent = True
            self._changed.notify_all()

    def step(self, now: float) -> int:
        """Send what the window allows, and this end's end; return the number of bytes."""
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
        """Send a message without data: a ROUTER notices that a peer is gone when it sends to it."""
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
        """Return whether the stream needs its connection no more."""
        return self._closed and self._end_sent and (self._peer_ended or now >= self._deadline)


class Exchange(ABC):
    """A thread that carries the streams of one ZeroMQ socket; no other thread uses the socket.

    A selector can wait for what arrives (`fileno`), and then calls `dispatch`.

    Args:
        name: Name of the thread.
        pace: Of wake-ups that carry little: each costs several times what a short message costs.

    Attributes:
        changed: Notified when a stream has changed; guards all of them.
    """

    def __init__(self, name: str, pace: RateLimiter) -> None:
        self._context, self._poller = zmq.Context(), zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self.changed = threading.Condition()
        self._wake, self._ready = WakeDescriptor(), WakeDescriptor()
        self._handle(self._wake.fileno(), self._wake.clear)
        self._due: set[Stream] = set()
        self._arrived: dict[Stream, None] = {}  # in their order
        self._next_tick = 0.0
        self._pace, self._carried = pace, 0
        self._linger = FLUSH_SECONDS
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- any thread

    def request_step(self, stream: Stream) -> None:
        """Have the thread call ``stream.step``; an interrupt of the caller leaves no lock taken."""
        self._due.add(stream)
        self._wake.set()

    def announce(self, stream: Stream) -> None:
        """Have `dispatch` call ``stream.on_ready``."""
        if stream.on_ready is not None:
            self._arrived[stream] = None
            self._ready.set()

    def after_close(self) -> None:
        """Called when a stream was closed."""
        return

    # ---- the thread that receives

    def fileno(self) -> int:
        """Return a descriptor that is readable when `dispatch` should be called."""
        return self._ready.fileno()

    def dispatch(self) -> None:
        """Call ``on_ready`` of the streams on which something has arrived."""
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
        """Call ``call`` whenever a ZeroMQ socket or a descriptor can be read."""
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
        """Give a stream a message."""
        self._carried += max(0, len(message) - HEADER.size)
        stream.gone = False
        stream.take(message)
        self._due.add(stream)
        self.announce(stream)

    def _tick_soon(self) -> None:
        self._next_tick = min(self._next_tick, time.monotonic() + SOON_SECONDS)

    def _lose(self, stream: Stream) -> None:
        stream.lose()
        self.announce(stream)

    def _destroy(self, seconds: float) -> None:
        """Close all sockets; messages that have not left have so many seconds."""
        self._context.destroy(linger=int(1000 * seconds))
        self._wake.close()
        self._ready.close()

    @abstractmethod
    def _streams(self) -> Iterable[Stream]:
        """Return the streams."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Return whether nothing is left to carry."""

    @abstractmethod
    def _tick(self) -> None:
        """Check for peers that are gone: every `TICK_SECONDS`, and soon after the end of a connection."""


# ---- the keys of both ends (CurveZMQ, ZeroMQ RFC 26), and the options of their sockets
#
# The keys are derived from the run's secret, and no key is ever sent: an end without the secret can neither connect nor
# be connected to. libzmq authenticates both ends, encrypts with keys that are new for each connection, and ends a
# connection whose peer does not answer.

SECRET_BYTES = 32
MESSAGE_BYTES = (1 << 18) + 64
"""The longest message."""
KEEP_ALIVE = (5.0, 15.0)
"""libzmq asks a silent peer every so many seconds, and ends the connection of one that does not answer for so long:
torch's defaults for ``keep_alive_interval``, and for that times ``keep_alive_max_attempt``."""
_MAX_SECONDS = 3276.0
"""libzmq keeps the sum of both in 16 bits, as tenths of a second."""


def new_secret() -> bytes:
    """Return a new secret for one run."""
    return secrets.token_bytes(SECRET_BYTES)


class Keys(NamedTuple):
    """The keys of both ends, in Z85 (ZeroMQ RFC 32)."""

    kernel_public: bytes
    kernel_secret: bytes
    host_public: bytes
    host_secret: bytes


@functools.lru_cache(maxsize=16)
def derive_keys(secret: bytes) -> Keys:
    """Derive both ends' keys from the secret, with scrypt (RFC 7914): guesses at a short secret are expensive."""
    data = hashlib.scrypt(secret, salt=b"notebook_accelerate/2", n=1 << 14, r=8, p=1, dklen=64)
    kernel, host = z85.encode(data[:32]), z85.encode(data[32:])
    return Keys(zmq.curve_public(kernel), kernel, zmq.curve_public(host), host)


def configure(zmq_socket: Any, keep_alive: tuple[float, float]) -> None:
    """Set what the sockets of both ends have in common."""
    zmq_socket.sndhwm = zmq_socket.rcvhwm = 0  # no mark: streams have windows
    zmq_socket.maxmsgsize = MESSAGE_BYTES
    interval, silent = (max(1, int(1000 * min(seconds, _MAX_SECONDS))) for seconds in keep_alive)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent)
    # A peer with other settings follows these; the next question may be an interval away.
    zmq_socket.setsockopt(zmq.HEARTBEAT_TTL, silent + interval)


# ---- batches of small messages

SMALL = 1 << 14
"""Bytes that never wait for others to be handled with them."""


class RateLimiter:
    """Delays a steady flow of small pieces of work, so that they are done in batches; the first few are not delayed.

    Args:
        seconds: Average seconds between two pieces of work.
        burst: Pieces of work before the first is delayed.
    """

    def __init__(self, seconds: float, burst: int) -> None:
        self._seconds, self._burst = seconds, burst
        self._next = 0.0

    def after(self, size: int) -> None:
        """Wait until the next piece of work is due, if the last one was small.

        Args:
            size: Bytes of the last piece of work; from `SMALL` on it is followed by the next one at once.
        """
        if not 0 < size < SMALL:
            return
        now = time.monotonic()
        self._next = max(self._next, now - self._burst * self._seconds) + self._seconds
        if self._next > now:
            time.sleep(self._next - now)
