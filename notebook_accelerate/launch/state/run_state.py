"""`RunState`: the state of a run, as a pure fold over the events of its journal.

The tables below list the allowed transitions. An event that requires any other transition raises `TransitionError`,
which means that the code that emits the event has a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.state import run_events as events
from notebook_accelerate.telemetry import RankFailure

if TYPE_CHECKING:
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.state.rank_result import RankResult


RUN_TRANSITIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "queued": frozenset({"queued", "starting", "failed", "stopped", "lost"}),
        "starting": frozenset({"queued", "running", "stopping", "succeeded", "failed", "stopped", "lost"}),
        # "starting" follows when the run restarts.
        "running": frozenset({"starting", "stopping", "succeeded", "failed", "stopped", "lost"}),
        # "starting" follows when the run restarts to let a notebook join. "succeeded" follows if the function has
        # returned on all ranks in the meantime.
        "stopping": frozenset({"starting", "succeeded", "failed", "stopped", "lost"}),
        "succeeded": frozenset(),
        "failed": frozenset(),
        "stopped": frozenset(),
        "lost": frozenset(),
    }
)
RANK_TRANSITIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "starting": frozenset({"running", "succeeded", "failed", "stopped"}),
        "running": frozenset({"succeeded", "failed", "stopped"}),
        "succeeded": frozenset(),
        "failed": frozenset(),
        "stopped": frozenset(),
    }
)
ATTEMPT_TRANSITIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"none": frozenset({"running"}), "running": frozenset({"ended"}), "ended": frozenset({"running"})}
)
PROMPT_TRANSITIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"none": frozenset({"open"}), "open": frozenset({"open", "none"})}  # A debugger prompts again for every command.
)
STOP_TRANSITIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "none": frozenset({"settling", "interrupting", "killing"}),
        "settling": frozenset({"held", "interrupting", "killing"}),
        "held": frozenset({"interrupting", "killing"}),
        "interrupting": frozenset({"terminating", "killing"}),
        "terminating": frozenset({"killing"}),
        "killing": frozenset(),
    }
)
"""Every attempt starts at "none".

In "settling", a rank has failed, and the others have a moment to fail or finish too. In "held", the ranks are kept as
they are, for the debugger. The remaining phases send SIGINT, SIGTERM and SIGKILL in turn.
"""
STOP_PHASES = tuple(STOP_TRANSITIONS)
ENDED = ("succeeded", "failed", "stopped")


class TransitionError(AssertionError):
    """An event is not allowed in the current state."""


@dataclass(frozen=True)
class RankInfo:
    """The state of one rank.

    Attributes:
        rank: The rank's global index.
        pid: The id of the rank's process, or None until the process has been started.
        state: "starting", "running", "succeeded", "failed", "stopped" or "lost".
        last_step: The last step that the rank logged, or None if it has not logged any.
        exit: How the process ended, such as "exit 0" or "SIGKILL", or "" while it is running.
        returned: The `RankResult` that holds the function's return value, or None if there is none.
        node: Index of the machine that the rank runs on.
        host: Name of that machine, or "" for this one.
        exited: Whether the process has exited.
    """

    rank: int
    pid: int | None = None
    state: str = "starting"
    last_step: int | None = None
    exit: str = ""
    returned: RankResult | None = field(default=None, repr=False)
    node: int = 0
    host: str = ""
    exited: bool = field(default=False, repr=False)

    @property
    def result(self) -> Any:
        """The function's return value, or None unless the rank succeeded. The first access unpickles it.

        Raises:
            SerializationError: The value cannot be transferred to the kernel.
            ResultsFreedError: The value was freed.
        """
        return None if self.returned is None else self.returned.read()


@dataclass(frozen=True)
class Attempt:
    """One attempt to run the whole group of ranks.

    Attributes:
        number: The number of the attempt, counting from 0.
        started: When the attempt started, in seconds since the epoch.
        ended: When the attempt ended, in seconds since the epoch, or None while it is running.
        outcome: "running", "succeeded", "stopped" or a line about the first failure.
    """

    number: int
    started: float
    ended: float | None = None
    outcome: str = "running"


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a run continues the training of an earlier run.

    Attributes:
        name: Name of the earlier run.
        status: How the earlier run ended.
        checkpoint: The checkpoint that the ranks load.
        time: When that checkpoint was saved, in seconds since the epoch. Earlier records belong to the earlier run.
        step: The last step that was logged before the checkpoint, or None if there was none.
        changed: The arguments of the earlier run, by name, that a branch has changed.
    """

    name: str
    status: str
    checkpoint: str
    time: float
    step: int | None
    changed: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Stall:
    """A period during which no rank makes progress while some wait in a collective.

    Attributes:
        since: When the last rank made progress, in seconds since the epoch.
        cause: The cause in a sentence, or "" if it is unknown.
    """

    since: float
    cause: str


@dataclass(frozen=True)
class RunState:
    """The state of a run at one point of its journal.

    Attributes:
        started: When the launch started, in seconds since the epoch, or 0 before the first event.
        status: A key of `RUN_TRANSITIONS`.
        ended: When the run ended, in seconds since the epoch, or None while it is running.
        plan: The launch plan, or None until it has been made.
        ranks: The ranks that are shown in this notebook, in order.
        starting: How many of these ranks are still starting.
        attempts: The attempts, oldest first.
        arguments: The function's arguments, by name.
        failures: The failures of the last attempt, starting with the first one.
        stop_phase: The phase of the last attempt's stop sequence, a key of `STOP_TRANSITIONS`.
        stop_reason: Why the ranks are being stopped, or "" if they are not, or are stopped only because of a failure.
        held: Whether ranks are kept for inspection even though the run has ended.
        prompts: The number of each rank's open prompt, by rank.
        paused: The ranks that wait for ``run.unpause()``.
        notes: Notes about the launch, such as that a port was taken.
        warnings: The likely mistakes that the sanity checks have found.
        unsaved: Why the run cannot be written to its folder, or "" if it can.
        diagnoses: Results of automatic diagnoses, oldest first.
        stall: The current stall, or None if at least one rank is making progress.
        error: Name of the class of the error that the run ended with, or "" if there was none.
        message: The error's message.
        cause: The exception that made the launch fail, if it was not raised on a rank.
        resume_points: The points at which the run continues the training of earlier runs, oldest first.
        behind: Name of the run that a queued run waits for, or "".
    """

    started: float = 0.0
    status: str = "starting"
    ended: float | None = None
    plan: LaunchPlan | None = None
    ranks: tuple[RankInfo, ...] = ()
    starting: int = 0
    attempts: tuple[Attempt, ...] = ()
    arguments: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)
    failures: tuple[RankFailure, ...] = ()
    stop_phase: str = "none"
    stop_reason: str = ""
    held: bool = False
    prompts: Mapping[int, int] = field(default_factory=dict)
    paused: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unsaved: str = ""
    diagnoses: tuple[Diagnosis, ...] = ()
    stall: Stall | None = None
    error: str = ""
    message: str = ""
    cause: BaseException | None = None
    resume_points: tuple[ResumePoint, ...] = ()
    behind: str = ""

    def apply(self, event: events.RunEvent, time: float) -> RunState:
        """Return the state after ``event``, which happened at ``time`` seconds since the epoch.

        Raises:
            TransitionError: The event is not allowed in this state.
        """
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise TransitionError(f"{type(event).__name__} is not an event of a run")
        return handler(self, event, time)

    def rank(self, rank: int) -> RankInfo:
        """Return the state of a rank.

        Raises:
            TransitionError: The run has no such rank.
        """
        index = self._index(rank)
        return self.ranks[index]

    @property
    def rank_states(self) -> dict[int, str]:
        """The state of each rank, by rank number."""
        return {info.rank: info.state for info in self.ranks}

    @property
    def attempt_status(self) -> str:
        """The status of the last attempt, a key of `ATTEMPT_TRANSITIONS`."""
        if not self.attempts:
            return "none"
        return "running" if self.attempts[-1].ended is None else "ended"

    def without_results(self, why: str) -> RunState:
        """Return the state without results and exception objects, whose frames would keep variables alive."""
        ranks = tuple(
            info if info.returned is None else replace(info, returned=info.returned.freed(why)) for info in self.ranks
        )
        return replace(self, ranks=ranks, failures=_without_exceptions(self.failures), cause=None)

    # ---- one method per event

    def _created(self, event: events.RunCreated, time: float) -> RunState:
        self._require(not self.started, event)
        return replace(self, started=time, arguments=dict(event.arguments))

    def _planned(self, event: events.RunPlanned, _time: float) -> RunState:
        self._require(self.attempt_status != "running", event)
        ranks = tuple(RankInfo(event.first_rank + index, node=event.plan.node) for index in range(event.count))
        status = "starting" if self.status == "queued" else self.status
        return self._while_not_ended(event, plan=event.plan, ranks=ranks, starting=len(ranks), status=status, behind="")

    def _queued(self, event: events.RunQueued, _time: float) -> RunState:
        status = _check("run", RUN_TRANSITIONS, self.status, "queued")
        return self._while_not_ended(event, status=status, behind=event.behind)

    def _noted(self, event: events.NoteAdded, _time: float) -> RunState:
        return replace(self, notes=(*self.notes, event.text))

    def _warned(self, event: events.WarningAdded, _time: float) -> RunState:
        return self if event.text in self.warnings else replace(self, warnings=(*self.warnings, event.text))

    def _unchanged(self, _event: events.RunEvent, _time: float) -> RunState:
        return self

    def _saving_changed(self, event: events.SavingChanged, _time: float) -> RunState:
        return replace(self, unsaved=event.problem)

    def _diagnosed(self, event: events.DiagnosisAdded, _time: float) -> RunState:
        return replace(self, diagnoses=(*self.diagnoses, event.diagnosis))

    def _stalled(self, event: events.RunStalled, _time: float) -> RunState:
        return self._while_not_ended(event, stall=Stall(event.since, event.cause))

    def _run_moved(self, _event: events.RunMoved, _time: float) -> RunState:
        return replace(self, stall=None)

    def _attempt_started(self, event: events.AttemptStarted, time: float) -> RunState:
        _check("attempt", ATTEMPT_TRANSITIONS, self.attempt_status, "running")
        self._require(self.plan is not None, event)
        ranks = tuple(RankInfo(info.rank, node=info.node) for info in self.ranks)
        attempts = (*self.attempts, Attempt(event.number, time))
        return self._while_not_ended(
            event,
            ranks=ranks,
            starting=len(ranks),
            attempts=attempts,
            stop_phase="none",
            stop_reason="",
            failures=(),
            paused=frozenset(),
            stall=None,
        )

    def _rank_started(self, event: events.RankStarted, _time: float) -> RunState:
        info = self._living(event.rank, event)
        self._require(info.pid is None, event)
        return self._with_rank(replace(info, pid=event.pid, node=event.node, host=event.host))

    def _rank_running(self, event: events.RankRunning, _time: float) -> RunState:
        after = self._moved(event.rank, "running", event)
        if after.status == "starting" and not after.starting:
            return replace(after, status=_check("run", RUN_TRANSITIONS, self.status, "running"))
        return after

    def _rank_returned(self, event: events.RankReturned, _time: float) -> RunState:
        info = self._living(event.rank, event)
        return self._with_rank(replace(info, returned=event.result))

    def _rank_failed(self, event: events.RankFailed, _time: float) -> RunState:
        return self._moved(event.failure.rank, "failed", event)

    def _rank_stopped(self, event: events.RankStopped, _time: float) -> RunState:
        return self._moved(event.rank, "stopped", event)

    def _rank_exited(self, event: events.RankExited, _time: float) -> RunState:
        info = self._living(event.rank, event)
        self._require(event.state in ENDED, event)
        after = self if info.state == event.state else self._moved(event.rank, event.state, event)
        returned = info.returned if event.state == "succeeded" else None
        after = replace(after, paused=after.paused - {event.rank})
        return after._with_rank(replace(after.rank(event.rank), exit=event.exit, returned=returned, exited=True))

    def _rank_paused(self, event: events.RankPaused, _time: float) -> RunState:
        self._living(event.rank, event)
        return replace(self, paused=self.paused | {event.rank})

    def _rank_resumed(self, event: events.RankResumed, _time: float) -> RunState:
        return replace(self, paused=self.paused - {event.rank})

    def _prompt_opened(self, event: events.PromptOpened, _time: float) -> RunState:
        _check("prompt", PROMPT_TRANSITIONS, "open" if event.rank in self.prompts else "none", "open")
        self._living(event.rank, event)
        return replace(self, prompts={**self.prompts, event.rank: event.number})

    def _prompt_closed(self, event: events.PromptClosed, _time: float) -> RunState:
        _check("prompt", PROMPT_TRANSITIONS, "open" if event.rank in self.prompts else "none", "none")
        left = {rank: number for rank, number in self.prompts.items() if rank != event.rank}
        return replace(self, prompts=left)

    def _stop_advanced(self, event: events.StopAdvanced, _time: float) -> RunState:
        _check("stop", STOP_TRANSITIONS, self.stop_phase, event.phase)
        self._require(self.ended is None or self.held, event)
        after = replace(self, stop_phase=event.phase, stop_reason=event.reason or self.stop_reason)
        if not event.reason or self.status not in ("starting", "running") or self.stop_phase != "none":
            return after  # Ending the other ranks after a failure does not count as a stop.
        return replace(after, status=_check("run", RUN_TRANSITIONS, self.status, "stopping"))

    def _failures_recorded(self, event: events.FailuresRecorded, _time: float) -> RunState:
        return self._while_not_ended(event, failures=tuple(event.failures))

    def _attempt_ended(self, event: events.AttemptEnded, time: float) -> RunState:
        _check("attempt", ATTEMPT_TRANSITIONS, self.attempt_status, "ended")
        last = replace(self.attempts[-1], ended=time, outcome=event.outcome)
        status = self.status
        if event.restarts and status != "starting":
            status = _check("run", RUN_TRANSITIONS, status, "starting")
        phase = "none" if event.restarts else self.stop_phase
        return self._while_not_ended(event, attempts=(*self.attempts[:-1], last), status=status, stop_phase=phase)

    def _run_ended(self, event: events.RunEnded, time: float) -> RunState:
        self._require(self.attempt_status != "running" and event.status in ENDED, event)
        return self._while_not_ended(
            event,
            status=_check("run", RUN_TRANSITIONS, self.status, event.status),
            ended=time,
            stall=None,
            held=self.stop_phase == "held",
            error=event.error,
            message=event.message,
            cause=event.cause,
        )

    def _ranks_released(self, event: events.RanksReleased, _time: float) -> RunState:
        self._require(self.held, event)
        return replace(self, held=False)

    def _lost(self, event: events.RunLost, time: float) -> RunState:
        ranks = tuple(
            info
            if info.exited
            else replace(info, state=info.state if info.state in ENDED else "lost", exit="lost", exited=True)
            for info in self.ranks
        )
        attempts = self.attempts
        if self.attempt_status == "running":
            attempts = (*attempts[:-1], replace(attempts[-1], ended=time, outcome="lost"))
        return self._while_not_ended(
            event,
            status=_check("run", RUN_TRANSITIONS, self.status, "lost"),
            ended=time,
            ranks=ranks,
            starting=0,
            attempts=attempts,
            prompts={},
            paused=frozenset(),
            error="RunLostError",
            message=event.message,
        )

    def _continued(self, event: events.RunContinued, _time: float) -> RunState:
        self._require(not self.attempts, event)
        found = ResumePoint(event.name, event.status, event.checkpoint, event.until, event.step, event.changed)
        return self._while_not_ended(event, resume_points=(*self.resume_points, found))

    # ---- helpers of these methods

    def _index(self, rank: int) -> int:
        index = rank - self.ranks[0].rank if self.ranks else -1
        if not 0 <= index < len(self.ranks):
            raise TransitionError(f"rank {rank} is not one of this run's {len(self.ranks)} ranks")
        return index

    def _living(self, rank: int, event: events.RunEvent) -> RankInfo:
        """Return the state of a rank whose process exists. The attempt must be running, or its ranks held."""
        info = self.rank(rank)
        self._require(not info.exited and (self.attempt_status == "running" or self.held), event)
        return info

    def _with_rank(self, info: RankInfo) -> RunState:
        index = self._index(info.rank)
        return replace(self, ranks=(*self.ranks[:index], info, *self.ranks[index + 1 :]))

    def _moved(self, rank: int, state: str, event: events.RunEvent) -> RunState:
        info = self._living(rank, event)
        after = self._with_rank(replace(info, state=_check(f"rank {rank}", RANK_TRANSITIONS, info.state, state)))
        return replace(after, starting=after.starting - 1) if info.state == "starting" else after

    def _while_not_ended(self, event: events.RunEvent, **changes: Any) -> RunState:
        self._require(self.ended is None, event)
        return replace(self, **changes)

    def _require(self, condition: bool, event: events.RunEvent) -> None:
        if not condition:
            raise TransitionError(
                f"{event} is not possible while the run is {self.status}, its attempt is {self.attempt_status}, "
                f"and its stop sequence is at {self.stop_phase!r}"
            )


def without_result(event: Any, why: str) -> Any:
    """Return an event of the journal without any result or exception object; see `RunState.without_results`."""
    if isinstance(event, events.RankReturned):
        return replace(event, result=event.result.freed(why))
    if isinstance(event, events.RankFailed):
        return replace(event, failure=_without_exceptions([event.failure])[0])
    if isinstance(event, events.FailuresRecorded):
        return replace(event, failures=_without_exceptions(event.failures))
    if isinstance(event, events.RunEnded):
        return replace(event, cause=None)
    return event


def _without_exceptions(found: Sequence[RankFailure]) -> tuple[RankFailure, ...]:
    return tuple(replace(failure, exception=None) for failure in found)


def _check(what: str, table: Mapping[str, frozenset[str]], before: str, after: str) -> str:
    """Return ``after``. Raise an error unless the table allows the transition from ``before``."""
    if after not in table[before]:
        raise TransitionError(f"{what}: {before!r} cannot become {after!r}; allowed: {sorted(table[before])}")
    return after


_HANDLERS: dict[type[events.RunEvent], Callable[[RunState, Any, float], RunState]] = {
    events.RunCreated: RunState._created,
    events.RunQueued: RunState._queued,
    events.RunPlanned: RunState._planned,
    events.NoteAdded: RunState._noted,
    events.WarningAdded: RunState._warned,
    events.SavingChanged: RunState._saving_changed,
    events.DiagnosisAdded: RunState._diagnosed,
    events.RunStalled: RunState._stalled,
    events.RunMoved: RunState._run_moved,
    events.AttemptStarted: RunState._attempt_started,
    events.RankStarted: RunState._rank_started,
    events.RankRunning: RunState._rank_running,
    events.RankReturned: RunState._rank_returned,
    events.RankFailed: RunState._rank_failed,
    events.RankStopped: RunState._rank_stopped,
    events.RankExited: RunState._rank_exited,
    events.RankPaused: RunState._rank_paused,
    events.RankResumed: RunState._rank_resumed,
    events.PromptOpened: RunState._prompt_opened,
    events.PromptClosed: RunState._prompt_closed,
    events.DebuggerLeft: RunState._unchanged,
    events.StopAdvanced: RunState._stop_advanced,
    events.FailuresRecorded: RunState._failures_recorded,
    events.AttemptEnded: RunState._attempt_ended,
    events.RunEnded: RunState._run_ended,
    events.RanksReleased: RunState._ranks_released,
    events.RunLost: RunState._lost,
    events.RunContinued: RunState._continued,
}
