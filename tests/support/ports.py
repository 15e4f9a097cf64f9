"""Free ports for tests."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_random = random.SystemRandom()


def free_port() -> int:
    """Return a port that is currently free on all addresses of this machine.

    The port is outside the range of ephemeral ports, so that the system does not give it to another process first.
    """
    while True:
        port = _random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
