"""Reserve the rendezvous port of the process group, for several machines and for code that creates the group itself.

Rank 0 listens on the port only when the user's function creates the process group, which may be minutes after the
launch. Until then, no other notebook and no outgoing connection may use the port. On Linux, the kernel therefore holds
two sockets that do not listen. The first is bound to the port, which does not stop a listener with ``SO_REUSEADDR``,
such as torch's store, from binding. The second is bound to an abstract name with the port's number, and other kernels
in this network namespace cannot bind the same name. The system releases both when the process ends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from notebook_accelerate.errors import PortInUseError
from notebook_accelerate.files.temporary_folders import make_private_folder, remove_private_folder
from notebook_accelerate.hardware.addresses import get_free_port
from notebook_accelerate.launch.processes import kernel_descriptors

DEFAULT = 29500
"""The port to try first for a launch that does not request one."""


SEARCH_SECONDS = 1.0
"""How many seconds to search for a free port."""


@dataclass(frozen=True)
class _HeldPort:
    port: int
    sockets: tuple[socket.socket, ...] = ()

    def close(self) -> None:
        for held in self.sockets:
            kernel_descriptors.discard(held.fileno())
            held.close()


_lock = threading.Lock()
_reserved: dict[Hashable, _HeldPort] = {}


def reserve(user: Hashable, asked: int, *, fixed: bool, here: bool = True) -> tuple[int, str]:
    """Reserve a port. Return the port, and a note if it is not the requested one.

    Args:
        user: The id of the run, or of the part of a run, that will use the port.
        asked: The requested port. 0 means any free port.
        fixed: Whether other machines know the requested port, so that no other one can be used.
        here: Whether rank 0, which listens on the port, is on this machine.

    Raises:
        PortInUseError: A fixed port is already in use, or there is no free port.
    """
    with _lock:
        port = asked
        note = ""
        held = _hold(port) if here and port else None
        if fixed:
            if here and held is None:
                other = port + 1 if port < 65535 else port - 1
                raise PortInUseError(
                    f"port {port} is taken on this machine; pass another one on all machines, such as use_port={other}"
                )
        elif held is None:
            held = _any_free()
            note = f"port {asked} is taken, using {held.port}" if asked else ""
        _reserved[user] = held or _HeldPort(port)
        return _reserved[user].port, note


def unused(count: int) -> list[int]:
    """Return different ports that are not in use on this machine, without reserving them.

    Args:
        count: The number of ports to return.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def release(user: Hashable) -> None:
    """Release the port that `reserve` has reserved for ``user``, if any."""
    with _lock:
        held = _reserved.pop(user, None)
    if held is not None:
        held.close()


def _hold(port: int) -> _HeldPort | None:
    """Reserve a port for this process. Return None if a server, this kernel or another kernel already uses it."""
    if any(held.port == port for held in _reserved.values()) or not _free(port):
        return None
    if sys.platform != "linux":  # On other systems, a bound socket blocks listeners, and there are no abstract names.
        return _HeldPort(port)
    with ExitStack() as undo:
        name = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        bound = undo.enter_context(socket.socket())
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            name.bind(f"\0notebook_accelerate.port.{port}")
            bound.bind(("127.0.0.1", port))
        except OSError:
            return None
        undo.pop_all()
    kernel_descriptors.add(name.fileno(), bound.fileno())
    return _HeldPort(port, (name, bound))


def _free(port: int) -> bool:
    # Test both addresses, because a server may listen on all interfaces, or only on loopback.
    return all(_can_bind(port, address) for address in ("127.0.0.1", ""))


def _can_bind(port: int, address: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Torch's store sets this option too.
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def _any_free() -> _HeldPort:
    deadline = time.monotonic() + SEARCH_SECONDS
    reason = "other kernels have reserved every port tried"
    while time.monotonic() < deadline:
        try:
            port = get_free_port()
        except OSError as error:  # All ports are in use, or this process has run out of descriptors.
            reason = str(error)
            break
        if (held := _hold(port)) is not None:
            return held
    raise PortInUseError(f"no free port was found on this machine ({reason}); end processes that hold ports")


# ---- private folders where the ranks of a run on this machine find each other without a port

_MEMORY = Path("/dev/shm")  # noqa: S108 - its folders have mode 0700 and unguessable names
_folders: dict[int, Path] = {}


def make_store_folder(run_id: int) -> str:
    """Create the folder of a run, in memory if possible, so that a full disk does not prevent a launch."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    _folders[run_id] = make_private_folder(parent)
    return str(_folders[run_id])


def remove_store_folder(run_id: int) -> None:
    """Remove the folder of a run, if there is one."""
    if (folder := _folders.pop(run_id, None)) is not None:
        remove_private_folder(folder)
