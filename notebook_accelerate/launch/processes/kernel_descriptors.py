"""The descriptors of this process that a forked rank must not keep open; all runs of the process share the set."""

from __future__ import annotations

_known: set[int] = set()


def add(*descriptors: int) -> None:
    """Have forked ranks close these descriptors."""
    _known.update(descriptors)


def discard(*descriptors: int) -> None:
    """Forget descriptors, before they are closed: others may get their numbers."""
    _known.difference_update(descriptors)


def known() -> frozenset[int]:
    """Return the descriptors."""
    return frozenset(_known)
