"""Starts runs from a configuration and a function."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_accelerate import hardware
from notebook_accelerate.config import environ
from notebook_accelerate.errors import LaunchError, RunInterrupted
from notebook_accelerate.hardware.addresses import loopback_problem
from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.launching_cell import LaunchingCell
from notebook_accelerate.launch.output.rank_lines import Publisher, publisher_for
from notebook_accelerate.launch.plan.fork_probe import kernel_facts
from notebook_accelerate.launch.plan.planner import LaunchPlan, make_plan
from notebook_accelerate.launch.processes import inline, ports
from notebook_accelerate.launch.processes.interrupts import deferred_interrupts
from notebook_accelerate.launch.run import Run, RunCall, default_name, next_number
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.call_arguments import call_arguments
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.run_events import NoteAdded, RunPlanned
from notebook_accelerate.launch.supervisor.command_queue import CommandQueue
from notebook_accelerate.launch.supervisor.run_context import RunContext
from notebook_accelerate.launch.supervisor.supervisor import Launch, RunThread, Supervisor
from notebook_accelerate.telemetry import inherited_state, steady_time

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.kept.run_writer import RunWriter
    from notebook_accelerate.telemetry.inherited_state import InheritedState


def start(
    config: LaunchConfig, function: Callable[..., Any], arguments: tuple[Any, ...] = (), resume: Run | None = None
) -> Run:
    """Launch ``function(*arguments)`` as configured by ``config``.

    Args:
        config: Configuration of the launch.
        function: The function.
        arguments: Its arguments.
        resume: A run that has ended, whose training goes on from its newest complete checkpoint.

    Returns:
        The run: ended when ``config.block``, otherwise with all its ranks started.

    Raises:
        ValueError: The configuration does not fit this machine.
        LaunchError: The ranks could not be started.
        SerializationError: The function or its arguments cannot be sent to the ranks.
        WorkerError: A blocking run did not succeed; it carries ``.run``.
    """
    if not callable(function):
        raise ValueError(f"{function!r} is not a function; pass the function itself: notebook_launcher(train, (args,))")
    if inspect.iscoroutinefunction(function):
        name = function.__name__
        raise ValueError(
            f"{name} is an async function; pass one that runs it: lambda *args: asyncio.run({name}(*args))"
        )
    config = _where(config)
    if config.detach:
        from notebook_accelerate.launch.attaching import launch_detached

        run = launch_detached(config, function, arguments, resume)
        run.reserve_output()
        run_registry.tell(run)
        _announce(run, _publisher(run), f"detached: notebook_accelerate.attach({run.name!r}) opens it in any kernel")
        run.show_live()
        return run
    return start_here(config, function, arguments, resume)


def start_here(
    config: LaunchConfig,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    resume: Run | None,
    inherited: InheritedState | None = None,
) -> Run:
    """Launch under the supervision of this process; see `start`.

    Args:
        config: Configuration of the launch.
        function: The function.
        arguments: Its arguments.
        resume: An ended run, whose training is continued.
        inherited: State that ranks inherit; by default, it is captured from the calling thread.
    """
    run_registry.release_held()
    if all(run.ended is not None for run in run_registry.own_runs()):
        steady_time.set_to_system_time()
    try:
        with deferred_interrupts():
            plan = _plan(config)
        commands = CommandQueue() if plan.start_method != "inline" else None
    except OSError as error:
        if (problem := failures.system_error(error)) is error:
            raise
        raise problem from error
    try:
        run, plan = _new_run(config, plan, commands, function, arguments, resume)
    except BaseException:
        if commands is not None:
            commands.close()
        raise
    if commands is None:
        _run_inline(run, plan, function, arguments)
    else:
        _supervise(run, plan, commands, (function, arguments), inherited or inherited_state.capture())
    if config.block and run.error is not None:
        raise run.error from failures.original(run.error)
    return run


def _new_run(
    config: LaunchConfig,
    plan: LaunchPlan,
    commands: CommandQueue | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    resume: Run | None,
) -> tuple[Run, LaunchPlan]:
    """Return the run and its plan: kept in a folder where that is asked for, going on with ``resume`` where given."""
    resumption = None
    if resume is not None:
        from notebook_accelerate.launch.resumption import resumption_of

        resumption = resumption_of(resume)
    function_name = getattr(function, "__name__", type(function).__name__)
    number = next_number()
    name = config.name or (resume.name if resume is not None else default_name(function_name, number))
    journal = Journal()
    writer = _writer(config, name, number, function, arguments, journal)
    run = Run(config, function_name, journal, commands, number, name, call_arguments(function, arguments))
    run.call = RunCall(function, arguments)
    if writer is not None:
        run.folder, run.journal_file = writer.folder, writer.file
    if resumption is not None:
        resumption.begin(journal)
        if resumption.checkpoint is not None:
            plan = replace(plan, variables={**plan.variables, environ.RESUMED: resumption.checkpoint.path})
    if writer is not None:
        history = () if resumption is None else resumption.frames
        writer.start(run, history, (lambda: False) if commands is None else commands.stopping)
    return run, plan


def _writer(
    config: LaunchConfig,
    name: str,
    number: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    journal: Journal,
) -> RunWriter | None:
    """Return what writes the run's journal; None where the run is not kept."""
    parent = config.save or environ.text("NOTEBOOK_ACCELERATE_RUNS")
    if not parent:
        return None
    from notebook_accelerate.launch.kept import journal_file, run_folder, run_writer

    now = steady_time.now()
    folder = run_folder.create_folder(parent, name, now)
    try:
        header = run_folder.header(name, number, function, arguments, config, now)
        return run_writer.RunWriter(folder, header, journal, detached=config.detach)
    except OSError as error:
        with suppress(OSError):
            (folder / journal_file.JOURNAL_NAME).unlink(missing_ok=True)
            folder.rmdir()
        raise LaunchError(
            f"the run cannot be kept in {folder}: {error.strerror or error}; pass another folder: save='runs'"
        ) from error


def _where(config: LaunchConfig) -> LaunchConfig:
    """Return ``config`` for the cluster that the environment names, if ``config`` names none.

    This applies only to a launch that does not specify where it runs.
    """
    on = environ.text("NOTEBOOK_ACCELERATE_ON")
    if not on or config.on is not None or config.num_nodes > 1 or config.start_method != "auto":
        return config
    return config.changed(on=on)


def _plan(config: LaunchConfig) -> LaunchPlan:
    """Plan the launch on a new thread: ranks are forked from one, and the fork probe must see the same state.

    The caller defers interrupts: a KeyboardInterrupt between a lock of the executor and its release, or in the callback
    that runs when the executor is deleted, would block later forks or be lost.
    """

    def plan() -> LaunchPlan:
        environment = {**os.environ, **(config.env or {})}
        return make_plan(config, hardware.detect(environment), kernel_facts())

    with ThreadPoolExecutor(1, "notebook-accelerate-plan") as executor:
        return executor.submit(plan).result()


def _publisher(run: Run) -> Publisher:
    return publisher_for(run.id, text=run.config.output == "cell")


# ---- in the kernel


def _run_inline(run: Run, plan: LaunchPlan, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    context = inline.InlineContext(run.id, run.config, plan, run.journal)
    try:
        run.reserve_output()
        run.journal.append(RunPlanned(plan, 0, 1))
        run_registry.add(run)
        _announce(run, _publisher(run))
        run.show_live()
        inline.execute(context, function, arguments)
    except KeyboardInterrupt as stop:
        inline.end_before_start(context)
        raise RunInterrupted(run) from stop


# ---- in separate processes


def _supervise(
    run: Run,
    plan: LaunchPlan,
    commands: CommandQueue,
    call: tuple[Callable[..., Any], tuple[Any, ...]],
    inherited: InheritedState,
) -> None:
    """Start a run in separate processes, and wait for its end if it blocks the cell."""
    run.reserve_output()
    context = RunContext(run.id, run.config, run.function_name, run.journal, commands, _publisher(run))

    prepare = partial(_prepare, run, context, plan)
    launch = Launch(
        context,
        *call,
        inherited=inherited,
        prepare=partial(prepare, partial(_on_this_machine, context)),
        release=partial(_release, run),
    )

    def runner() -> RunThread:
        if run.config.num_nodes == 1:
            return Supervisor(launch)
        from notebook_accelerate.launch.hosts.several import runner_of_several

        with ExitStack() as undo:
            undo.callback(commands.close)
            found = runner_of_several(launch, prepare)
            undo.pop_all()
        return found

    LaunchingCell(run, runner).launch()


def _prepare(
    run: Run, context: RunContext, plan: LaunchPlan, complete: Callable[[LaunchPlan], LaunchPlan]
) -> LaunchPlan:
    """Reserve the plan's resources, and append the plan to the journal; called on the run's thread."""
    run_registry.check_devices(run, plan)
    plan = complete(plan)
    context.journal.append(RunPlanned(plan, plan.first_rank, plan.num_processes))
    run_registry.add(run)
    _announce(run, context.publisher)
    return plan


def _on_this_machine(context: RunContext, plan: LaunchPlan) -> LaunchPlan:
    """Return a plan with a port and a private folder for the ranks of this machine, if it has several."""
    if plan.accelerator == "tpu" and plan.variables:
        plan = replace(plan, variables={**plan.variables, **_tpu_addresses(plan.num_processes)})
    if plan.world_size == 1 or plan.where:
        return plan
    _check_loopback()
    store = inline.make(context.id)
    port, note = ports.reserve(context.id, plan.port, fixed=False)
    if note and plan.port != ports.DEFAULT:  # only code that starts torch's own group uses the default
        context.journal.append(NoteAdded(note))
    return replace(plan, port=port, store=store)


def _tpu_addresses(ranks: int) -> dict[str, str]:
    """Return what torch_tpu's runtimes must agree on before they start: an address for each, and a profiling session.

    Source: ``torch.tpu.distributed.set_tpu_launch_env`` of torch_tpu 0.2.0.
    """
    return {
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"localhost:{port}" for port in ports.unused(ranks)),
        "TORCH_TPU_XPROF_SESSION_ID": str(time.time_ns()),
    }


def _release(run: Run) -> None:
    """Release what `_prepare` reserved."""
    ports.release(run.id)
    inline.remove(run.id)


def _check_loopback() -> None:
    """Check that the ranks can connect: torch would report it after minutes only.

    Raises:
        LaunchError: They cannot.
    """
    if problem := loopback_problem():
        raise LaunchError(
            f"ranks cannot reach each other: connections to 127.0.0.1 fail ({problem}); "
            "enable the loopback interface: ip link set lo up"
        )


def _announce(run: Run, publisher: Publisher, *more: str) -> None:
    """Show the run's header and more lines, if the launch is displayed."""
    if not run.displayed or run.plan is None:
        return
    publisher.line("stdout", f"▶ run {run.id}: {run.plan.sentence()}")
    for note in [*run.notes, *more]:
        publisher.line("stdout", f"  {note}")
    publisher.flush(force=True)
    run.take_output()
