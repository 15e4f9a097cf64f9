"""Wait on many descriptors, each registered with the callback to run when it is ready."""

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
    """A selector that counts removals. If the count has not changed, every registration of a batch is still valid."""

    removals = 0

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self.removals += 1
        return super().unregister(fileobj)


def dispatch(selector: DispatchSelector, timeout: float | None) -> None:
    """Wait, for at most ``timeout`` seconds if given, and call the callback of every registration that is ready."""
    call_ready(selector, selector.select(timeout))


def call_ready(selector: DispatchSelector, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
    """Call the callbacks of the registrations that are ready.

    A callback may remove other registrations of the same batch. For example, the end of a rank closes its channel.
    Removed registrations are skipped.
    """
    removals = selector.removals
    for key, _ in ready:
        # The lookup takes a microsecond, so it is skipped while nothing was removed.
        if selector.removals == removals or selector.get_map().get(key.fd) is key:
            key.data()


class WakeDescriptor:
    """A descriptor that is readable from `set` until `clear`. Forked ranks do not keep it open."""

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
        """Make the descriptor not readable. Call this before checking for work; otherwise a signal may be lost."""
        with suppress(OSError):  # The descriptor is not set, or closed.
            self._ends[0].recv(64)
        self._is_set = False

    def close(self) -> None:
        """Close the descriptor."""
        for end in self._ends:
            kernel_descriptors.discard(end.fileno())
            end.close()
