"""Wait on many descriptors, each registered with a callback to call when the descriptor is ready."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from notebook_accelerate.launch.processes import kernel_descriptors


class HasFileno(Protocol):
    """An object that a selector can wait on."""

    def fileno(self) -> int:
        """Return the file descriptor."""


class DispatchSelector(selectors.DefaultSelector):
    """A selector that counts removals. While the count is unchanged, every registration of a batch is still valid."""

    removals = 0

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self.removals += 1
        return super().unregister(fileobj)


def dispatch(selector: DispatchSelector, timeout: float | None) -> None:
    """Wait until a registration is ready, or for ``timeout`` seconds. Call the callbacks of all that are ready."""
    call_ready(selector, selector.select(timeout))


def call_ready(selector: DispatchSelector, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
    """Call the callbacks of the registrations that are ready.

    A callback may remove other registrations of the same batch, for example when a rank has ended and its channel is
    closed. Removed registrations are skipped.
    """
    removals = selector.removals
    for key, _ in ready:
        # Look up a registration only after a removal, because the lookup takes a microsecond.
        if selector.removals == removals or selector.get_map().get(key.fd) is key:
            key.data()


class WakeDescriptor:
    """A descriptor that is readable from a call to `set` until `clear` is called. Forked ranks do not keep it open."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)
        kernel_descriptors.add(*(end.fileno() for end in self._ends))
        self._is_set = False

    def fileno(self) -> int:
        """Return the descriptor, or -1 if it is closed."""
        return self._ends[0].fileno()

    def set(self) -> None:
        """Make the descriptor readable. Safe to call from any thread."""
        if not self._is_set:
            self._is_set = True
            with suppress(OSError):  # The descriptor is closed.
                self._ends[1].send(b"!")

    def clear(self) -> None:
        """Make the descriptor unreadable. Call this before checking for work; otherwise a call to `set` may be lost."""
        with suppress(OSError):  # The descriptor is not set, or is closed.
            self._ends[0].recv(64)
        self._is_set = False

    def close(self) -> None:
        """Close the descriptor."""
        for end in self._ends:
            kernel_descriptors.discard(end.fileno())
            end.close()
