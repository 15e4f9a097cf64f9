"""An authenticated stream between two ends that share a secret.

Each end proves that it knows the secret before anything else is read. Every later record carries a message
authentication code over its content and its position, which detects records that were injected, changed, repeated or
dropped. Nothing is encrypted: anyone who can read the network can read the run, as with the process group's traffic.

The handshake is HMAC challenge and response in both directions (RFC 2104, as in multiprocessing.connection); the
codes are keyed BLAKE2b (RFC 7693).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from contextlib import suppress

from notebook_accelerate.errors import AuthenticationError

_MAGIC = b"notebook_accelerate/1\n"
_NONCE = 32
_CODE = 16
_RECORD = struct.Struct("!I16s")
MAX_RECORD = 1 << 20
"""Maximum size of a record in bytes; a longer one was not sent by the other end."""
SECRET_BYTES = 32


def new_secret() -> bytes:
    """Return a new secret for one run."""
    return secrets.token_bytes(SECRET_BYTES)


class AuthenticatedStream:
    """A connected stream whose records are authenticated; has the socket methods that a channel uses.

    Args:
        connection: A connected stream socket, owned by this object.
        ours: Key of the records that this end sends.
        theirs: Key of the records that it receives.
    """

    def __init__(self, connection: socket.socket, ours: bytes, theirs: bytes) -> None:
        self._socket = connection
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0
        self._buffer = bytearray()
        self._broken = ""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def sendall(self, data: bytes, /) -> None:
        """Send ``data`` as records; callers must not send from two threads at once."""
        for start in range(0, len(data), MAX_RECORD):
            part = data[start : start + MAX_RECORD]
            self._socket.sendall(_RECORD.pack(len(part), _code(self._ours, self._sent, part)) + part)
            self._sent += 1

    def recv(self, size: int, flags: int, /) -> bytes:
        """Return the content of the complete records received, ``b""`` at the end of the stream.

        Raises:
            BlockingIOError: No complete record has arrived.
            ConnectionError: A record was not sent by the other end.
        """
        if self._broken:
            raise ConnectionError(self._broken)
        data = self._socket.recv(size, flags)
        if not data:
            return b""
        self._buffer += data
        try:
            found = self._records()
        except ConnectionError as error:  # nothing received from here on is trusted
            self._broken = str(error)
            self._buffer.clear()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise
        if not found:
            raise BlockingIOError
        return found

    def _records(self) -> bytes:
        """Return the content of the complete records in the buffer, and remove them."""
        found = bytearray()
        start = 0
        while (end := self._record_end(start)) is not None:
            found += self._verified(start, end)
            start = end
        del self._buffer[:start]
        return bytes(found)

    def _record_end(self, start: int) -> int | None:
        if len(self._buffer) - start < _RECORD.size:
            return None
        length, _ = _RECORD.unpack_from(self._buffer, start)
        if length > MAX_RECORD:
            raise ConnectionError(f"a record of {length} bytes arrived; at most {MAX_RECORD} are allowed")
        end = start + _RECORD.size + int(length)
        return end if len(self._buffer) >= end else None

    def _verified(self, start: int, end: int) -> bytes:
        _, code = _RECORD.unpack_from(self._buffer, start)
        part = bytes(self._buffer[start + _RECORD.size : end])
        if not hmac.compare_digest(code, _code(self._theirs, self._received, part)):
            raise ConnectionError("a record arrived that the other end did not send")
        self._received += 1
        return part

    def shutdown(self, how: int, /) -> None:
        """End the stream in one direction or both."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the stream."""
        self._socket.close()


def _code(key: bytes, number: int, part: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big") + part, key=key, digest_size=_CODE).digest()


def authenticate(
    connection: socket.socket, secret: bytes, *, listens: bool, timeout: float = 10.0
) -> AuthenticatedStream:
    """Authenticate both ends with the secret, and return the authenticated stream.

    Args:
        connection: A connected stream socket; closed on failure.
        secret: Known to the two ends only.
        listens: Whether this is the end that listened; the other end must pass the opposite.
        timeout: Seconds for the complete handshake.

    Raises:
        AuthenticationError: The other end does not know the secret, does not speak this protocol, or takes too long.
    """
    deadline = time.monotonic() + timeout
    try:
        nonce = secrets.token_bytes(_NONCE)
        connection.settimeout(timeout)
        connection.sendall(_MAGIC + nonce)
        hello = _read_exactly(connection, len(_MAGIC) + _NONCE, deadline)
        if not hello.startswith(_MAGIC):
            raise AuthenticationError("it does not speak this protocol")
        theirs = hello[len(_MAGIC) :]
        # The roles and both nonces are part of every proof: a proof cannot be reflected or replayed.
        both = nonce + theirs if listens else theirs + nonce
        # The caller proves itself first: an unauthenticated peer receives nothing to test guesses of the secret on.
        if not listens:
            connection.sendall(_proof(secret, _role(listens), both))
        proof = _read_exactly(connection, 32, deadline)
        if not hmac.compare_digest(proof, _proof(secret, _role(not listens), both)):
            raise AuthenticationError("it does not know the run's secret")
        if listens:
            connection.sendall(_proof(secret, _role(listens), both))
        connection.settimeout(None)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise AuthenticationError(f"the handshake failed: {error or type(error).__name__}") from None
        raise
    keys = [_proof(secret, b"key of " + _role(role), both) for role in (listens, not listens)]
    return AuthenticatedStream(connection, *keys)


def _role(listens: bool) -> bytes:
    return b"listener" if listens else b"caller"


def _proof(secret: bytes, what: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, what + b"\0" + nonces, "sha256")


def _read_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        connection.settimeout(left)
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data
