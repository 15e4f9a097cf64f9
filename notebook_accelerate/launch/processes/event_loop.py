"""Waiting on many descriptors at once, each with what to call when it is ready."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from notebook_accelerate.launch.processes import kernel_descriptors


class HasFileno(Protocol):
    """Something that can be waited on."""

    def fileno(self) -> int:
        """Return its descriptor."""


class DispatchSelector(selectors.DefaultSelector):
    """A selector that counts removals, which tells whether the registrations of a batch are all valid."""

    removals = 0

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self.removals += 1
        return super().unregister(fileobj)


def dispatch(selector: DispatchSelector, timeout: float | None) -> None:
    """Wait up to ``timeout`` seconds (None: for ever) and call the data of every registration that became ready."""
    call_ready(selector, selector.select(timeout))


def call_ready(selector: DispatchSelector, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
    """Call the data of registrations that are ready.

    One call may close what others of the same batch stand for, as a rank's end closes its channel: those are skipped.
    """
    removals = selector.removals
    for key, _ in ready:
        if selector.removals == removals or selector.get_map().get(key.fd) is key:  # the look-up takes a microsecond
            key.data()


class WakeDescriptor:
    """A descriptor that is readable from `set` until `clear`; forked ranks do not keep it open."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)
        kernel_descriptors.add(*(end.fileno() for end in self._ends))
        self._is_set = False

    def fileno(self) -> int:
        """Return the descriptor; -1 when closed."""
        return self._ends[0].fileno()

    def set(self) -> None:
        """Make it readable; safe from any thread."""
        if not self._is_set:
            self._is_set = True
            with suppress(OSError):  # it is closed
                self._ends[1].send(b"!")

    def clear(self) -> None:
        """Make it unreadable; what it signals must be looked for afterwards."""
        with suppress(OSError):  # it is not set, or closed
            self._ends[0].recv(64)
        self._is_set = False

    def close(self) -> None:
        """Close the descriptor."""
        for end in self._ends:
            kernel_descriptors.discard(end.fileno())
            end.close()
