"""The event of a rank's failure, with which the kernel shows the failing line of a cell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.errors import ExceptionInfo, FrameInfo
from notebook_accelerate.telemetry.events import Event


def to_chain(rows: Iterable[Any]) -> tuple[ExceptionInfo, ...]:
    """Restore exceptions from their JSON form."""
    return tuple(
        ExceptionInfo(type_, message, tuple(FrameInfo(*frame) for frame in frames), link)
        for type_, message, frames, link in rows
    )


@dataclass(slots=True)
class FailureEvent(Event):
    """The function raised; ``chain`` ends with the raised exception, and ``payload`` is that exception, pickled.

    When the exception cannot be pickled, ``payload`` is empty and ``note`` has the reason.
    """

    chain: tuple[ExceptionInfo, ...]
    time: float
    kind: str = "exception"
    note: str = ""
    payload: bytes = b""

    def __post_init__(self) -> None:
        self.chain = to_chain(self.chain)

    def shift(self, seconds: float) -> None:
        """See ``Event.shift``."""
        self.time += seconds
