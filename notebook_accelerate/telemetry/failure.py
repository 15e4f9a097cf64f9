"""How a rank ended without success, told so that the kernel can show it at its cell line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from notebook_accelerate.telemetry.events import Event


class FrameInfo(NamedTuple):
    """One line of a traceback."""

    filename: str
    lineno: int
    function: str
    source: str


class ExceptionInfo(NamedTuple):
    """One exception of a chain; ``link`` says how it led to the next: "cause", "context" or "" for the last."""

    type: str
    message: str
    frames: tuple[FrameInfo, ...]
    link: str = ""


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


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why one rank did not succeed.

    Attributes:
        rank: Global index.
        kind: "exception", "exit" (``sys.exit``, ``os._exit``), "signal", "unpicklable", "interrupted" or "lost" (with
            its machine).
        time: Seconds since the epoch.
        message: One sentence.
        chain: The exceptions, the one that left the function last; empty when the process just died.
        exception: The original exception, where it could be brought back.
        signal: Number of the signal that ended the process.
        consequence: Whether it failed because another rank did.
    """

    rank: int
    kind: str
    time: float
    message: str
    chain: tuple[ExceptionInfo, ...] = ()
    exception: BaseException | None = None
    signal: int | None = None
    consequence: bool = False
