"""The stop sequence, the only code that decides when the ranks of an attempt are stopped, and that signals them.

Every cause that ends an attempt is handled here: the stop button and ``run.stop()``, time limits, the failure of a
rank, and the exit of the kernel. A stop sends SIGINT, SIGTERM and SIGKILL in turn. Its phases are listed in
`launch.state.run_state.STOP_TRANSITIONS`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
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
    from notebook_accelerate.launch.state.rank_result import Exit
    from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank

SETTLE_SECONDS = 0.3
"""How many seconds the other ranks have to fail or finish after the first failure, before they are stopped."""
FAILURE_GRACE = 2.0
"""Seconds from SIGINT to SIGKILL for the remaining ranks after a failure."""
TERMINATE_AT = 0.6
"""The fraction of the grace period after which SIGTERM follows SIGINT."""
SIGNALS = {"interrupting": signal.SIGINT, "terminating": signal.SIGTERM, "killing": signal.SIGKILL}
"""The signal of each phase. A rank that is killed by another signal has failed by itself."""


@dataclass(frozen=True)
class StopReason:
    """Why a run is stopped: the class of the error that the run ends with, and the text in its message."""

    error: type[WorkerError]
    text: str


USER_STOP = StopReason(RunStoppedError, "it was stopped")


class StopSequence:
    """Stops the ranks of one attempt, and decides whether each rank succeeded, failed or was stopped.

    Its methods run on the supervisor's thread.

    Args:
        journal: The journal to record the stop and the exits of ranks in.
        prompts: The ranks' prompts. When a stop starts, debuggers' prompts receive end-of-file.
        hold: Whether to hold the ranks for the debugger after a failure instead of stopping them.

    Attributes:
        stopping: Whether the ranks are being stopped, or will be once the peers of a failed rank have had time to fail
            or finish.
        held: Whether the ranks were held for the debugger after a failure.
        failures: The failures, in the order in which they were reported.
        reason: Why the ranks are stopped, or None if they are not being stopped, or if a failure is the only reason.
        killed_at: When SIGKILL was sent, by ``time.monotonic``, or None until then.
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
        self.killed_at: float | None = None

    # ---- causes of a stop

    def stop(self, grace: float, reason: StopReason) -> None:
        """Schedule the signals. SIGKILL is due after ``grace`` seconds, or immediately if this is called again."""
        if self._user_stopped and self.stopping:
            self._steps = [(time.monotonic(), "killing")]
            return
        self._user_stopped = True
        self.reason = reason
        self._begin(grace, reason)

    def make_room(self, reason: StopReason) -> bool:
        """Stop the ranks so that the run can restart with another host. Return False if they are already stopping."""
        if self.stopping:
            return False
        self.reason = reason
        self._begin(FAILURE_GRACE, reason)
        return True

    def fail(self, failure: RankFailure, rank: SupervisedRank) -> None:
        """Record the failure of a rank, and schedule the stop of the other ranks, or their hold for the debugger."""
        if self._state_of(rank) in ENDED:  # A held rank reports the same failure again when it ends.
            return
        if self.held or self._only_lost_a_stopped_one(failure):
            self._journal.append(RankStopped(failure.rank))
            return
        self._journal.append(RankFailed(failure))
        self.failures.append(failure)
        if self.stopping:
            return
        if self._hold:
            if self._hold_at is None:
                self._settle_until_held()
        else:
            self._enter("settling")
            self._schedule(FAILURE_GRACE, time.monotonic() + SETTLE_SECONDS)

    def _only_lost_a_stopped_one(self, failure: RankFailure) -> bool:
        """Return whether a running rank failed only because the stop has already ended one of its peers."""
        if not self.stopping or self.failures or self.reason is None or self.reason.error is WorkerError:
            return False  # When a rank has failed by itself, report all failures.
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
                # Debuggers handle KeyboardInterrupt themselves, so the interrupt would not end their prompts.
                prompt.answer(None)

    def _schedule(self, grace: float, start: float) -> None:
        delays = {"interrupting": 0.0, "terminating": grace * TERMINATE_AT, "killing": grace}
        self.stopping = True
        self._steps = [(start + delay, phase) for phase, delay in delays.items()]

    def _enter(self, phase: str, reason: StopReason | None = None) -> None:
        """Enter a phase and record it, unless the current phase is the same or a later one, as in a repeated stop."""
        if STOP_PHASES.index(phase) > STOP_PHASES.index(self._phase):
            self._phase = phase
            self._journal.append(StopAdvanced(phase, reason.text if reason is not None else ""))

    # ---- due actions

    def next_due(self) -> float | None:
        """Return when the next action is due, by ``time.monotonic``, or None if no action is scheduled."""
        dues = [due for due, _ in self._steps[:1]] + ([self._hold_at] if self._hold_at is not None else [])
        return min(dues, default=None)

    def hold_when_due(self) -> bool:
        """Hold the ranks if the failed rank's peers have had time to fail too. Return whether this call held them."""
        if self._hold_at is None or time.monotonic() < self._hold_at:
            return False
        self._hold_at, self.held = None, True
        self._enter("held")
        return True

    def signal_when_due(self, living: Iterable[RankProcess]) -> None:
        """Send all signals that are due to the living ranks."""
        ranks = list(living) if self._steps else []
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, phase = self._steps.pop(0)
            self._signalled = True
            self._enter(phase)
            if phase == "killing":
                self.killed_at = time.monotonic()
            for rank in ranks:
                rank.send_signal(SIGNALS[phase], group=phase == "killing")

    # ---- how a rank ended

    def rank_exited(self, rank: SupervisedRank, end: Exit) -> None:
        """Record how a rank's process ended: whether the rank succeeded, failed or was stopped."""
        number = rank.process.rank
        if rank.outcome is None and self._died_by_itself(end):
            kills = self._oom_kills_on(rank.process.host)
            self.fail(failures.from_exit(number, end, oom_kills=kills, channel_error=rank.channel_error), rank)
        state = self._state_of(rank)
        if state not in ENDED:
            state = "succeeded" if isinstance(rank.outcome, ResultEvent) else "stopped"
        self._journal.append(RankExited(number, state, failures.exit_text(end)))
        if self.held and not self.stopping:  # The user has quit this rank's debugger, so release the others too.
            self._begin(FAILURE_GRACE)

    def _oom_kills_on(self, host: str) -> int | None:
        """Return the number of out-of-memory kills since the attempt started, or None if unknown, as on other hosts."""
        now = None if host else failures.oom_kill_count()
        return None if now is None or self._oom_kills is None else now - self._oom_kills

    def _died_by_itself(self, end: Exit) -> bool:
        """Return whether a rank that did not report any outcome ended by itself rather than because of a stop."""
        untouched = self.reason is None and not self._signalled
        gone = self.reason is None and bool(end.lost)  # Signals sent to ranks do not cause the loss of a machine.
        return untouched or gone or end.signal not in (None, *SIGNALS.values())

    def _state_of(self, rank: SupervisedRank) -> str:
        return self._journal.state.rank(rank.process.rank).state
