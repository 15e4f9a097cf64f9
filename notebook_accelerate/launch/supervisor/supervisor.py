"""The supervisor of a run: the thread that plans, starts, watches and restarts the ranks, and ends the run."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from notebook_accelerate.errors import RunStoppedError
from notebook_accelerate.launch.processes import process_backend
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.run_events import (
    AttemptEnded,
    AttemptStarted,
    FailuresRecorded,
    RanksReleased,
    RunEnded,
)
from notebook_accelerate.launch.supervisor.rank_group import RankGroup
from notebook_accelerate.launch.supervisor.stop_sequence import StopReason
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend
    from notebook_accelerate.launch.supervisor.run_context import RunContext
    from notebook_accelerate.telemetry import RankFailure
    from notebook_accelerate.telemetry.inherited_state import InheritedState


# The thread that runs a launch: what supervisors and notebooks that join another one's run have in common.


@dataclass(frozen=True)
class Launch:
    """What the thread of a run is given.

    Attributes:
        context: The run.
        function: The launched function.
        arguments: Its arguments.
        inherited: State that ranks inherit from the launching thread.
        prepare: Makes the plan and appends it to the journal; called on the run's thread.
        release: Called once when the run is over, before that is announced: releases the run's resources.
    """

    context: RunContext
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    inherited: InheritedState
    prepare: Callable[[], LaunchPlan]
    release: Callable[[], None]


class RunThread(ABC):
    """Runs a launch on a separate thread, and ends the run whatever happens there.

    Args:
        launch: What to run; not kept, because its arguments may be large.

    Attributes:
        thread: The thread, which its creator starts.
        started: Set once all ranks have started, or failed to start; or earlier, where that may take minutes.
        over: Set once the run has ended.
        problem: The error that prevented the start of the ranks.
    """

    def __init__(self, launch: Launch) -> None:
        self._context, self._journal = launch.context, launch.context.journal
        self._call: tuple[Callable[..., Any], tuple[Any, ...]] | None = (launch.function, launch.arguments)
        self._inherited, self._prepare, self._release = launch.inherited, launch.prepare, launch.release
        self.started, self.over = threading.Event(), threading.Event()
        self.problem: BaseException | None = None
        name = f"notebook-accelerate-run-{launch.context.id}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def _main(self) -> None:
        ended = RunEnded("failed", "WorkerError", "the launch failed")
        try:
            ended = self._outcome()
        finally:
            self._call = None
            self._end(ended)

    def _outcome(self) -> RunEnded:
        """Run to the end and return how it ended; the frame of an error must not refer to the error."""
        try:
            return self._run(self._prepare())
        except RunStoppedError as problem:  # before the ranks had started
            return self._broken(problem, "stopped", "RunStoppedError", str(problem))
        except BaseException as problem:  # noqa: BLE001 - raised by the caller, or recorded in the run
            text = f"the launch failed: {type(problem).__name__}: {problem}"
            return self._broken(problem, "failed", "WorkerError", text, cause=problem)

    @abstractmethod
    def _run(self, plan: LaunchPlan) -> RunEnded:
        """Run to the end and return how it ended."""

    def _broken(
        self, problem: BaseException, status: str, error: str, text: str, cause: BaseException | None = None
    ) -> RunEnded:
        if not self.started.is_set():
            self.problem = failures.system_error(problem) if isinstance(problem, OSError) else problem
        return RunEnded(status, error, text, cause)

    def _end(self, ended: RunEnded) -> None:
        """Release the run's resources and end it, even if showing or closing fails: other threads wait for the end."""
        with ExitStack() as last:  # the first one last
            last.callback(self.over.set)
            last.callback(self.started.set)
            last.callback(self._context.commands.prompts.close)
            last.callback(self._record_end, ended)
            last.callback(partial(self._context.publisher.flush, force=True))
            last.callback(self._release)
            last.callback(self._context.commands.close)
            last.callback(self._disconnect, ended)

    @abstractmethod
    def _disconnect(self, ended: RunEnded) -> None:
        """Close the connections to other machines."""

    def _record_end(self, ended: RunEnded) -> None:
        if self._context.state.attempt_status == "running":
            self._journal.append(AttemptEnded(ended.message or ended.status))
        if self._context.state.ended is None:
            self._journal.append(ended)
        if self._context.state.held:
            self._journal.append(RanksReleased())


class Hosts(Protocol):
    """The other hosts of a run: processes on other machines that run ranks for this supervisor."""

    def gather(self, attempt: int) -> LaunchPlan | StopReason:
        """Wait until the hosts of an attempt are there and return the plan, or why the run is stopped meanwhile."""

    def backend(self, own: ProcessBackend) -> ProcessBackend:
        """Return the backend that starts the ranks here, by ``own``, and those of the hosts."""

    def follow(self, group: RankGroup) -> None:
        """Listen to the hosts while the ranks of ``group`` run."""

    def can_restart(self, group: RankGroup, found: Sequence[RankFailure]) -> bool:
        """Return whether another attempt can run after one that ended with the failures ``found``.

        That is also so where it was stopped to include a late host. Called once at the end of every attempt.
        """

    def close(self, ended: RunEnded) -> None:
        """Let the hosts know how the run ended, and close the connections to them."""


class Supervisor(RunThread):
    """Supervises one run.

    Args:
        launch: See `RunThread`.
        hosts: Creates the `Hosts` of a run on several machines; None otherwise.
    """

    def __init__(self, launch: Launch, hosts: Callable[[LaunchPlan], Hosts] | None = None) -> None:
        super().__init__(launch)
        self._make_hosts = hosts
        self._hosts: Hosts | None = None
        self._backend: ProcessBackend | None = None

    def _main(self) -> None:
        super()._main()
        if self._backend is not None:
            self._backend.prepare_next()

    def _disconnect(self, ended: RunEnded) -> None:
        if self._hosts is not None:
            self._hosts.close(ended)

    # ---- attempts

    def _run(self, plan: LaunchPlan) -> RunEnded:
        for number in itertools.count():
            gathered = self._gathered(plan, number)
            if isinstance(gathered, StopReason):
                text = f"{self._ended_text()}, before all nodes had joined: {gathered.text}"
                return RunEnded("stopped", gathered.error.__name__, text)
            group = self._supervised(gathered, number)
            if self._context.state.ended is not None:  # its ranks were held after a failure, and are released now
                return RunEnded(self._context.state.status, self._context.state.error, self._context.state.message)
            if not self._restarts(group, number):
                return self._verdict(group)
        raise AssertionError("every run has a last attempt")

    def _gathered(self, plan: LaunchPlan, number: int) -> LaunchPlan | StopReason:
        """Return the plan once the hosts of the run have joined, or why it was stopped before."""
        if self._make_hosts is None:
            return plan
        if self._hosts is None:
            self._hosts = self._make_hosts(plan)
        if not self._context.config.block:
            self.started.set()  # the hosts may take minutes; the run can be stopped meanwhile
        return self._hosts.gather(number)

    def _supervised(self, plan: LaunchPlan, number: int) -> RankGroup:
        """Start the ranks of an attempt and supervise them until they have ended."""
        self._journal.append(AttemptStarted(number))
        self._journal.free_old_results()
        group = self._start_group(plan, number)
        sampler = Sampler(group.pids(), self._journal.add)
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
        if number >= self._context.config.max_restarts:
            self._call = None  # the ranks have the arguments, which may be large
        group = RankGroup(self._context, plan)
        group.stops.on_hold = lambda: self._hold(group)
        if self._hosts is not None:
            backend = self._hosts.backend(backend)
            self._hosts.follow(group)
        backend.configure(self._context.config, self._context.note, self._context.commands.stopping)
        group.start(backend, number, self._inherited)
        self.started.set()
        return group

    # ---- the end of an attempt

    def _restarts(self, group: RankGroup, number: int) -> bool:
        """Record the end of an attempt; return whether another follows."""
        found, reason = group.verdicts(), group.stops.reason
        again = bool(found) and reason is None
        if self._hosts is not None:
            again = self._hosts.can_restart(group, found)
        again = again and number < self._context.config.max_restarts
        makes_room = again and reason is not None
        self._journal.append(FailuresRecorded(() if makes_room else found))
        if again:
            headline = reason.text if makes_room and reason is not None else failures.headline(found)
            how = "ended" if makes_room else "failed"
            self._journal.append(AttemptEnded(headline, restarts=True))
            self._context.show(f"attempt {number + 1} {how} ({headline}); starting again", "stderr")
        return again

    def _hold(self, group: RankGroup) -> None:
        """End the run with its failure while its ranks are held for the debugger."""
        found = group.verdicts()
        self._context.publisher.flush(force=True)
        self._journal.append(FailuresRecorded(found))
        self._journal.append(AttemptEnded(failures.headline(found)))
        self._journal.append(self._failed())
        self._context.show(
            "its ranks are kept: notebook_accelerate.debug() opens the debugger where it failed; "
            "the next launch, or notebook_accelerate.shutdown(), ends them",
            "stderr",
        )

    def _verdict(self, group: RankGroup) -> RunEnded:
        """Record how the last attempt ended and return how that ends the run."""
        found, reason = self._context.state.failures, group.stops.reason
        ended = self._own_verdict(found, reason)
        outcome = failures.headline(found) if ended.status == "failed" and found else ended.status
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
        return failures.failed(self._context.id, self._context.state)

    def _ended_text(self) -> str:
        return f"run {self._context.id} ended after {steady_time.now() - self._context.state.started:.1f} s"
