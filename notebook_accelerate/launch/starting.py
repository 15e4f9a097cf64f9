"""Start runs from a configuration and a function, and wait for them in the launching cell."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config import environ
from notebook_accelerate.errors import LaunchError, RunInterrupted, WorkerError
from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.served_run import ServedRun
from notebook_accelerate.launch.detached_launch import launch_detached, origin
from notebook_accelerate.launch.kept import run_folder
from notebook_accelerate.launch.kept.journal_format import JOURNAL_NAME
from notebook_accelerate.launch.kept.run_writer import RunWriter
from notebook_accelerate.launch.notifying import Notifier
from notebook_accelerate.launch.output.publisher import Publisher, publisher_for
from notebook_accelerate.launch.plan.planner import LaunchPlan, number_of_slots, placed
from notebook_accelerate.launch.processes import inline
from notebook_accelerate.launch.processes.device_claims import Claim, DeviceClaim
from notebook_accelerate.launch.processes.fork_probe import plan_from_here
from notebook_accelerate.launch.report.run_snapshot import status
from notebook_accelerate.launch.resumption import changed_arguments, resumption_of
from notebook_accelerate.launch.run import Run, default_name, next_number, output_of
from notebook_accelerate.launch.run_debugging import ask_user
from notebook_accelerate.launch.run_display import IMPORT_AFTER_SECONDS, LIVE_AFTER_SECONDS
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.call_arguments import RunCall, call_arguments
from notebook_accelerate.launch.state.interrupts import deferred_interrupts, handle_interrupts, wait_for
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.run_commands import DEFAULT_GRACE
from notebook_accelerate.launch.state.run_events import NoteAdded, RunPlanned, RunQueued
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.launch.supervisor.command_queue import CommandQueue
from notebook_accelerate.launch.supervisor.rank_supervisor import RankSupervisor
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.state.prompts import Prompt
    from notebook_accelerate.launch.supervisor.supervisor import Supervisor
    from notebook_accelerate.telemetry.inherited_state import InheritedState


def start(
    config: LaunchConfig, function: Callable[..., Any], arguments: tuple[Any, ...] = (), resume: Run | None = None
) -> Run:
    """Launch ``function(*arguments)`` as configured by ``config``.

    Args:
        config: The launch configuration.
        function: The function to launch.
        arguments: The function's positional arguments.
        resume: An ended run whose training the new run continues from the newest complete checkpoint, or None.

    Returns:
        The run. If ``config.block`` is set, it has ended; otherwise, all of its ranks have started.

    Raises:
        ValueError: The configuration is not possible on this machine.
        LaunchError: The ranks could not be started.
        SerializationError: The function or its arguments cannot be sent to the ranks.
        WorkerError: A blocking run did not succeed. The error's ``.run`` is the run.
    """
    check_function(function)
    config = _with_cluster_of_environment(config)
    if not config.detach:
        return start_here(config, function, arguments, resume)
    run = launch_detached(config, function, arguments, resume)
    internals(run).call = RunCall(function, arguments)
    output_of(run).reserve(run.config)
    run_registry.announce_run(run)
    _announce(run, _publisher(run), f"detached: notebook_accelerate.attach({run.name!r}) opens it in any kernel")
    output_of(run).show_panel(run)
    return run


def start_here(
    config: LaunchConfig,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    resume: Run | None,
    inherited: InheritedState | None = None,
    on_registered: Callable[[Run], object] | None = None,
) -> Run:
    """Launch a run that this process supervises; see `start`.

    Args:
        config: The launch configuration.
        function: The function to launch.
        arguments: The function's positional arguments.
        resume: An ended run whose training the new run continues, or None.
        inherited: The state that ranks inherit. By default, it is captured from the calling thread.
        on_registered: A function to call with the run before the ranks start, instead of making the run reachable for
            other processes. If it raises an error, the ranks do not start, and this function raises the error. It is
            not called for inline runs.
    """
    run_registry.release_held()
    if all(run.ended is not None for run in run_registry.own_runs()):
        steady_time.set_to_system_time()
    with failures.explained_system_errors():
        plan = _plan(config)
        commands = CommandQueue() if plan.start_method != "inline" else None
    run, plan = _new_run(config, plan, commands, function, arguments, resume)
    output_of(run).reserve(run.config)
    if commands is None:
        _run_inline(run, plan, function, arguments)
    else:
        cell = BlockingCell(run)
        with handle_interrupts(cell.on_signal):
            supervisor = _new_supervisor(run, commands)
            try:
                plan = _prepare(run, supervisor, plan, on_registered)
                inherited = inherited or capture_inherited_state()
            except BaseException as problem:  # noqa: BLE001 - the cell raises it
                supervisor.fail(problem)
            else:
                supervisor.start(plan, function, arguments, inherited)
            cell.wait(supervisor)
        cell.raise_problem(supervisor)
    if config.block and run.error is not None:
        raise run.error from failures.original(run.error)
    return run


# ---- before the start


_UNUSABLE = (
    (inspect.iscoroutinefunction, "an async function", "that runs it: lambda *args: asyncio.run({name}(*args))"),
    (inspect.isgeneratorfunction, "a generator function", "that reads it: lambda *args: list({name}(*args))"),
    (inspect.isasyncgenfunction, "an async generator function", "that reads it with `async for`"),
)
"""Functions whose call does not run their body: how to recognise each kind, its name, and what to pass instead."""


def check_function(function: Callable[..., Any]) -> None:
    """Check that calling a function runs its body.

    Raises:
        ValueError: ``function`` is not callable, or is an async function or a generator function.
    """
    if not callable(function):
        raise ValueError(f"{function!r} is not a function; pass the function itself: notebook_launcher(train, (args,))")
    called: Any = function
    while isinstance(called, partial):
        called = called.func
    name = getattr(called, "__name__", type(called).__name__)
    for is_unusable, kind, instead in _UNUSABLE:
        # Check `__call__` too, because calling an object calls that method of its class.
        if is_unusable(called) or is_unusable(type(called).__call__):
            raise ValueError(
                f"{name} is {kind}, whose call does not run its body; pass a function {instead.format(name=name)}"
            )


def _with_cluster_of_environment(config: LaunchConfig) -> LaunchConfig:
    """Return ``config`` with the cluster named in the environment.

    A configuration that already says where the ranks run is returned unchanged.
    """
    on = environ.text("NOTEBOOK_ACCELERATE_ON")
    if not on or config.on is not None or config.num_nodes > 1 or config.start_method != "auto":
        return config
    return config.changed(on=on)


@deferred_interrupts()
def _plan(config: LaunchConfig) -> LaunchPlan:
    """Plan the launch on a new thread. Ranks are forked on one too, so the fork probe sees the same state.

    Interrupts are deferred: otherwise a KeyboardInterrupt could block later forks, if the executor held a lock, or
    could be lost, if it was raised in the callback that runs when the executor is deleted.
    """
    with ThreadPoolExecutor(1, "notebook-accelerate-plan") as executor:
        return executor.submit(plan_from_here, config).result()


def _new_run(
    config: LaunchConfig,
    plan: LaunchPlan,
    commands: CommandQueue | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    resume: Run | None,
) -> tuple[Run, LaunchPlan]:
    """Create the run, and the writer of its journal if the run is kept. Return the run and its plan.

    If ``resume`` is given, the plan includes the checkpoint to continue from. On an error, close ``commands``.
    """
    with ExitStack() as undo:
        if commands is not None:
            undo.callback(commands.close)
        resumption = None
        if resume is not None:
            resumption = resumption_of(resume)
        function_name = getattr(function, "__name__", type(function).__name__)
        number = next_number()
        given = call_arguments(function, arguments)
        same = resume is not None and not changed_arguments(resume, given)
        name = config.name or (resume.name if resume is not None and same else default_name(function_name, number))
        journal = Journal()
        writer = _writer(config, name, number, function, arguments, journal)
        run = Run(config, function_name, journal, commands, number, name, given)
        internals(run).call = RunCall(function, arguments)
        if writer is not None:
            run.folder = writer.folder
            internals(run).journal_file, internals(run).delete_files = writer.file, run_folder.delete_run
        if resumption is not None:
            resumption.add_history(journal)
            if resumption.checkpoint is not None:
                plan = replace(plan, variables={**plan.variables, environ.RESUMED: resumption.checkpoint.path})
        if config.notify is not None:
            Notifier(run)
        if writer is not None:
            history = () if resumption is None else resumption.frames
            writer.start(run, history, (lambda: False) if commands is None else commands.stopping)
        undo.pop_all()
    return run, plan


def _writer(
    config: LaunchConfig,
    name: str,
    number: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    journal: Journal,
) -> RunWriter | None:
    """Create the writer of the run's journal. Return None if the run is not kept."""
    parent = config.save or environ.text("NOTEBOOK_ACCELERATE_RUNS")
    if not parent:
        return None
    now = steady_time.now()
    folder = run_folder.create_folder(parent, name, now)
    try:
        header = run_folder.new_header(name, number, function, arguments, config, now)
        return RunWriter(folder, header, journal, detached=config.detach)
    except OSError as error:
        with suppress(OSError):
            (folder / JOURNAL_NAME).unlink(missing_ok=True)
            folder.rmdir()
        raise LaunchError(
            f"the run cannot be kept in {folder}: {error.strerror or error}; pass another folder: save='runs'"
        ) from error


def _new_supervisor(run: Run, commands: CommandQueue) -> Supervisor:
    """Create the supervisor of this notebook's part of the run. On an error, close ``commands``."""
    if run.config.num_nodes == 1:
        return RankSupervisor(run, commands, _publisher(run))
    from notebook_accelerate.launch.hosts.joined_notebook import supervisor_of_several

    with ExitStack() as undo:
        undo.callback(commands.close)
        found = supervisor_of_several(run, commands, _publisher(run))
        undo.pop_all()
    return found


def _prepare(
    run: Run, supervisor: Supervisor, plan: LaunchPlan, on_registered: Callable[[Run], object] | None
) -> LaunchPlan:
    """Reserve what the plan needs, and register the run. Return the plan with the devices, the port and the folder.

    If the run must wait for its devices, the plan is returned as it is.
    """
    if (ahead := _claim_devices(run, supervisor, plan)) is not None:
        internals(run).journal.append(RunQueued(ahead.name))
    else:
        assert supervisor.claim is not None, "the claim was made above"
        plan = supervisor.reserve(placed(plan, supervisor.claim.devices))
        internals(run).journal.append(RunPlanned(plan, plan.first_rank, plan.num_processes))
    run_registry.register_run(run)
    (on_registered or _serve)(run)
    _announce(run, supervisor.publisher)
    return plan


def _serve(run: Run) -> ServedRun | None:
    """Let other processes of the user find the run and attach to it, unless NOTEBOOK_ACCELERATE_SERVE is "no"."""
    if not environ.flag("NOTEBOOK_ACCELERATE_SERVE", default=True):
        return None
    try:
        entry = run_registry.entry_of(run, run_directory.new_socket(), origin(), detached=False)
        return ServedRun(run, entry)
    except (LaunchError, OSError) as problem:
        text = f"other processes cannot attach to the run: {problem}; NOTEBOOK_ACCELERATE_SERVE=no hides this note"
        internals(run).journal.append(NoteAdded(text))
        return None


def _claim_devices(run: Run, supervisor: Supervisor, plan: LaunchPlan) -> Claim | None:
    """Claim the devices of a run. Return None if the run has them, or the claim of the run that it waits for.

    Raises:
        DeviceBusyError: Another run holds a device, and the configuration does not say ``queue=True``.
    """
    count = number_of_slots(run.config, plan.slots)
    supervisor.claim = DeviceClaim(run.name, run.id, tuple(plan.slots), count, detached=run.config.detach)
    ahead = supervisor.claim.acquire(in_turn=run.config.queue)
    if ahead is not None and not run.config.queue:
        raise run_registry.busy_error(ahead, plan)
    return ahead


def _publisher(run: Run) -> Publisher:
    return publisher_for(run.id, text=run.config.output == "cell")


def _announce(run: Run, publisher: Publisher, *more: str) -> None:
    """Show the run's header, its notes and ``more`` lines, unless the launch is not displayed."""
    if not output_of(run).is_announced(run.config):
        return
    publisher.line("stdout", f"▶ run {run.id}: {run.plan.sentence() if run.plan is not None else status(run)}")
    for note in [*run.notes, *more]:
        publisher.line("stdout", f"  {note}")
    publisher.flush(force=True)
    output_of(run).create()


# ---- in the kernel


def _run_inline(run: Run, plan: LaunchPlan, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    context = inline.InlineContext(run.id, run.config, plan, internals(run).journal)
    served: ServedRun | None = None
    try:
        output_of(run).reserve(run.config)
        internals(run).journal.append(RunPlanned(plan, 0, 1))
        run_registry.register_run(run)
        served = _serve(run)
        _announce(run, _publisher(run))
        output_of(run).show_panel(run)
        inline.run_in_kernel(context, function, arguments)
    except KeyboardInterrupt as stop:
        inline.end_before_start(context)
        raise RunInterrupted(run) from stop
    finally:
        if served is not None:  # An interrupt may have ended the notifications about the end of the run.
            served.close()


# ---- the launching cell


class BlockingCell:
    """Waits for a supervised run on the thread that launches it.

    During this wait, SIGINT does not raise KeyboardInterrupt, because the exception could arrive between any two
    instructions of this package. The first SIGINT stops the run, and a second one kills it. When the run is over, the
    interrupt is raised, even if the run succeeded, because the code after the launch must not continue.

    Args:
        run: The run to wait for.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._interrupted = self._asking = False

    def wait(self, supervisor: Supervisor) -> None:
        """Wait until the ranks have started. If the run blocks the cell, wait until the run has ended."""
        try:
            self._wait_for_run(supervisor)
        # The error comes from a signal handler of the user, such as one for SIGALRM. It ends the cell and its run.
        except BaseException:
            internals(self._run).commands.stop(DEFAULT_GRACE)
            wait_for(supervisor.over)
            raise

    def raise_problem(self, supervisor: Supervisor) -> None:
        """Raise the error that the cell must end with, if any. Call this once interrupts are no longer handled.

        Raises:
            RunInterrupted: The cell was interrupted.
            BaseException: The error that prevented the start of the ranks.
        """
        if self._interrupted:
            raise RunInterrupted(self._run)
        if (problem := supervisor.problem) is not None:
            # A WorkerError without a run means that the run was stopped before its ranks had started.
            if isinstance(problem, WorkerError) and problem.run is None:
                problem.run = self._run
            raise problem

    def _wait_for_run(self, supervisor: Supervisor) -> None:
        wait_for(supervisor.started)
        if supervisor.problem is not None or self._interrupted:
            wait_for(supervisor.over)
        elif not self._run.config.block:
            # Show the panel only once the ranks have started, because creating widgets takes as long as starting them.
            output_of(self._run).show_panel(self._run)
        else:
            self._wait_for_end(supervisor)
        if self._interrupted and not self._run.held:  # The interrupt may have arrived after the ranks had started.
            wait_for(supervisor.over)

    def _wait_for_end(self, supervisor: Supervisor) -> None:
        """Wait until the run ends or its ranks are held. Show prompts and the live panel in the meantime."""
        run, begin = self._run, time.monotonic()
        output = output_of(run)
        steps: deque[tuple[float, Callable[[], None]]] = deque([
            (begin + IMPORT_AFTER_SECONDS, output.import_panel),
            (begin + LIVE_AFTER_SECONDS, partial(output.show_panel, run)),
        ])  # fmt: skip
        while not run.done:
            left = max(0.0, steps[0][0] - time.monotonic()) if steps else None
            if (prompt := internals(run).commands.prompts.claim_next(left, until=lambda: run.done)) is not None:
                self._ask(prompt)
            elif steps and time.monotonic() >= steps[0][0]:
                steps.popleft()[1]()
        if steps:
            output.show_panel(run)
        if not run.held:
            wait_for(supervisor.over)

    def _ask(self, prompt: Prompt) -> None:
        self._asking = True
        try:
            if self._interrupted:
                prompt.answer(None)  # The run is being stopped, so do not prompt the user.
            else:
                ask_user(prompt, internals(self._run).commands.prompts)
        except KeyboardInterrupt:
            self._interrupt()
        finally:
            self._asking = False

    def _interrupt(self) -> None:
        self._interrupted = True
        internals(self._run).commands.stop(DEFAULT_GRACE)

    def on_signal(self) -> None:
        """Handle a SIGINT: stop the run, or raise KeyboardInterrupt if a prompt is being shown."""
        if self._asking:  # Only an exception can end input().
            self._asking = False
            raise KeyboardInterrupt
        self._interrupt()
