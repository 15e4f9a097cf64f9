"""The supervisor of a run: the thread that plans, starts, watches and restarts the ranks, and ends the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from notebook_accelerate.errors import RunStoppedError
from notebook_accelerate.launch.processes import process_backend
from notebook_accelerate.launch.state import error_messages
from notebook_accelerate.launch.state.run_events import (
    AttemptEnded,
    AttemptStarted,
    FailuresRecorded,
    RanksReleased,
    RunEnded,
)
from notebook_accelerate.launch.supervisor.rank_group import RankGroup
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP, StopReason
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend
    from notebook_accelerate.launch.supervisor.run_context import RunContext
    from notebook_accelerate.telemetry import RankFailure
    from notebook_accelerate.telemetry.inherited_state import InheritedState
    from notebook_accelerate.telemetry.store import Record


class Notebooks(Protocol):
    """Coordinates each attempt with the other notebooks of a run.

    Attributes:
        attempt: Number of the current attempt, common to all notebooks.
        reason: Why the last attempt ended.
        leave_reason: Why this notebook leaves the others before the common end.
        failures_elsewhere: Failures of another notebook that holds its ranks for the debugger.
    """

    attempt: int
    reason: str
    leave_reason: str
    failures_elsewhere: tuple[RankFailure, ...]

    @property
    def why_stopped(self) -> StopReason:
        """Why this notebook stopped waiting for the others."""

    def gather(self, attempt: int) -> LaunchPlan | None:
        """Wait for the others and return this notebook's plan; None when the run was stopped meanwhile."""

    def backend(self, own: ProcessBackend) -> ProcessBackend:
        """Return the backend that starts this notebook's ranks and attaches those of the others."""

    def follow(self, group: RankGroup) -> None:
        """Exchange news with the others while ``group`` runs."""

    def store_samples(self, records: list[Record]) -> None:
        """Store samples of this notebook's ranks."""

    def conclude(self, group: RankGroup, found: tuple[RankFailure, ...]) -> bool:
        """Agree with the others on the end of the attempt; return whether all restart."""

    def verdict(self) -> RunEnded:
        """Return how the run ended, the same in every notebook."""

    def close(self) -> None:
        """Leave the others."""


class Supervisor:
    """Supervises one run, on a separate thread.

    Args:
        context: The run.
        function: The launched function.
        arguments: Its arguments.
        inherited: State that ranks inherit from the launching thread.
        prepare: Makes the plan and appends it to the journal; called on the supervisor's thread.
        notebooks: Creates the `Notebooks` if the plan is for several; None otherwise.
        release: Called once when the run is over, before that is announced: releases the run's resources.

    Attributes:
        started: Set once all ranks have started, or failed to start.
        over: Set once the thread has finished.
        problem: The error that prevented the start of the ranks.
    """

    def __init__(
        self,
        context: RunContext,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        inherited: InheritedState,
        prepare: Callable[[], LaunchPlan],
        notebooks: Callable[[LaunchPlan], Notebooks] | None,
        release: Callable[[], None],
    ) -> None:
        self._context = context
        self._call: tuple[Callable[..., Any], tuple[Any, ...]] | None = (function, arguments)
        self._inherited, self._prepare, self._make_notebooks, self._release = inherited, prepare, notebooks, release
        self._journal = context.journal
        self._notebooks: Notebooks | None = None
        self._backend: ProcessBackend | None = None
        self.started, self.over = threading.Event(), threading.Event()
        self.problem: BaseException | None = None
        self.thread = threading.Thread(target=self._main, name=f"notebook-accelerate-run-{context.id}", daemon=True)

    # ---- the run's thread

    def _main(self) -> None:
        ended = RunEnded("failed", "WorkerError", "the launch failed")
        try:
            ended = self._run()
        finally:
            self._call = None
            self._end(ended)
        if self._backend is not None:
            self._backend.prepare_next()

    def _run(self) -> RunEnded:
        """Run to the end and return how it ended."""
        try:
            return self._attempts(self._prepare())
        except RunStoppedError as problem:  # before the ranks had started
            return self._broken(problem, "stopped", "RunStoppedError", str(problem))
        except BaseException as problem:  # noqa: BLE001 - raised by the caller, or recorded in the run
            text = f"the launch failed: {type(problem).__name__}: {problem}"
            if self._notebooks is not None:
                self._notebooks.leave_reason = text
            return self._broken(problem, "failed", "WorkerError", text, cause=problem)

    def _broken(
        self, problem: BaseException, status: str, error: str, text: str, cause: BaseException | None = None
    ) -> RunEnded:
        if not self.started.is_set():
            self.problem = error_messages.system_error(problem) if isinstance(problem, OSError) else problem
        return RunEnded(status, error, text, cause)

    def _end(self, ended: RunEnded) -> None:
        """Release the run's resources and end it, even if showing or closing fails: other threads wait for the end."""
        try:
            self._leave()
        finally:
            try:
                self._record_end(ended)
            finally:
                self._context.commands.prompts.close()
                self.started.set()
                self.over.set()

    def _record_end(self, ended: RunEnded) -> None:
        if self._context.state.attempt_status == "running":
            self._journal.append(AttemptEnded(ended.message or ended.status))
        if self._context.state.ended is None:
            self._journal.append(ended)
        if self._context.state.held:
            self._journal.append(RanksReleased())

    def _leave(self) -> None:
        try:
            if self._notebooks is not None:
                self._notebooks.close()
            self._context.commands.close()
            self._release()
        finally:
            self._context.publisher.flush(force=True)

    # ---- attempts

    def _attempts(self, plan: LaunchPlan) -> RunEnded:
        number = 0
        while True:
            gathered = self._gathered(plan, number)
            if gathered is None:
                return self._stopped_while_gathering()
            if self._notebooks is not None:
                number = self._notebooks.attempt  # a late notebook joins the others in one of their later attempts
            group = self._supervised(gathered, number)
            if self._context.state.ended is not None:  # its ranks were held after a failure, and are released now
                self._conclude_held(group)
                return RunEnded(self._context.state.status)
            if not self._restarts(group, number):
                return self._verdict(group)
            number += 1

    def _gathered(self, plan: LaunchPlan, number: int) -> LaunchPlan | None:
        """Return the plan once the other notebooks of the run have arrived; None when it was stopped before."""
        if self._make_notebooks is None:
            return plan
        if self._notebooks is None:
            self._notebooks = self._make_notebooks(plan)
        if not self._context.config.block:
            self.started.set()  # the others may take minutes; the run can be stopped meanwhile
        return self._notebooks.gather(number)

    def _stopped_while_gathering(self) -> RunEnded:
        why = self._notebooks.why_stopped if self._notebooks else USER_STOP
        text = f"{self._ended_text()}, before all nodes had joined: {why.text}"
        return RunEnded("stopped", why.error.__name__, text)

    def _supervised(self, plan: LaunchPlan, number: int) -> RankGroup:
        """Start the ranks of an attempt and supervise them until they have ended."""
        self._journal.append(AttemptStarted(number))
        self._journal.free_old_results()
        group = self._start_group(plan, number)
        sampler = Sampler(group.pids(), self._notebooks.store_samples if self._notebooks else self._journal.add)
        sampler.start()
        try:
            group.supervise()
        finally:
            group.abandon()
            sampler.stop()
            group.stops.on_hold = None  # refers to the group
            self._journal.free_old_results()
        return group

    def _start_group(self, plan: LaunchPlan, number: int) -> RankGroup:
        assert self._call is not None, "dropped only when no attempt can follow"
        backend = self._backend = process_backend(plan.start_method)(*self._call)
        if self._notebooks is None and number >= self._context.config.max_restarts:
            self._call = None  # the ranks have the arguments, which may be large
        group = RankGroup(self._context, plan)
        group.stops.on_hold = lambda: self._hold(group)
        if self._notebooks is not None:
            backend = self._notebooks.backend(backend)
            self._notebooks.follow(group)
        backend.configure(self._context.config, self._context.note, self._context.commands.stopping)
        group.start(backend, number, self._inherited)
        self.started.set()
        return group

    # ---- the end of an attempt

    def _restarts(self, group: RankGroup, number: int) -> bool:
        """Record the end of an attempt; return whether another follows. Several notebooks decide that together."""
        found = group.verdicts()
        self._journal.append(FailuresRecorded(found))
        if self._notebooks is not None:
            again = self._notebooks.conclude(group, found)
            headline = self._notebooks.reason
        else:
            again = bool(found) and group.stops.reason is None and number < self._context.config.max_restarts
            headline = error_messages.headline(found) if again else ""
        if again:
            how = "failed" if self._context.state.failures else "ended"
            self._journal.append(AttemptEnded(headline, restarts=True))
            self._context.show(f"attempt {number + 1} {how} ({headline}); starting again", "stderr")
        return again

    def _hold(self, group: RankGroup) -> None:
        """End the run with its failure while its ranks are held for the debugger."""
        found = group.verdicts() or (self._notebooks.failures_elsewhere if self._notebooks else ())
        self._context.publisher.flush(force=True)
        self._journal.append(FailuresRecorded(found))
        self._journal.append(AttemptEnded(error_messages.headline(found)))
        self._journal.append(self._failed())
        self._context.commands.prompts.reopen()

    def _conclude_held(self, group: RankGroup) -> None:
        if self._notebooks is not None:
            self._notebooks.conclude(group, self._context.state.failures)

    def _verdict(self, group: RankGroup) -> RunEnded:
        """Record how the last attempt ended and return how that ends the run."""
        found, reason = self._context.state.failures, group.stops.reason
        ended = self._notebooks.verdict() if self._notebooks else self._own_verdict(found, reason)
        outcome = error_messages.headline(found) if ended.status == "failed" and found else ended.status
        if ended.status == "failed" and not found:
            outcome = ended.message
        self._journal.append(AttemptEnded(outcome))
        return ended

    def _own_verdict(self, found: tuple[RankFailure, ...], reason: StopReason | None) -> RunEnded:
        if found:
            return self._failed()
        if reason is not None:
            return RunEnded("stopped", reason.error.__name__, f"{self._ended_text()}: {reason.text}")
        return RunEnded("succeeded")

    def _failed(self) -> RunEnded:
        return error_messages.failed(self._context.id, self._context.state)

    def _ended_text(self) -> str:
        return f"run {self._context.id} ended after {steady_time.now() - self._context.state.started:.1f} s"


__all__ = ["Notebooks", "Supervisor"]
