"""The keys of both ends of a stream, CurveZMQ (ZeroMQ RFC 26), and what their sockets have in common.

The keys are derived from the run's secret, and no key is ever sent: an end without the secret can neither connect nor
be connected to. libzmq authenticates both ends, encrypts with keys that are new for each connection, and ends a
connection whose peer does not answer.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

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
    zmq_socket.sndhwm = zmq_socket.rcvhwm = 0  # streams bound what is under way
    zmq_socket.maxmsgsize = MESSAGE_BYTES
    interval, silent = (max(1, int(1000 * min(seconds, _MAX_SECONDS))) for seconds in keep_alive)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent)
    # A peer with other settings follows these; the next question may be an interval away.
    zmq_socket.setsockopt(zmq.HEARTBEAT_TTL, silent + interval)
