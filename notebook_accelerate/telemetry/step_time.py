"""Measure how a rank's step time is divided into five parts.

The worker's side calls ``switch`` whenever one part ends and another starts. The time since the last call belongs to
the part that ends. Time is measured only while a sink is installed (``running``), and its sums are emitted once a
second.

Only the host's time is measured. Asynchronous kernels of an accelerator count while the host waits for them, and the
all-reduce that DistributedDataParallel overlaps with backward counts as backward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import Any, ClassVar, TypeVar

from notebook_accelerate.telemetry.events import Event
from notebook_accelerate.telemetry.sink import Sink, current_sink, emit

Function = TypeVar("Function", bound=Callable[..., Any])

PARTS = ("waiting for data", "forward and backward", "collectives", "optimizer", "other")
DATA, COMPUTE, COLLECTIVES, OPTIMIZER, OTHER = range(5)
PERIOD = 1.0
"""Seconds between two events of a rank."""


@dataclass(slots=True)
class StepTimeEvent(Event):
    """The seconds spent on each part since the last such event, in ``steps`` steps that end with ``step``.

    ``own`` is the time during which the rank cannot have waited for others, or 0.0 if unknown. It excludes
    collectives and the backward pass, which exchanges gradients. It distinguishes a straggler from the ranks that wait
    for it.
    """

    droppable: ClassVar[bool] = True
    latest_by: ClassVar[tuple[str, ...]] = ()

    parts: dict[str, float]
    step: int
    steps: int = 1
    own: float = 0.0


# The time in backward is reported in "forward and backward", but counted separately, because a rank may wait for other
# ranks in backward.
BACKWARD = len(PARTS)
_seconds = [0.0] * (len(PARTS) + 1)
_part = OTHER
_since = 0.0
_reported = 0.0
_steps = 0
_total_steps = 0
_sink: Sink | None = None
_short: StepTimeEvent | None = None
"""The sums after the latest step, during a run's first second."""
at_end: set[Callable[[], None]] = set()
"""Functions called on the training thread at the end of each optimizer step, for profiles and waiting requests."""


def running() -> bool:
    """Return whether a sink is installed."""
    return current_sink() is not None


def steps() -> int:
    """Return how many optimizer steps of this run have been counted on this rank."""
    return _total_steps if _sink is not None and _sink is current_sink() else 0


def switch(part: int) -> int:
    """Start ``part`` and return the previous part.

    This takes 0.15 microseconds. Call it only on the training thread, and only while ``running()``.
    """
    global _part, _since  # noqa: PLW0603 - one training loop per process
    now = perf_counter()
    _seconds[_part] += now - _since
    _since = now
    before = _part
    _part = part
    return before


def _event() -> StepTimeEvent:
    parts = dict(zip(PARTS, _seconds, strict=False))
    parts[PARTS[COMPUTE]] += _seconds[BACKWARD]
    own = sum(_seconds) - _seconds[BACKWARD] - _seconds[COLLECTIVES]
    return StepTimeEvent(parts, _total_steps, _steps, own)


def end_step() -> None:
    """Count a step, and emit the sums once a second. A run's first step starts the clock."""
    global _steps, _total_steps, _reported, _sink, _short  # noqa: PLW0603 - as in switch
    if at_end:
        for callback in tuple(at_end):  # A signal handler may remove callbacks during the loop.
            callback()
    sink = current_sink()
    if sink is not _sink:  # This is a new run, and the time before now does not belong to one of its steps.
        _sink, _reported, _steps, _total_steps, _short = sink, _since, 0, 1, None
        _seconds[:] = [0.0] * len(_seconds)
        return
    _steps += 1
    _total_steps += 1
    if _since - _reported >= PERIOD:
        emit(_event())
        _reported, _steps, _short = _since, 0, None
        _seconds[:] = [0.0] * len(_seconds)
    elif _steps == _total_steps - 1:
        _short = _event()


def end_run() -> None:
    """Emit the sums of a run that ends within its first second, which is too short to compare the ranks' own work."""
    global _short  # noqa: PLW0603 - as in switch
    if _short is not None and _sink is current_sink():
        _short.own = 0.0
        emit(_short)
    _short = None


def backward(function: Function) -> Function:
    """Decorate a backward pass so that its time is counted. Without a sink, return the function unchanged."""
    if not running():
        return function

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        switch(BACKWARD)
        try:
            return function(*args, **kwargs)
        finally:
            switch(OTHER)

    return measured  # type: ignore[return-value]


def collective(function: Function) -> Function:
    """Decorate a collective so that its time counts as time in collectives while a sink is installed."""

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if current_sink() is None:
            return function(*args, **kwargs)
        before = switch(COLLECTIVES)
        try:
            return function(*args, **kwargs)
        finally:
            switch(before)

    return measured  # type: ignore[return-value]


def waiting(batches: Iterator[Any]) -> Generator[Any, None, None]:
    """Yield ``batches``. Time until a batch arrives counts as waiting for data, and time after that as computing."""
    end = object()
    try:
        while True:
            before = switch(DATA)
            batch = next(batches, end)
            if batch is end:
                switch(before)
                return
            switch(COMPUTE)
            yield batch
            batch = None  # Free the batch before the next one is read.
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
