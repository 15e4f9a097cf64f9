"""The duplex channel between the kernel and one rank.

Events go up; commands, replies and standard input go down. It is a stream of frames over any connected stream
socket: a socket pair locally. A frame is ``!IQ`` (length of the JSON, length of the payload), the JSON
``[[type, time, fields...], ...]``, and the payload bytes of its last event. Nothing here is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterable

_HEADER = struct.Struct("!IQ")
_CHUNK = 1 << 18
MAX_ROWS = 500
"""Events of a frame: reading JSON holds the reader's interpreter, half a millisecond for so many."""
MAX_JSON_BYTES = 1 << 28
"""A longer JSON part is not ours: the stream is broken or hostile."""


class Stamped(NamedTuple):
    """An event and when it happened, in seconds since the epoch."""

    time: float
    event: Event


def encode(messages: Iterable[Stamped]) -> bytes:
    """Return the frames for ``messages``: events without payload share frames, one with a payload ends its frame."""
    parts: list[bytes] = []
    rows: list[list[Any]] = []

    def close_frame(payload: bytes) -> None:
        text = json.dumps(rows, separators=(",", ":"), default=_plain).encode()
        parts.append(_HEADER.pack(len(text), len(payload)) + text)
        parts.append(payload)
        rows.clear()

    for stamp, event in messages:
        rows.append([type(event).__name__, stamp, *[getattr(event, name) for name in event.names()]])
        if hasattr(event, "payload"):
            close_frame(event.payload)
        elif len(rows) >= MAX_ROWS:
            close_frame(b"")
    if rows:
        close_frame(b"")
    return b"".join(parts)


def _plain(value: object) -> object:
    """Turn number-like objects (numpy scalars, 0-d tensors) into plain numbers, anything else into text."""
    try:
        return value.item()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - no such method, or more than one element
        return str(value)


class Decoder:
    """Turns bytes as they arrive into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Stamped]:
        """Return the events that are complete now.

        Raises:
            ChannelClosedError: The bytes are not frames of this protocol.
        """
        buffer = self._buffer
        buffer += data
        found: list[Stamped] = []
        start, size = 0, len(buffer)
        while size - start >= _HEADER.size:
            json_length, payload_length = _HEADER.unpack_from(buffer, start)
            if json_length > MAX_JSON_BYTES:
                raise ChannelClosedError(
                    f"a frame of {json_length} bytes of JSON came; at most {MAX_JSON_BYTES} are allowed"
                )
            body = start + _HEADER.size
            end = body + json_length + payload_length
            if end > size:
                break
            try:
                found += _decode_frame(buffer[body : body + json_length], bytes(buffer[body + json_length : end]))
            except (ValueError, TypeError) as error:
                raise ChannelClosedError(f"a frame came that is not of this protocol: {error}") from error
            start = end
        if start:
            del buffer[:start]
        return found


_parse = json.JSONDecoder().raw_decode
"""Without looking for an encoding and for white space first: it is UTF-8, and there is none."""


def _decode_frame(text: bytes | bytearray, payload: bytes) -> list[Stamped]:
    told = text.decode()
    rows, end = _parse(told)
    if end != len(told):
        raise ValueError("something follows its JSON")
    found: list[Stamped] = []
    for name, stamp, *values in rows:
        kind = Event.registry.get(name)
        if kind is None:  # a newer peer: what is not known is skipped
            continue
        names = kind.field_names or kind.names()
        if "payload" in kind.__dataclass_fields__:
            arguments = {**dict(zip(names, values, strict=False)), "payload": payload}
            found.append(Stamped(stamp, kind(**arguments)))
        else:  # a newer peer may say more of it
            found.append(Stamped(stamp, kind(*values[: len(names)])))
    return found


class Sender(Protocol):
    """The kernel's way down to a rank."""

    def send(self, *events: Event) -> None:
        """Send events now; safe from any thread; raises ``ChannelClosedError`` when the rank is gone."""


class Connection(Protocol):
    """What a channel needs of a socket."""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""

    def sendall(self, data: bytes, /) -> None:
        """Send everything."""

    def recv(self, size: int, flags: int, /) -> bytes:
        """Return what is there, ``b""`` at the end; raise ``BlockingIOError`` while there is nothing."""

    def shutdown(self, how: int, /) -> None:
        """End the stream in one direction or both."""

    def close(self) -> None:
        """Close it."""


class Channel:
    """One end of a duplex channel.

    Args:
        connection: A connected stream socket, or what behaves like one; the channel owns it from now on.
    """

    def __init__(self, connection: Connection) -> None:
        self._socket = connection
        self._decoder = Decoder()
        self._send_lock = threading.Lock()
        self._unread: list[Stamped] = []
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return the kernel's end and the socket of the other end, to be handed to a rank."""
        ours, theirs = socket.socketpair()
        with contextlib.suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        return cls(ours), theirs

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, *events: Event) -> None:
        """Send events now; safe from any thread.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        now = time.time()
        self.send_stamped([Stamped(now, event) for event in events])

    def send_stamped(self, messages: list[Stamped]) -> None:
        """Send events with the times they already carry."""
        self.send_bytes(encode(messages))

    def receive(self, timeout: float | None = None) -> list[Stamped]:
        """Wait up to ``timeout`` seconds (None: for ever) and return what has come, possibly nothing.

        Raises:
            ChannelClosedError: The other end has closed and everything it sent was returned.
        """
        if self._closed:
            raise ChannelClosedError("the channel is closed")
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        # poll, unlike select, has no limit of 1024 descriptors.
        waiter = select.poll()
        waiter.register(self._socket, select.POLLIN)
        if not waiter.poll(None if timeout is None else timeout * 1000):
            return []
        return self.receive_available()

    def put_back(self, messages: list[Stamped]) -> None:
        """Have the next ``receive`` return ``messages``, which came too early for who waited for something else."""
        self._unread = messages + self._unread

    def readable(self) -> bool:
        """Whether there is something to read now: messages, a part of one, or the end of the stream."""
        if self._closed:
            return False
        waiter = select.poll()
        waiter.register(self._socket, select.POLLIN)
        return bool(waiter.poll(0))

    def receive_available(self) -> list[Stamped]:
        """Return what can be read without waiting; raises ``ChannelClosedError`` at the end of the stream."""
        return self.decode(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Return the undecoded bytes that can be read without waiting, for who passes them on.

        Raises:
            ChannelClosedError: The end of the stream.
        """
        try:
            data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ChannelClosedError(f"the other end is gone: {error}") from None
        if not data:
            raise ChannelClosedError("the other end has closed")
        return data

    def decode(self, data: bytes) -> list[Stamped]:
        """Return the events that ``data``, which follows on what was decoded before, completes."""
        return self._decoder.feed(data)

    def send_bytes(self, data: bytes) -> None:
        """Send frames that somebody else has encoded; safe from any thread.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        with self._send_lock:
            try:
                self._socket.sendall(data)
            except OSError as error:
                raise ChannelClosedError(f"the other end is gone: {error}") from None

    def shut(self) -> None:
        """End the stream in both directions: whoever waits on either end, on any thread, comes back."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; closing twice does nothing."""
        self._closed = True
        self._socket.close()
