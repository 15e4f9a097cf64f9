"""How one attempt comes to its end: by itself, by a rank's failure, or because it is stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.errors import RunStoppedError, WorkerError
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.supervisor.stop_signals import StopSignals
from notebook_accelerate.telemetry import RankFailure, ResultEvent

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.rank_process import Exit, RankProcess
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank

SETTLE_SECONDS = 0.3
"""After the first failure the other ranks have this long to fail or finish by themselves, before they are stopped."""
FAILURE_GRACE = 2.0
"""Seconds from KeyboardInterrupt to SIGKILL for the ranks that are left after a failure."""
SENT = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""Signals that stopping sends: a rank that dies of another one meanwhile has failed by itself."""


@dataclass(frozen=True)
class StopReason:
    """Why a run is stopped: the error it ends with, and the words for it."""

    error: type[WorkerError]
    text: str


USER_STOP = StopReason(RunStoppedError, "it was stopped")


class StopSequence:
    """Decides when the ranks of one attempt are stopped, and what each one's end means.

    Args:
        run: Whose ranks they are.

    Attributes:
        failures: What went wrong, in the order in which it was heard.
        reason: Why the ranks are stopped, when no failure is the cause.
        on_hold: Called when the ranks are kept as they are after a failure, for the debugger.
        on_stopping: Called when a stop begins: with its reason, or with None when a rank has failed.
        on_letting_go: Called when ranks that were kept are let go because the debugger of one was quit.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ladder: StopSignals | None = None
        self._asked_to_stop = False
        self._oom_kills = failures.oom_kill_count()
        self._hold_at: float | None = None
        self._held = False
        self.failures: list[RankFailure] = []
        self.reason: StopReason | None = None
        self.on_hold: Callable[[], None] | None = None
        self.on_stopping: Callable[[StopReason | None], None] | None = None
        self.on_letting_go: Callable[[], None] | None = None

    # ---- stopping

    @property
    def stopping(self) -> bool:
        """Whether the ranks are being stopped."""
        return self._ladder is not None

    @property
    def held(self) -> bool:
        """Whether the ranks are kept for the debugger, though the run has ended."""
        return self._held

    def stop(self, grace: float, reason: StopReason) -> None:
        """Climb the ladder; a second call kills at once."""
        if self._asked_to_stop and self._ladder is not None:
            self._ladder.kill_now()
            return
        self._asked_to_stop = True
        self.reason = reason
        if not (self.failures or self._held):
            self._run._set_status("stopping")
        if self.on_stopping is not None:
            self.on_stopping(reason)
        self._begin_ladder(grace)

    def follow(self, reason: StopReason, *, hold: bool = False) -> bool:
        """Stop because another notebook of the run does; return whether that is news to this one.

        Args:
            reason: Why.
            hold: Keep the ranks for the debugger instead, as the other notebook does.
        """
        kept = self._held or self._hold_at is not None
        if self._ladder is not None or (hold and kept):
            return False
        if hold:
            self._hold_at = time.monotonic() + SETTLE_SECONDS
            return True
        self.reason, self._hold_at = reason, None
        if not (self._held or self.failures):
            self._run._set_status("stopping")
        self._begin_ladder(FAILURE_GRACE)
        return True

    def _begin_ladder(self, grace: float) -> None:
        self._ladder, self._hold_at = StopSignals(grace), None
        for question in self._run._board.open_questions():
            if question.of_debugger:
                question.answer(None)  # a debugger takes a KeyboardInterrupt for itself

    # ---- as time goes by

    def next_due(self) -> float | None:
        """Return when something is to be done, in ``time.monotonic`` seconds; None when nothing is."""
        if self._ladder is None or (due := self._ladder.next_due()) is None:
            return self._hold_at
        return due if self._hold_at is None else min(due, self._hold_at)

    def hold_when_due(self) -> None:
        """Keep the ranks as they are, once the others have had the time to fail too."""
        if self._hold_at is not None and time.monotonic() >= self._hold_at and self.on_hold is not None:
            self._hold_at, self._held = None, True
            self.on_hold()

    def climb(self, living: Iterable[RankProcess]) -> None:
        """Take the steps of the ladder that are due."""
        if self._ladder is not None:
            self._ladder.climb(living)

    # ---- what becomes of a rank

    def fail(self, failure: RankFailure, watched: SupervisedRank) -> None:
        """A rank has failed: the others are stopped, or held for the debugger."""
        if self._held or self._only_lost_a_stopped_one(failure):
            watched.info.state = "stopped"
            return
        watched.info.state = "failed"
        self.failures.append(failure)
        if self.on_stopping is not None and len(self.failures) == 1 and self._ladder is None:
            self.on_stopping(None)
        if self._run.config.debug and self._ladder is None:
            self._hold_at = self._hold_at or time.monotonic() + SETTLE_SECONDS
        elif self._ladder is None:
            self._ladder = StopSignals(FAILURE_GRACE, time.monotonic() + SETTLE_SECONDS)

    def _only_lost_a_stopped_one(self, failure: RankFailure) -> bool:
        """Whether a rank that the stop has not reached yet has lost one that it has reached."""
        if self._ladder is None or self.failures or self.reason is None or self.reason.error is WorkerError:
            return False  # of a failure, here or in another notebook, all that followed is told
        return failures.looks_like_lost_peer(failure)

    def judge(self, watched: SupervisedRank, end: Exit) -> None:
        """A rank has ended: say how in its state."""
        info = watched.info
        if isinstance(watched.outcome, ResultEvent) and info.state != "failed":
            info.state = "succeeded"
        elif watched.outcome is None and self._died_alone(end):
            kills = failures.oom_kill_count() - self._oom_kills
            self.fail(failures.from_exit(info.rank, end, oom_kills=kills), watched)
        elif watched.outcome is None:
            info.state = "stopped"
        if self._held and self._ladder is None:  # its debugger was quit: the others are let go too
            self._ladder = StopSignals(FAILURE_GRACE)
            if self.on_letting_go is not None:
                self.on_letting_go()

    def _died_alone(self, end: Exit) -> bool:
        """Whether a rank that left no word ended before anything was done to end it."""
        untouched = self.reason is None and (self._ladder is None or not self._ladder.begun)
        gone = self.reason is None and bool(end.lost)  # no signal to a rank makes its machine leave
        return untouched or gone or end.signal not in (None, *SENT)


__all__ = ["USER_STOP", "StopReason", "StopSequence"]
