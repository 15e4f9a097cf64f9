"""The base class of supervisors, each of which runs a launch on its own thread until the run has ended."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accelerate.errors import RunStoppedError
from notebook_accelerate.launch.run import output_of
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.failures import ExceptionLoader
from notebook_accelerate.launch.state.run_events import AttemptEnded, NoteAdded, RanksReleased, RunEnded
from notebook_accelerate.launch.state.run_view import internals

if TYPE_CHECKING:
    from notebook_accelerate.launch.output.publisher import Publisher
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.device_claims import DeviceClaim
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.launch.state.run_state import RunState
    from notebook_accelerate.launch.supervisor.command_queue import CommandQueue, PausableClock
    from notebook_accelerate.telemetry.inherited_state import InheritedState


class Supervisor(ABC):
    """Runs a launch on its own thread, and ends the run even if an error occurs there.

    A `RankSupervisor` supervises the run's ranks. A `JoinedNotebook` runs its ranks on behalf of the notebook that
    supervises them. The parts of a supervisor refer to it, and use the run's shared objects through it.

    Args:
        run: The run to supervise. No reference to it is kept, because its user may drop the run.
        commands: The user's commands, the prompts, and the requests to ranks.
        publisher: Shows output in the notebook. Once the run's thread has started, only that thread uses it.

    Attributes:
        id: The run's number in this kernel.
        config: The launch configuration.
        function_name: Name of the launched function.
        journal: Receives the run's events.
        commands: The user's commands.
        publisher: Shows output in the notebook.
        exceptions: Unpickles the exceptions of the ranks.
        started: An event that is set once all ranks have started or failed to start, or earlier if the start may take
            minutes.
        over: An event that is set once the run has ended.
        problem: The error that prevented the start of the ranks, or None.
        claim: The run's claim on its devices, or None before it is made.
    """

    def __init__(self, run: Run, commands: CommandQueue, publisher: Publisher) -> None:
        self.id, self.config, self.function_name = run.id, run.config, run.function_name
        self.journal, self.commands, self.publisher = internals(run).journal, commands, publisher
        self.exceptions = ExceptionLoader()
        self.started, self.over = threading.Event(), threading.Event()
        self.problem: BaseException | None = None
        self.claim: DeviceClaim | None = None
        self._call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._inherited: InheritedState | None = None
        self._output = weakref.ref(output_of(run))

    # ---- the launching thread

    def reserve(self, plan: LaunchPlan) -> LaunchPlan:
        """Reserve the resources of this machine's ranks until the run ends. Return the plan with the reservations."""
        return plan

    def start(
        self, plan: LaunchPlan, function: Callable[..., Any], arguments: tuple[Any, ...], inherited: InheritedState
    ) -> None:
        """Run ``function(*arguments)`` on the run's thread.

        Args:
            plan: The plan that `reserve` returned.
            function: The function to launch.
            arguments: The function's positional arguments.
            inherited: The state that ranks inherit from the launching thread.
        """
        self._call, self._inherited = (function, arguments), inherited
        name = f"notebook-accelerate-run-{self.id}"
        thread = threading.Thread(target=self._main, args=(plan,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as problem:  # The system refused to create another thread.
            self.fail(problem)

    def fail(self, problem: BaseException) -> None:
        """End a run that could not be started because of ``problem``."""
        self._end(self._ended_by(problem))

    # ---- the run's thread

    def _main(self, plan: LaunchPlan) -> None:
        ended = RunEnded("failed", "WorkerError", "the launch failed")
        try:
            ended = self._outcome(plan)
        finally:
            self._call = None
            self._end(ended)

    def _outcome(self, plan: LaunchPlan) -> RunEnded:
        """Run the launch to its end and return how the run ended.

        This is a separate method so that the frames of an error do not refer to the returned object.
        """
        try:
            return self._run(plan)
        except BaseException as problem:  # noqa: BLE001 - raised by the caller, or recorded in the run
            return self._ended_by(problem)

    @abstractmethod
    def _run(self, plan: LaunchPlan) -> RunEnded:
        """Run the launch to its end and return how the run ended. Errors are handled by the caller."""

    def _ended_by(self, problem: BaseException) -> RunEnded:
        if not self.started.is_set():
            self.problem = failures.system_error(problem) if isinstance(problem, OSError) else problem
        if isinstance(problem, RunStoppedError):  # The user stopped the run before its ranks had started.
            return RunEnded("stopped", "RunStoppedError", str(problem))
        text = f"the launch failed: {type(problem).__name__}: {problem}"
        return RunEnded("failed", "WorkerError", text, problem)

    # ---- the end

    def _end(self, ended: RunEnded) -> None:
        """Release the run's resources and end the run.

        Each step is taken even if an earlier one fails, because other threads wait for the end.
        """
        steps: list[Callable[[], object]] = [
            partial(self._disconnect, ended),
            self.commands.close,
            self._release,
            self._release_devices,
            partial(self.publisher.flush, force=True),
            partial(self._record_end, ended),
            self.commands.prompts.close,
            self.started.set,
            self.over.set,
        ]
        with ExitStack() as stack:  # An ExitStack calls the last registered step first.
            for step in reversed(steps):
                stack.callback(step)

    def _disconnect(self, ended: RunEnded) -> None:  # noqa: B027 - most runs have no such connections
        """Close the connections to other machines."""

    def _release(self) -> None:  # noqa: B027 - some supervisors reserve nothing
        """Release the resources that `reserve` reserved."""

    def _release_devices(self) -> None:
        if self.claim is not None:
            self.claim.release()

    def _record_end(self, ended: RunEnded) -> None:
        if self.state.attempt_status == "running":
            self.journal.append(AttemptEnded(ended.message or ended.status))
        if self.state.ended is None:
            self.journal.append(ended)
        if self.state.held:
            self.journal.append(RanksReleased())

    # ---- for the parts of a supervisor

    @property
    def clock(self) -> PausableClock:
        """The clock of the run's time limits."""
        return self.commands.clock

    @property
    def state(self) -> RunState:
        """The run's state after the last event."""
        return self.journal.state

    def show(self, text: str, stream: str = "stdout") -> None:
        """Show a line about the launch itself."""
        self.publisher.line(stream, text)
        self.publisher.flush(force=True)

    def show_without_panel(self, text: str) -> None:
        """Show a line on stderr, unless a live panel shows the run."""
        output = self._output()
        if output is None or not output.is_live:
            self.show(text, "stderr")

    def note(self, text: str, *, shown_as: str | None = None) -> None:
        """Record a note for the panel and the report. Also show it, or ``shown_as`` if that is given."""
        self.journal.append(NoteAdded(text))
        self.show(text if shown_as is None else shown_as, "stderr")
