"""Where a rank's step time goes: one clock that is always in one of five parts.

The worker side calls ``switch`` where one part ends and another begins; the time since the last call belongs to the
part that was current. The clock runs only while a sink is installed (``running``), and tells of its sums once a second.
What it measures is the host's time: kernels that an accelerator runs behind the host's back show up where the host
waits for them, and the all-reduce that DistributedDataParallel overlaps with backward counts as backward.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

from notebook_accelerate.telemetry.events import Event
from notebook_accelerate.telemetry.sink import current_sink, emit

PARTS = ("waiting for data", "forward and backward", "collectives", "optimizer", "other")
DATA, COMPUTE, COLLECTIVES, OPTIMIZER, OTHER = range(5)
PERIOD = 1.0
"""Seconds between two events of a rank."""


@dataclass(slots=True)
class StepTimeEvent(Event):
    """Where the time since the last such event went: seconds by part, over ``steps`` steps that end with ``step``."""

    droppable: ClassVar[bool] = True
    field_names: ClassVar[tuple[str, ...]] = ()

    parts: dict[str, float]
    step: int
    steps: int = 1


_seconds = [0.0] * len(PARTS)
_part = OTHER
_since = 0.0
_told = 0.0
_steps = 0
_total_steps = 0


def running() -> bool:
    """Whether there is somebody to tell."""
    return current_sink() is not None


def switch(part: int) -> int:
    """Begin ``part``; return the part that was current, to go back to.

    0.15 microseconds; for the thread that trains, and only while ``running()``.
    """
    global _part, _since  # noqa: PLW0603 - one process, one training loop
    now = perf_counter()
    _seconds[_part] += now - _since
    _since = now
    before = _part
    _part = part
    return before


def start() -> None:
    """Begin from nothing: what was before the training function is nobody's step."""
    global _part, _since, _told, _steps, _total_steps  # noqa: PLW0603 - as in switch
    _seconds[:] = [0.0] * len(PARTS)
    _part, _steps, _total_steps = OTHER, 0, 0
    _since = _told = perf_counter()


def end_step() -> None:
    """Count a step; once a second, tell where the time went."""
    global _steps, _total_steps, _told  # noqa: PLW0603 - as in switch
    _steps += 1
    _total_steps += 1
    if _since - _told >= PERIOD or _total_steps == 1:
        if _total_steps > 1:  # the first one holds everything before training
            emit(StepTimeEvent(dict(zip(PARTS, _seconds, strict=True)), _total_steps, _steps))
        _told = _since
        _steps = 0
        _seconds[:] = [0.0] * len(PARTS)


def waiting(batches: Iterator[Any]) -> Generator[Any, None, None]:
    """Hand on ``batches``; the time each takes to come is time waited for data, what follows it is computing."""
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
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


__all__ = [
    "COLLECTIVES",
    "COMPUTE",
    "DATA",
    "OPTIMIZER",
    "OTHER",
    "PARTS",
    "StepTimeEvent",
    "end_step",
    "running",
    "start",
    "switch",
    "waiting",
]
