"""The thread that runs a launch: what supervisors and notebooks that join another one's run have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accelerate.errors import RunStoppedError
from notebook_accelerate.launch.state import error_messages
from notebook_accelerate.launch.state.run_events import AttemptEnded, RanksReleased, RunEnded

if TYPE_CHECKING:
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.supervisor.run_context import RunContext
    from notebook_accelerate.telemetry.inherited_state import InheritedState


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
            self.problem = error_messages.system_error(problem) if isinstance(problem, OSError) else problem
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


__all__ = ["Launch", "RunThread"]
