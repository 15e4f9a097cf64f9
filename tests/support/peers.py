"""Processes that connect to a socket and misbehave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from notebook_accelerate.telemetry import Event, LogEvent, Stamped, encode
from notebook_accelerate.telemetry.channel import _HEADER


def frame(*events: Event) -> bytes:
    """Return the bytes that encode these events."""
    return encode([Stamped(1.0, event) for event in events])


def raw(text: bytes, payload: bytes = b"") -> bytes:
    """Return a frame that contains the given bytes."""
    return _HEADER.pack(len(text), len(payload)) + text + payload


_WHOLE = frame(LogEvent("stdout", "x"))
SENDS = {
    "nothing": b"",
    "half a header": _WHOLE[:5],
    "half a frame": _WHOLE[:-3],
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 1000,
    "JSON of two gigabytes": _HEADER.pack(1 << 31, 0),
    "a payload of nine exabytes": _HEADER.pack(2, (1 << 63) - 1) + b"[]",
    "deep JSON": raw(b"[" * 100_000),
    "no list": raw(b'{"a":1}'),
    "no event": raw(b'[["LogEvent"]]'),
    "a text as the time": raw(b'[["LogEvent","now","stdout","x"]]'),
    "a reply of another type": raw(b'[["StacksReply",1.0,1,5,2.0]]'),
}
"""The bytes that a peer may send, by their description."""
PEERS = [
    *((sends, "silent") for sends in SENDS),
    *((sends, then) for sends in ("nothing", "half a frame") for then in ("closes", "suspended")),
]
"""A key of `SENDS`, and what the peer then does: it falls silent, closes the connection, or is suspended.

The second part matters only before and within a frame, because an invalid frame ends the connection in any case.
"""
_PEER = """
import json, socket, sys, time
address, then = json.loads(sys.argv[1]), sys.argv[2]
connection = socket.socket(socket.AF_UNIX) if isinstance(address, str) else socket.socket()
connection.connect(address if isinstance(address, str) else tuple(address))
connection.settimeout(5)
data = sys.stdin.buffer.read()
try:
    connection.sendall(data)
except OSError:
    pass
if then == "closes":
    connection.close()
print("sent", flush=True)
time.sleep(600)
"""


@contextmanager
def misbehaving_peer(address: str | tuple[str, int], data: bytes, then: str) -> Iterator[None]:
    """Run a process that connects to a socket, sends bytes, and then falls silent, closes it, or is suspended."""
    command = [sys.executable, "-S", "-c", _PEER, json.dumps(address), then]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(data)
        process.stdin.close()
        assert process.stdout.readline() == b"sent\n"
        if then == "suspended":
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.kill()
