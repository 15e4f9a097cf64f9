"""A proxy on loopback between the two ends of a connection, for tests that interfere with its data."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class LoopbackProxy:
    """Accepts connections and forwards each to a port of the loopback interface. Subclasses copy the data.

    Args:
        port: The port to forward to.

    Attributes:
        port: The port that callers connect to.
    """

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._to = port
        self._open: list[socket.socket] = [self._listener]

    def _start(self) -> None:
        """Start accepting connections."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                called = socket.create_connection(("127.0.0.1", self._to))
                self._open += [caller, called]
                for copy, ends in ((self._copy_up, (caller, called)), (self._copy_down, (called, caller))):
                    threading.Thread(target=copy, args=ends, daemon=True).start()

    def _copy_up(self, caller: socket.socket, called: socket.socket) -> None:
        raise NotImplementedError

    def _copy_down(self, called: socket.socket, caller: socket.socket) -> None:
        raise NotImplementedError
