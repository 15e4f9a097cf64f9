"""The events of a run's journal.

The supervisor emits them; `RunState` is the fold over them. The journal also contains the telemetry events of the ranks
(metrics, output, step times).
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
"""The rank number in records that concern the complete run."""


@dataclass(slots=True)
class RunEvent(Event):
    """Base of the events that change a `RunState`."""


@dataclass(slots=True)
class RunCreated(RunEvent):
    """A launch has begun: the first event of every journal; ``arguments`` are those of the function, by name."""

    function_name: str
    arguments: dict[str, bool | int | float | str | None] = field(default_factory=dict)


@dataclass(slots=True)
class RunPlanned(RunEvent):
    """The launch is planned; the ranks shown in this notebook are ``first_rank`` and the ``count - 1`` after it."""

    plan: LaunchPlan
    first_rank: int
    count: int


@dataclass(slots=True)
class NoteAdded(RunEvent):
    """The launch has a remark for the user, such as a port that was taken."""

    text: str


@dataclass(slots=True)
class WarningAdded(RunEvent):
    """A sanity check has found a likely mistake in the training."""

    text: str


@dataclass(slots=True)
class SavingChanged(RunEvent):
    """The run cannot be written to its folder because of ``problem``; "" when it is written again."""

    problem: str


@dataclass(slots=True)
class DiagnosisAdded(RunEvent):
    """An automatic diagnosis has finished."""

    diagnosis: Diagnosis

    def shift(self, seconds: float) -> None:
        self.diagnosis = self.diagnosis.shifted(seconds)


@dataclass(slots=True)
class RunStalled(RunEvent):
    """No rank has made progress since ``since``, in seconds since the epoch; ``cause`` says why, in a sentence."""

    since: float
    cause: str = ""

    def shift(self, seconds: float) -> None:
        self.since += seconds


@dataclass(slots=True)
class RunMoved(RunEvent):
    """A rank of a run that was stalled has made progress."""


@dataclass(slots=True)
class AttemptStarted(RunEvent):
    """All ranks are about to start; ``number`` counts from 0."""

    number: int


@dataclass(slots=True)
class RankStarted(RunEvent):
    """The process of a rank has started."""

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
    """A rank has failed; its process may still exist."""

    failure: RankFailure

    def shift(self, seconds: float) -> None:
        self.failure = replace(self.failure, time=self.failure.time + seconds)


@dataclass(slots=True)
class RankStopped(RunEvent):
    """A rank ends because it was stopped; its process may still exist."""

    rank: int


@dataclass(slots=True)
class RankExited(RunEvent):
    """The process of a rank has ended and is reaped.

    ``state`` is the rank's final state: "succeeded", "failed" or "stopped"; ``exit`` describes its end, as "exit 0".
    """

    rank: int
    state: str
    exit: str


@dataclass(slots=True)
class RankPaused(RunEvent):
    """A rank waits for ``run.resume()``."""

    rank: int


@dataclass(slots=True)
class RankResumed(RunEvent):
    """A rank that was paused continues."""

    rank: int


@dataclass(slots=True)
class PromptOpened(RunEvent):
    """A rank waits for a line of text; see ``telemetry.InputRequest``."""

    rank: int
    number: int
    kind: str
    prompt: str = ""
    password: bool = False
    shown: str = ""


@dataclass(slots=True)
class PromptClosed(RunEvent):
    """A prompt is closed: ``answered``, or because the rank has ended or continued."""

    rank: int
    answered: bool


@dataclass(slots=True)
class DebuggerLeft(RunEvent):
    """A debugger has released a rank, or the rank has exited."""

    rank: int


@dataclass(slots=True)
class StopAdvanced(RunEvent):
    """The stop sequence has reached ``phase``, one of `STOP_PHASES`.

    ``reason`` is why the ranks are stopped; "" if a rank's failure is the cause.
    """

    phase: str
    reason: str = ""


@dataclass(slots=True)
class FailuresRecorded(RunEvent):
    """The failures of the attempt, the first one first, with explanations where they are known."""

    failures: Sequence[RankFailure]

    def shift(self, seconds: float) -> None:
        self.failures = [replace(failure, time=failure.time + seconds) for failure in self.failures]


@dataclass(slots=True)
class AttemptEnded(RunEvent):
    """All ranks of the attempt have ended, or are held; another attempt follows if ``restarts``."""

    outcome: str
    restarts: bool = False


@dataclass(slots=True)
class RunEnded(RunEvent):
    """The run is over: "succeeded", "failed" or "stopped".

    Attributes:
        status: One of the three.
        error: Class of the error that the run ended with, a name in `notebook_accelerate.errors`; "" without one.
        message: The error's text.
        cause: The error of the launch itself, if there was one.
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
    """The process that ran the run is gone without recording its end; ``message`` says what is known."""

    message: str


@dataclass(slots=True)
class RunContinued(RunEvent):
    """The run goes on with the training of an earlier one, whose records up to ``until`` precede its own.

    Attributes:
        name: Name of the earlier run.
        status: How it had ended.
        checkpoint: The checkpoint that the ranks load.
        until: When that checkpoint was taken, in seconds since the epoch.
        step: The last step that was logged before; None where none was.
    """

    name: str
    status: str
    checkpoint: str
    until: float
    step: int | None = None
