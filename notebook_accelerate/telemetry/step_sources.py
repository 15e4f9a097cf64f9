"""Decides which of several sources counts a rank's steps, and whether numbers are reported twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

OPTIMIZER, LIBRARY, ACCELERATOR = range(3)
"""Sources of steps, from torch's optimizers up to this package's Accelerator: the highest that reports counts."""

_source = OPTIMIZER
_copied: ContextVar[bool] = ContextVar("copied", default=False)


def claim(source: int) -> bool:
    """Return whether ``source`` counts this rank's steps; a lower source stops counting."""
    global _source  # noqa: PLW0603 - one process, one training
    _source = max(_source, source)
    return source == _source


def counts() -> int:
    """Return the source that counts this rank's steps."""
    return _source


def reset() -> None:
    """Let any source count again: a new rank inherits the kernel's."""
    global _source  # noqa: PLW0603 - the same
    _source = OPTIMIZER


@contextmanager
def reported() -> Iterator[None]:
    """Mark what trackers and writers receive inside a with block as reported: it is not copied to the run again."""
    token = _copied.set(True)
    try:
        yield
    finally:
        _copied.reset(token)


def is_reported() -> bool:
    """Return whether the numbers that are written now have been reported."""
    return _copied.get()
