"""The descriptors that forked ranks must close, for all runs of this process."""

from __future__ import annotations

_known: set[int] = set()


def add(*descriptors: int) -> None:
    """Make forked ranks close these descriptors."""
    _known.update(descriptors)


def discard(*descriptors: int) -> None:
    """Forget descriptors. Call this before closing them, because the numbers of closed descriptors are reused."""
    _known.difference_update(descriptors)


def known() -> frozenset[int]:
    """Return the descriptors that forked ranks must close."""
    return frozenset(_known)
