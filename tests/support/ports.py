"""Ports for what a test starts."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_random = random.SystemRandom()


def free_port() -> int:
    """Return a port that nothing listens on now, at any address of this machine.

    It is none of those that the system gives to whoever asks for any: another process may get it before it is used.
    """
    while True:
        port = _random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
