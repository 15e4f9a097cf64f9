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


class StepCounter:
    """Counts the steps of a run that may have several optimizers.

    The first optimizer that takes a step is counted. Another optimizer replaces it by taking two consecutive steps, so
    that steps are also counted if a training has several phases or never uses one of its prepared optimizers.
    """

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._counted: weakref.ref[Any] | None = None
        self._rival: weakref.ref[Any] | None = None
        self._steps = 0

    def count(self, optimizer: Any) -> int:
        """Return the number of the step that an optimizer has taken, from 1; 0 if another optimizer counts."""
        if self._sink is not (sink := current_sink()):  # a new run in this process
            self._sink, self._counted, self._rival, self._steps = sink, None, None, 0
        counted = self._counted() if self._counted is not None else None
        if counted is not None and counted is not optimizer:
            if self._rival is None or self._rival() is not optimizer:
                self._rival = weakref.ref(optimizer)
                return 0
            self._steps += 1  # the rival's first step
        if counted is not optimizer:
            self._counted = weakref.ref(optimizer)
        self._rival = None
        self._steps += 1
        return self._steps
