"""The messages between the process of a detached run and a kernel that has attached to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from notebook_accelerate.telemetry import Event


@dataclass(slots=True)
class StopCommand(Event):
    """Stop the run; its ranks have ``grace`` seconds to end."""

    grace: float


@dataclass(slots=True)
class InterruptCommand(Event):
    """Interrupt these ranks."""

    ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ClockCommand(Event):
    """Suspend the run's time limits for a rank that the user holds, or let them go on."""

    rank: int
    held: bool


@dataclass(slots=True)
class AnswerCommand(Event):
    """Answer prompt ``number`` of a rank; None means end of file."""

    rank: int
    number: int
    text: str | None = None


@dataclass(slots=True)
class CaptureCommand(Event):
    """Read the stacks of a rank that cannot reply; `CapturedEvent` with the same number follows."""

    rank: int
    number: int


@dataclass(slots=True)
class CapturedEvent(Event):
    """The stacks of a rank; see ``debugging.process_inspection.ProcessStacks``."""

    number: int
    dump: str
    native: list[str] = field(default_factory=list)
    suspended: str = ""


@dataclass(slots=True)
class RelayedEvent(Event):
    """An encoded event for a rank, or from one."""

    rank: int
    payload: bytes


@dataclass(slots=True)
class OpenEvent(Event):
    """What the ranks wait for now.

    Attributes:
        ranks: Those that accept requests.
        debugged: Those that a debugger holds.
        prompts: The open prompts: [rank, number].
    """

    ranks: list[int] = field(default_factory=list)
    debugged: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
