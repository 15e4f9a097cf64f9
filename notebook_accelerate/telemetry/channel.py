"""The duplex channel between the kernel and one rank.

Ranks send events; the kernel sends requests, replies and standard input. The channel is a stream of frames over any
connected stream socket; on one machine, a socket pair is used. A frame consists of the struct ``!IQ`` (length of the
JSON, length of the payload), the JSON ``[[type, time, fields...], ...]``, and the payload bytes of its last event. The
channel never unpickles anything.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HEADER = struct.Struct("!IQ")
READ_BYTES = 1 << 16
"""Maximum bytes per read. For more than 64 KiB, the C library may map new memory each time, which takes 12 µs."""
MAX_ROWS = 500
"""Maximum number of events per frame. Parsing this many holds the receiver's GIL for half a millisecond."""
MAX_UNSENT_BYTES = 64 << 20
"""Maximum bytes queued for a rank behind the message that it is reading. Further messages are refused."""
CHECK_CLOSED_SECONDS = 1.0
"""Seconds between two checks by the sending thread of whether this end has been closed."""
_ANCILLARY = socket.CMSG_SPACE(16 * array.array("i").itemsize)
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_WITHOUT_WAITING = int(socket.MSG_DONTWAIT) | _CLOSE_ON_EXEC
"""The flags as a plain integer, because combining enum members takes a microsecond."""
MAX_JSON_BYTES = 1 << 28
"""Maximum bytes of a frame's JSON. A longer one violates the protocol, so the stream is broken or hostile."""


class Stamped(NamedTuple):
    """An event and the time at which it was emitted, in seconds since the epoch."""

    time: float
    event: Event


def encode(messages: Iterable[Stamped]) -> bytes:
    """Return the frames for ``messages``.

    Events without a payload share frames. An event with a payload is the last one of its frame.
    """
    parts: list[bytes] = []
    rows: list[list[Any]] = []

    def close_frame(payload: bytes) -> None:
        text = json.dumps(rows, separators=(",", ":"), default=to_json_scalar).encode()
        parts.append(_HEADER.pack(len(text), len(payload)) + text)
        parts.append(payload)
        rows.clear()

    for stamp, event in messages:
        rows.append([type(event).__name__, stamp, *[getattr(event, name) for name in event.field_names]])
        if event.has_payload:
            close_frame(event.payload)  # type: ignore[attr-defined]
        elif len(rows) >= MAX_ROWS:
            close_frame(b"")
    if rows:
        close_frame(b"")
    return b"".join(parts)


def to_json_scalar(value: object) -> object:
    """Convert number-like objects (numpy scalars, 0-d tensors) to plain numbers, and anything else to text."""
    try:
        return value.item()  # type: ignore[attr-defined]
    except (Exception, SystemExit):  # noqa: BLE001 - there is no such method, or more than one element
        return str(value)


class Decoder:
    """Decodes events from bytes as they arrive.

    Args:
        max_bytes: Maximum size of a frame in bytes. The channels of ranks have no limit, because a result may have any
            size.
    """

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._buffer, self._max_bytes = bytearray(), max_bytes

    def feed(self, data: bytes) -> list[Stamped]:
        """Return the events that ``data`` completes.

        Raises:
            ChannelClosedError: The bytes are not frames of this protocol.
        """
        found: list[Stamped] = []
        if self._buffer:
            self._buffer += data
            del self._buffer[: _decode_frames(self._buffer, found, self._max_bytes)]
        elif (end := _decode_frames(data, found, self._max_bytes)) < len(data):  # Complete frames need no buffer.
            self._buffer += data[end:]
        return found


def _decode_frames(data: bytes | bytearray, found: list[Stamped], max_bytes: int) -> int:
    """Append the events of the complete frames in ``data`` to ``found``. Return the end of the last complete frame.

    Raises:
        ChannelClosedError: See ``Decoder.feed``.
    """
    start, size = 0, len(data)
    while size - start >= _HEADER.size:
        json_length, payload_length = _HEADER.unpack_from(data, start)
        if json_length > MAX_JSON_BYTES:
            raise ChannelClosedError(
                f"received a frame with {json_length} bytes of JSON; at most {MAX_JSON_BYTES} are allowed"
            )
        if json_length + payload_length > max_bytes:
            raise ChannelClosedError(
                f"received a frame with {json_length + payload_length} bytes; at most {max_bytes} are allowed"
            )
        body = start + _HEADER.size
        end = body + json_length + payload_length
        if end > size:
            break
        try:
            _decode_frame(data[body : body + json_length], data[body + json_length : end], found)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChannelClosedError(f"received a frame that is not of this protocol: {error}") from error
        start = end
    return start


_parse = json.JSONDecoder().raw_decode
"""Parses JSON faster than json.loads, which detects the encoding and skips white space; frames need neither."""


_TIMES = frozenset({int, float})


def _decode_frame(text: bytes | bytearray, payload: bytes | bytearray, found: list[Stamped]) -> None:
    document = text.decode()
    rows, end = _parse(document)
    if end != len(document):
        raise ValueError("there is text after the JSON")
    if "\\ud" in document:  # Python's JSON may contain lone surrogates, which neither UTF-8 nor a front end supports.
        rows = escape_surrogates(rows)
    for name, stamp, *values in rows:
        kind = Event.registry.get(name)
        if kind is None:  # Skip an event that only a newer version of this package has.
            continue
        if type(stamp) not in _TIMES:
            raise ValueError(f"a {name} has the time {stamp!r:.80}, which is not a number")
        names = kind.field_names
        if kind.has_payload:
            arguments = {**dict(zip(names, values, strict=False)), "payload": bytes(payload)}
            found.append(Stamped(stamp, kind(**arguments)))
        else:  # Ignore additional fields of a newer version of this package.
            found.append(Stamped(stamp, kind(*values[: len(names)])))


def escape_surrogates(value: object) -> Any:
    """Return a JSON value with lone surrogates escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, list):
        return [escape_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {escape_surrogates(key): escape_surrogates(item) for key, item in value.items()}
    return value


class Sender(Protocol):
    """Sends events to a rank."""

    def send(self, *events: Event) -> None:
        """Send events now, from any thread. Raise ``ChannelClosedError`` if the rank has exited."""


class Channel:
    """One end of a duplex channel.

    Args:
        connection: A connected stream socket, which the channel owns from now on.
        max_bytes: Maximum size of a received frame in bytes.

    Attributes:
        descriptors: The received file descriptors, in order, or None if this end does not receive any. Those that
            no caller has taken are closed along with the channel.
        queues: Whether sending returns before the other end has read the data. If so, data that does not fit into the
            socket is queued in memory, because a suspended rank must not block the threads of its kernel.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = sys.maxsize) -> None:
        self._socket = connection
        self.descriptors: deque[int] | None = None
        self.queues = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._decoder = Decoder(max_bytes)
        self._send_lock = threading.Lock()
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Create a channel. Return the kernel's end, and the socket for the rank's end."""
        ours, theirs = socket.socketpair()
        with contextlib.suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        channel = cls(ours)
        channel.descriptors, channel.queues = deque(), True
        return channel, theirs

    def fileno(self) -> int:
        """Return the descriptor to wait on for data."""
        return self._socket.fileno()

    def send(self, *events: Event) -> None:
        """Send events now. Safe to call from any thread.

        Raises:
            ChannelClosedError: The other end has closed.
        """
        now = steady_time.now()
        self.send_stamped([Stamped(now, event) for event in events])

    def send_stamped(self, messages: list[Stamped]) -> None:
        """Send events with the times that they already have."""
        self.send_bytes(encode(messages))

    def receive(self, timeout: float | None = None) -> list[Stamped]:
        """Wait up to ``timeout`` seconds for events, or without a limit if it is None, and return those received.

        Raises:
            ChannelClosedError: The other end has closed, and everything it sent has been returned.
        """
        if self._closed:
            raise ChannelClosedError("the channel is closed")
        return self.receive_available() if self._poll(select.POLLIN, timeout) else []

    def readable(self) -> bool:
        """Return whether something can be read now: messages, part of a message, or the end of the stream."""
        return not self._closed and self._poll(select.POLLIN, 0)

    def _poll(self, events: int, timeout: float | None) -> bool:
        waiter = select.poll()  # Unlike select, poll works with descriptors above 1024.
        waiter.register(self._socket, events)
        return bool(waiter.poll(None if timeout is None else timeout * 1000))

    def receive_available(self) -> list[Stamped]:
        """Return the events that can be read without waiting. Raise ``ChannelClosedError`` at the end of the stream."""
        return self.decode(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Return the bytes that can be read without waiting, undecoded, so that they can be relayed.

        Raises:
            ChannelClosedError: The stream has ended.
        """
        try:
            if self.descriptors is None:
                data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            else:
                data = self._receive_descriptors(self.descriptors)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ChannelClosedError(f"the other end has closed: {error}") from None
        if not data:
            raise ChannelClosedError("the other end has closed")
        return data

    def _receive_descriptors(self, received: deque[int]) -> bytes:
        data, messages, _, _ = self._socket.recvmsg(READ_BYTES, _ANCILLARY, _WITHOUT_WAITING)
        for level, kind, content in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                for descriptor in found if not _CLOSE_ON_EXEC else ():
                    os.set_inheritable(descriptor, False)
                received.extend(found)
        return data

    def decode(self, data: bytes) -> list[Stamped]:
        """Decode ``data``, which continues the bytes decoded so far, and return the events that it completes."""
        return self._decoder.feed(data)

    def send_bytes(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send encoded frames and, over a local socket, copies of ``descriptors``. Safe to call from any thread.

        Raises:
            ChannelClosedError: The other end has closed, or no longer reads.
        """
        with self._send_lock:
            try:
                if self.queues:
                    self._send_queued(data)
                    return
                if descriptors:
                    data = data[socket.send_fds(self._socket, [data], list(descriptors)) :]
                self._socket.sendall(data)
            except (OSError, ValueError) as error:  # A closed socket has no descriptor to wait on.
                raise ChannelClosedError(f"the other end has closed: {error}") from None

    def _send_queued(self, data: bytes) -> None:
        """Send as much as fits into the socket. A thread sends the rest as the other end reads."""
        waits = bool(self._unsent)
        if waits and self._unsent_bytes - len(self._unsent[0]) + len(data) > MAX_UNSENT_BYTES:
            raise ChannelClosedError("the other end has stopped reading")
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        if waits:
            return
        self._send_some()
        if self._unsent:
            threading.Thread(target=self._send_rest, name="notebook-accelerate-send", daemon=True).start()

    def _send_some(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent[0] = self._unsent[0][sent:]
                self._unsent_bytes -= sent
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._discard_unsent()
            raise

    def _discard_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _send_rest(self) -> None:
        try:
            while self._unsent:
                if self._poll(select.POLLOUT, CHECK_CLOSED_SECONDS):
                    with self._send_lock:
                        self._send_some()
        except (OSError, ValueError):  # The channel was closed. The next call to `send` will raise the error.
            with self._send_lock:
                self._discard_unsent()

    def shut(self) -> None:
        """End the stream in both directions. This wakes all threads that wait on either end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Closing twice has no effect."""
        self._closed = True
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())
