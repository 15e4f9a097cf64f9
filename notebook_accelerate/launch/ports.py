"""The port of the process group's rendezvous."""

from __future__ import annotations

import socket
import threading

from notebook_accelerate.errors import PortInUseError

_lock = threading.Lock()
_reserved: dict[int, int] = {}


def reserve(run_id: int, asked: int, *, fixed: bool, here: bool = True) -> tuple[int, str]:
    """Return a port for a run and a line that says so when it is not the one asked for.

    Args:
        run_id: The run that will use it.
        asked: The port asked for; 0 means any.
        fixed: Whether other machines have been told the port, so that no other will do.
        here: Whether rank 0, which listens, is on this machine.

    Raises:
        PortInUseError: The port is fixed and taken.
    """
    with _lock:
        port = asked
        note = ""
        if fixed:
            if here and not _free(port):
                other = port + 1 if port < 65535 else port - 1
                raise PortInUseError(
                    f"port {port} is taken on this machine; pass another, use_port={other}, everywhere"
                )
        elif port == 0 or port in _reserved.values() or not _free(port):
            port = _any_free()
            note = f"port {asked} is taken, using {port}" if asked else ""
        _reserved[run_id] = port
        return port, note


def release(run_id: int) -> None:
    """Let go of a run's port."""
    with _lock:
        _reserved.pop(run_id, None)


def _free(port: int) -> bool:
    # Both: a server on all interfaces holds loopback too, and one on loopback alone leaves the rest free.
    return all(_can_bind(port, address) for address in ("127.0.0.1", ""))


def _can_bind(port: int, address: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def _any_free() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _reserved.values():
            return port
