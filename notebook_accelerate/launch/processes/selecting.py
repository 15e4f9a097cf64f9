"""Waiting on many descriptors at once, each with what to call when it is ready."""

from __future__ import annotations

import selectors
from collections.abc import Sequence
from typing import Protocol


class HasFileno(Protocol):
    """Something that can be waited on."""

    def fileno(self) -> int:
        """Return its descriptor."""


def dispatch(selector: selectors.BaseSelector, timeout: float | None) -> None:
    """Wait up to ``timeout`` seconds (None: for ever) and call the data of every registration that became ready."""
    call_ready(selector, selector.select(timeout))


def call_ready(selector: selectors.BaseSelector, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
    """Call the data of registrations that are ready.

    One call may close what others of the same batch stand for, as a rank's end closes its channel: those are skipped.
    """
    for key, _ in ready:
        if selector.get_map().get(key.fd) is key:
            key.data()


__all__ = ["HasFileno", "call_ready", "dispatch"]
