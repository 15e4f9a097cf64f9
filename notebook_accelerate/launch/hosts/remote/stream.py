"""An encrypted stream between two ends that share a secret: CurveZMQ (ZeroMQ RFC 26), behind local sockets.

The keys of both ends are derived from the secret, and no key is ever sent: an end without the secret can neither
connect nor be connected to. libzmq authenticates both ends, encrypts with keys that are new for each connection, and
ends a connection whose peer does not answer. On top of its messages, a `Link` carries the bytes of a local socket, with
a bound on what is under way, so that the rest of this package reads and writes an ordinary stream.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import select
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

SECRET_BYTES = 32
CHUNK = 1 << 18
WINDOW = 1 << 22
"""Bytes that one end sends before the other has written the first of them to its local socket."""
DATA, ACKNOWLEDGE, END, PING = b"D", b"A", b"E", b"P"
"""The first byte of a message; all but pings have a count of bytes next.

Of data, those that were sent before: CurveZMQ rejects messages that are repeated or out of order, but does not notice
missing ones. Of an acknowledgement, those that were written so far; of an end, all that were sent.
"""
_COUNT = struct.Struct("!Q")
_PREFIX = 1 + _COUNT.size
NOTHING_SENT = END + _COUNT.pack(0)
"""The end of a stream on which nothing was sent."""
KEEP_ALIVE = (5.0, 15.0)
"""libzmq asks a silent peer every so many seconds, and ends the connection of one that does not answer for so long:
torch's defaults for ``keep_alive_interval``, and for that times ``keep_alive_max_attempt``."""


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


def configure(zmq_socket: Any, keep_alive: tuple[float, float] = KEEP_ALIVE) -> None:
    """Set what the sockets of both ends have in common."""
    zmq_socket.sndhwm = zmq_socket.rcvhwm = 0  # links bound what is under way
    zmq_socket.maxmsgsize = CHUNK + 64
    interval, silent = (max(1, int(1000 * seconds)) for seconds in keep_alive)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent)
    # A peer with other settings follows these; the next question may be an interval away.
    zmq_socket.setsockopt(zmq.HEARTBEAT_TTL, silent + interval)


class ProtocolError(Exception):
    """A message is not of this protocol."""


class Link:
    """Carries the bytes of a local socket over the messages of one peer; used on one thread.

    Args:
        inner: The local socket; owned by the link.
        send: Sends a message to the peer.

    Attributes:
        descriptor: The local socket's.
        closed: Whether the link has ended: one end has closed, and all that the other can receive was passed on. The
            local socket stays open until `release`.
        peer_ended: Whether the peer has sent its end, which it also does to confirm this one's. The connection must
            last until then: with its socket, libzmq may drop messages that it has encoded, whatever the linger time is.
    """

    def __init__(self, inner: socket.socket, send: Callable[[bytes], None]) -> None:
        self._inner, self._send = inner, send
        self.descriptor = inner.fileno()
        inner.setblocking(False)
        self._pending = bytearray()
        self._sent = self._acknowledged = 0
        self._received = self._written = self._reported = 0
        self.peer_ended = self._end_sent = self._unread = self.closed = False
        self._abandoned_since: float | None = None

    def interest(self) -> int:
        """Return what to wait for on the local socket: `selectors.EVENT_READ`, `EVENT_WRITE`, both or 0."""
        if self.closed:
            return 0
        reads = self.peer_ended or self._sent - self._acknowledged < WINDOW
        return (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if self._pending else 0)

    def on_ready(self, events: int) -> int:
        """Handle what the local socket is ready for; return the number of bytes that were sent to the peer."""
        before = self._sent
        if self._pending and events & selectors.EVENT_WRITE:
            self._write()
        if self.interest() & events & selectors.EVENT_READ:
            self._read()
        return self._sent - before

    def on_message(self, message: bytes) -> None:
        """Handle a message of the peer.

        Raises:
            ProtocolError: The message is not of this protocol.
        """
        kind = message[:1]
        if self.closed:
            self.peer_ended = self.peer_ended or kind == END
            return
        if kind == PING:
            return
        if len(message) < _PREFIX or kind not in (DATA, ACKNOWLEDGE, END):
            raise ProtocolError(f"a message of {len(message)} bytes arrived that is not of this protocol")
        count = _COUNT.unpack_from(message, 1)[0]
        if kind == ACKNOWLEDGE:
            self._acknowledged = min(max(self._acknowledged, count), self._sent)
        elif count != self._received or self.peer_ended:
            raise ProtocolError(f"data from byte {count} on arrived after byte {self._received}")
        elif kind == END:
            self.end()
        else:
            self._accept(message)

    def _accept(self, message: bytes) -> None:
        self._received += len(message) - _PREFIX
        self._pending += message[_PREFIX:]
        if len(self._pending) > WINDOW + CHUNK:
            raise ProtocolError(f"more than {WINDOW} bytes arrived that were not acknowledged")
        self._write()

    def end(self) -> None:
        """Send nothing more to the peer, which has ended; the link closes once all it sent was written."""
        self.peer_ended = True
        self._send_end()
        self._close_when_written()

    def is_abandoned(self, now: float, seconds: float) -> bool:
        """Whether the local end has closed, and the peer has acknowledged nothing of what is left for ``seconds``."""
        if self.closed or self.interest() & selectors.EVENT_READ or not _hung_up(self.descriptor):
            self._abandoned_since = None
            return False
        self._abandoned_since = self._abandoned_since or now
        return now - self._abandoned_since >= seconds

    def _read(self) -> None:
        try:
            data = self._inner.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        elif not self.peer_ended:
            self._send(DATA + _COUNT.pack(self._sent) + data)
            self._sent += len(data)

    def _write(self) -> None:
        try:
            while self._pending and not self._unread:
                with memoryview(self._pending) as view:
                    count = self._inner.send(view[:CHUNK])
                del self._pending[:count]
                self._written += count
        except BlockingIOError:
            pass
        except OSError:  # the local end reads nothing more; what it has sent can still be read
            self._unread = True
        if self._unread:
            self._pending.clear()
        if self._written - self._reported >= WINDOW // 4:
            self._send(ACKNOWLEDGE + _COUNT.pack(self._written))
            self._reported = self._written
        self._close_when_written()

    def _close_when_written(self) -> None:
        if self.peer_ended and not self._pending:
            self.close()

    def close(self) -> None:
        """End the link, and let the peer know."""
        self.closed = True
        self._send_end()

    def _send_end(self) -> None:
        if not self._end_sent:
            self._end_sent = True
            self._send(END + _COUNT.pack(self._sent))

    def release(self) -> None:
        """Close the local socket, whose other end then reads the end of the stream."""
        self.closed = True
        self._inner.close()


def _hung_up(descriptor: int) -> bool:
    waiter = select.poll()
    waiter.register(descriptor, 0)
    return bool(waiter.poll(0))
