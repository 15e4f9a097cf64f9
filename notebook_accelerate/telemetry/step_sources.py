"""Decides which source and which optimizer count a rank's steps, and whether numbers are reported twice."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from notebook_accelerate.telemetry.sink import Sink, current_sink

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


PHASE_STEPS = 8
"""Steps in a row after which an optimizer counts, whatever the other one has taken."""


class StepCounter:
    """Counts the steps of a run that may have several optimizers.

    The first optimizer that takes a step counts. Another one replaces it by taking more steps in a row than that one
    ever did, or more than `PHASE_STEPS`: a training with several phases counts the steps of all of them.
    """

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._counted: weakref.ref[Any] | None = None
        self._last: weakref.ref[Any] | None = None
        self._in_a_row = self._longest = self._steps = 0

    def count(self, optimizer: Any) -> int:
        """Return the number of the step that an optimizer has taken, from 1; 0 if another optimizer counts."""
        if self._sink is not (sink := current_sink()):  # a new run in this process
            self._sink, self._counted, self._last = sink, None, None
            self._in_a_row = self._longest = self._steps = 0
        if self._last is not None and self._last() is optimizer:
            self._in_a_row += 1
        else:
            self._last, self._in_a_row = weakref.ref(optimizer), 1
        counted = self._counted() if self._counted is not None else None
        if counted is optimizer:
            self._longest = max(self._longest, self._in_a_row)
            self._steps += 1
            return self._steps
        if counted is not None and self._in_a_row <= min(self._longest, PHASE_STEPS):
            return 0
        self._counted, self._longest = weakref.ref(optimizer), self._in_a_row
        self._steps += self._in_a_row
        return self._steps
