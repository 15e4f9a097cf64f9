"""The stop sequence: the one place that decides when the ranks of an attempt are stopped, and sends the signals.

Whatever ends an attempt comes here: the stop button and ``run.stop()``, time limits, a rank's failure, another notebook
of the run, the end of the kernel. A stop sends SIGINT, SIGTERM and SIGKILL in turn; `STOP_TRANSITIONS` in
`launch.state.run_state` lists its phases.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.errors import RunStoppedError, WorkerError
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.run_events import RankExited, RankFailed, RankStopped, StopAdvanced
from notebook_accelerate.launch.state.run_state import ENDED, STOP_PHASES
from notebook_accelerate.telemetry import RankFailure, ResultEvent

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.rank_process import RankProcess
    from notebook_accelerate.launch.state.journal import Journal
    from notebook_accelerate.launch.state.prompts import PromptQueue
    from notebook_accelerate.launch.state.rank_exit import Exit
    from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank

SETTLE_SECONDS = 0.3
"""After the first failure the other ranks have this long to fail or finish by themselves, before they are stopped."""
FAILURE_GRACE = 2.0
"""Seconds from KeyboardInterrupt to SIGKILL for the ranks that are left after a failure."""
TERMINATE_AT = 0.6
"""Share of the grace after which SIGTERM follows SIGINT."""
SIGNALS = {"interrupting": signal.SIGINT, "terminating": signal.SIGTERM, "killing": signal.SIGKILL}
"""What each phase sends: a rank that dies of another signal meanwhile has failed by itself."""


@dataclass(frozen=True)
class StopReason:
    """Why a run is stopped: the error it ends with, and its text."""

    error: type[WorkerError]
    text: str


USER_STOP = StopReason(RunStoppedError, "it was stopped")


class StopSequence:
    """Stops the ranks of one attempt, and decides what each rank's end means.

    Its methods run on the supervisor's thread.

    Args:
        journal: The run's.
        prompts: Prompts of debuggers are answered with end of file when a stop begins.
        hold: Whether ranks are kept for the debugger after a failure, in the place of being stopped.

    Attributes:
        stopping: Whether the ranks are being stopped, or will be once those beside a failed one have settled.
        held: Whether the ranks were kept for the debugger after a failure.
        failures: What went wrong, in the order in which it was reported.
        reason: Why the ranks are stopped, when no failure is the cause.
        on_hold: Called when the ranks are kept as they are after a failure, for the debugger.
        on_stopping: Called when a stop begins: with its reason, or with None when a rank has failed.
        on_release: Called when ranks that were kept are let go because the debugger of one was quit.
    """

    def __init__(self, journal: Journal, prompts: PromptQueue, *, hold: bool) -> None:
        self._journal, self._prompts, self._hold = journal, prompts, hold
        self._steps: list[tuple[float, str]] = []
        self._phase = "none"
        self._signalled = self._user_stopped = False
        self.stopping = self.held = False
        self._hold_at: float | None = None
        self._oom_kills = failures.oom_kill_count()
        self.failures: list[RankFailure] = []
        self.reason: StopReason | None = None
        self.on_hold: Callable[[], None] | None = None
        self.on_stopping: Callable[[StopReason | None], None] | None = None
        self.on_release: Callable[[], None] | None = None

    # ---- what begins it

    def stop(self, grace: float, reason: StopReason) -> None:
        """Stop the ranks within ``grace`` seconds; a second call kills at once."""
        if self._user_stopped and self.stopping:
            self._steps = [(time.monotonic(), "killing")]
            return
        self._user_stopped = True
        self.reason = reason
        if self.on_stopping is not None:
            self.on_stopping(reason)
        self._begin(grace, reason)

    def follow(self, reason: StopReason, *, hold: bool = False) -> bool:
        """Stop because another notebook of the run does; return whether that is news to this one.

        Args:
            reason: Why.
            hold: Keep the ranks for the debugger instead, as the other notebook does.
        """
        kept = self.held or self._hold_at is not None
        if self.stopping or (hold and kept):
            return False
        if hold:
            self._settle_until_held()
            return True
        self.reason = reason
        self._begin(FAILURE_GRACE, reason)
        return True

    def fail(self, failure: RankFailure, rank: SupervisedRank) -> None:
        """Record the failure of a rank; the others are stopped, or held for the debugger."""
        if self._state_of(rank) in ENDED:  # a held rank reports its failure once more when it ends
            return
        if self.held or self._only_lost_a_stopped_one(failure):
            self._journal.append(RankStopped(failure.rank))
            return
        self._journal.append(RankFailed(failure))
        self.failures.append(failure)
        if self.on_stopping is not None and len(self.failures) == 1 and not self.stopping:
            self.on_stopping(None)
        if self.stopping:
            return
        if self._hold:
            if self._hold_at is None:
                self._settle_until_held()
        else:
            self._enter("settling")
            self._schedule(FAILURE_GRACE, time.monotonic() + SETTLE_SECONDS)

    def _only_lost_a_stopped_one(self, failure: RankFailure) -> bool:
        """Whether a rank that the stop has not reached yet has lost the connection to one that it has reached."""
        if not self.stopping or self.failures or self.reason is None or self.reason.error is WorkerError:
            return False  # what follows a failure, here or in another notebook, is always reported
        return failures.looks_like_lost_peer(failure)

    def _settle_until_held(self) -> None:
        self._enter("settling")
        self._hold_at = time.monotonic() + SETTLE_SECONDS

    def _begin(self, grace: float, reason: StopReason | None = None) -> None:
        self._hold_at = None
        self._enter("interrupting", reason)
        self._schedule(grace, time.monotonic())
        for prompt in self._prompts.open_prompts():
            if prompt.of_debugger:
                prompt.answer(None)  # a debugger takes a KeyboardInterrupt for itself

    def _schedule(self, grace: float, start: float) -> None:
        delays = {"interrupting": 0.0, "terminating": grace * TERMINATE_AT, "killing": grace}
        self.stopping = True
        self._steps = [(start + delay, phase) for phase, delay in delays.items()]

    def _enter(self, phase: str, reason: StopReason | None = None) -> None:
        """Record a phase; a stop that begins anew with another grace never goes back."""
        if STOP_PHASES.index(phase) > STOP_PHASES.index(self._phase):
            self._phase = phase
            self._journal.append(StopAdvanced(phase, reason.text if reason is not None else ""))

    # ---- what is due

    def next_due(self) -> float | None:
        """Return when something is to be done, in ``time.monotonic`` seconds; None when nothing is."""
        dues = [due for due, _ in self._steps[:1]] + ([self._hold_at] if self._hold_at is not None else [])
        return min(dues, default=None)

    def hold_when_due(self) -> None:
        """Keep the ranks as they are, once the others have had the time to fail too."""
        if self._hold_at is not None and time.monotonic() >= self._hold_at and self.on_hold is not None:
            self._hold_at, self.held = None, True
            self._enter("held")
            self.on_hold()

    def signal_when_due(self, living: Iterable[RankProcess]) -> None:
        """Send the signals that are due to every rank that is left."""
        ranks = list(living) if self._steps else []
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, phase = self._steps.pop(0)
            self._signalled = True
            self._enter(phase)
            for rank in ranks:
                rank.send_signal(SIGNALS[phase], group=phase == "killing")

    # ---- how a rank ended

    def rank_exited(self, rank: SupervisedRank, end: Exit) -> None:
        """Record the end of a rank's process: whether the rank succeeded, failed or was stopped."""
        number = rank.process.rank
        if rank.outcome is None and self._died_by_itself(end):
            kills = failures.oom_kill_count() - self._oom_kills
            self.fail(failures.from_exit(number, end, oom_kills=kills), rank)
        state = self._state_of(rank)
        if state not in ENDED:
            state = "succeeded" if isinstance(rank.outcome, ResultEvent) else "stopped"
        self._journal.append(RankExited(number, state, failures.exit_text(end)))
        if self.held and not self.stopping:  # its debugger was quit: the others are let go too
            self._begin(FAILURE_GRACE)
            if self.on_release is not None:
                self.on_release()

    def _died_by_itself(self, end: Exit) -> bool:
        """Whether a rank that reported no outcome ended before anything was done to end it."""
        untouched = self.reason is None and not self._signalled
        gone = self.reason is None and bool(end.lost)  # no signal to a rank makes its machine leave
        return untouched or gone or end.signal not in (None, *SIGNALS.values())

    def _state_of(self, rank: SupervisedRank) -> str:
        return self._journal.state.rank(rank.process.rank).state


__all__ = ["USER_STOP", "StopReason", "StopSequence"]
