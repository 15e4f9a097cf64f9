"""How a rank ended without success, told so that the kernel can show it at its cell line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from notebook_accelerate.errors import ExceptionInfo, FrameInfo
from notebook_accelerate.telemetry.events import Event


def to_chain(rows: Iterable[Any]) -> tuple[ExceptionInfo, ...]:
    """Make exceptions again of the lists that JSON made of them."""
    return tuple(
        ExceptionInfo(type_, message, tuple(FrameInfo(*frame) for frame in frames), link)
        for type_, message, frames, link in rows
    )


@dataclass(slots=True)
class FailureEvent(Event):
    """The function raised; ``chain`` ends with the exception that left it, ``payload`` is that exception pickled.

    ``payload`` is empty when the exception cannot be pickled; ``note`` then says why.
    """

    field_names: ClassVar[tuple[str, ...]] = ()

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
