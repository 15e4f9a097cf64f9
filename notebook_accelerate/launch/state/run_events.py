"""The events of a run's journal.

The supervisor emits these events, and `RunState` is the fold over them. The journal also contains the telemetry events
of the ranks, such as metrics, output and step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from notebook_accelerate.telemetry import Event, RankFailure

if TYPE_CHECKING:
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.state.rank_result import RankResult


RUN = -1
"""The rank number in records that concern the whole run."""


@dataclass(slots=True)
class RunEvent(Event):
    """The base class of events that change a `RunState`."""


@dataclass(slots=True)
class RunCreated(RunEvent):
    """A launch has started. Every journal begins with this event.

    ``arguments`` contains the function's arguments by name.
    """

    function_name: str
    arguments: dict[str, bool | int | float | str | None] = field(default_factory=dict)


@dataclass(slots=True)
class RunPlanned(RunEvent):
    """The launch is planned. This notebook shows ``count`` ranks, starting with ``first_rank``."""

    plan: LaunchPlan
    first_rank: int
    count: int


@dataclass(slots=True)
class RunQueued(RunEvent):
    """The run waits until its devices are free. ``behind`` is the name of the run that it waits for."""

    behind: str


@dataclass(slots=True)
class NoteAdded(RunEvent):
    """There is a note about the launch for the user, such as that a port was taken."""

    text: str


@dataclass(slots=True)
class WarningAdded(RunEvent):
    """A sanity check has found a likely mistake in the training."""

    text: str


@dataclass(slots=True)
class SavingChanged(RunEvent):
    """Writing the run to its folder fails because of ``problem``, or works again if ``problem`` is ""."""

    problem: str


@dataclass(slots=True)
class DiagnosisAdded(RunEvent):
    """An automatic diagnosis has finished."""

    diagnosis: Diagnosis

    def shift(self, seconds: float) -> None:
        self.diagnosis = self.diagnosis.shifted(seconds)


@dataclass(slots=True)
class RunStalled(RunEvent):
    """No rank has made progress since ``since``, in seconds since the epoch. ``cause`` gives the reason if known."""

    since: float
    cause: str = ""

    def shift(self, seconds: float) -> None:
        self.since += seconds


@dataclass(slots=True)
class RunMoved(RunEvent):
    """A rank of a stalled run has made progress, which ends the stall."""


@dataclass(slots=True)
class AttemptStarted(RunEvent):
    """All ranks are about to start. ``number`` counts from 0."""

    number: int


@dataclass(slots=True)
class RankStarted(RunEvent):
    """The process of a rank has been started."""

    rank: int
    pid: int
    node: int = 0
    host: str = ""


@dataclass(slots=True)
class RankRunning(RunEvent):
    """A rank is about to call the function."""

    rank: int


@dataclass(slots=True)
class RankReturned(RunEvent):
    """The function has returned ``result`` on a rank, whose process still exists."""

    rank: int
    result: RankResult


@dataclass(slots=True)
class RankFailed(RunEvent):
    """A rank has failed, but its process may still exist."""

    failure: RankFailure

    def shift(self, seconds: float) -> None:
        self.failure = replace(self.failure, time=self.failure.time + seconds)


@dataclass(slots=True)
class RankStopped(RunEvent):
    """A rank ends because it was stopped, but its process may still exist."""

    rank: int


@dataclass(slots=True)
class RankExited(RunEvent):
    """The process of a rank has exited and was reaped.

    ``state`` is the rank's final state: "succeeded", "failed" or "stopped". ``exit`` describes how the process ended,
    for example "exit 0".
    """

    rank: int
    state: str
    exit: str


@dataclass(slots=True)
class RankPaused(RunEvent):
    """A rank waits for ``run.unpause()``."""

    rank: int


@dataclass(slots=True)
class RankResumed(RunEvent):
    """A paused rank continues."""

    rank: int


@dataclass(slots=True)
class PromptOpened(RunEvent):
    """A rank waits for a line of input; see ``telemetry.InputRequest``."""

    rank: int
    number: int
    kind: str
    prompt: str = ""
    password: bool = False
    shown: str = ""


@dataclass(slots=True)
class PromptClosed(RunEvent):
    """A prompt was closed. If it was not ``answered``, the rank ended, or continued without an answer."""

    rank: int
    answered: bool


@dataclass(slots=True)
class DebuggerLeft(RunEvent):
    """A rank has left the debugger, because the rank continues or has exited."""

    rank: int


@dataclass(slots=True)
class StopAdvanced(RunEvent):
    """The stop sequence has reached ``phase``, one of `STOP_PHASES`.

    ``reason`` says why the ranks are stopped, or is "" if they are stopped because a rank failed.
    """

    phase: str
    reason: str = ""


@dataclass(slots=True)
class FailuresRecorded(RunEvent):
    """The failures of the attempt, starting with the first one, with explanations if they are known."""

    failures: Sequence[RankFailure]

    def shift(self, seconds: float) -> None:
        self.failures = [replace(failure, time=failure.time + seconds) for failure in self.failures]


@dataclass(slots=True)
class AttemptEnded(RunEvent):
    """All ranks of the attempt have ended or are held. If ``restarts`` is set, another attempt follows."""

    outcome: str
    restarts: bool = False


@dataclass(slots=True)
class RunEnded(RunEvent):
    """The run is over.

    Attributes:
        status: "succeeded", "failed" or "stopped".
        error: Name of the error's class in `notebook_accelerate.errors`, or "" if there was no error.
        message: The error's message.
        cause: The exception that made the launch fail, if it was not raised on a rank.
    """

    status: str
    error: str = ""
    message: str = ""
    cause: BaseException | None = None


@dataclass(slots=True)
class RanksReleased(RunEvent):
    """The ranks that were held for inspection after a failure have ended."""


@dataclass(slots=True)
class RunLost(RunEvent):
    """The process that supervised the run has disappeared without recording an end. ``message`` gives details."""

    message: str


@dataclass(slots=True)
class RunContinued(RunEvent):
    """The run continues the training of an earlier run, whose records up to ``until`` precede this run's own.

    Attributes:
        name: Name of the earlier run.
        status: How the earlier run ended.
        checkpoint: The checkpoint that the ranks load.
        until: When that checkpoint was saved, in seconds since the epoch.
        step: The last step that was logged before the checkpoint, or None if there was none.
        changed: The arguments of the earlier run, by name, that a branch has changed.
    """

    name: str
    status: str
    checkpoint: str
    until: float
    step: int | None = None
    changed: dict[str, bool | int | float | str | None] = field(default_factory=dict)
