"""Waiting on many descriptors at once, each with what to call when it is ready."""

from __future__ import annotations

import selectors
from collections.abc import Sequence
from typing import Any, Protocol


class HasFileno(Protocol):
    """Something that can be waited on."""

    def fileno(self) -> int:
        """Return its descriptor."""


class DispatchSelector(selectors.DefaultSelector):
    """A selector that counts removals, which tells whether the registrations of a batch are all valid."""

    removals = 0

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See ``selectors.BaseSelector.unregister``."""
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


__all__ = ["DispatchSelector", "HasFileno", "call_ready", "dispatch"]
