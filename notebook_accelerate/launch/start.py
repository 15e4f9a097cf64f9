"""The one entry of the launch room, and the thread that lives as long as a run."""

from __future__ import annotations

import inspect
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from notebook_accelerate import hardware
from notebook_accelerate.config import environ
from notebook_accelerate.errors import RunInterrupted, RunStoppedError, WorkerError
from notebook_accelerate.launch import run_display, run_registry
from notebook_accelerate.launch.output.rank_output import Publisher, publisher_for, running_kernel
from notebook_accelerate.launch.plan import ports
from notebook_accelerate.launch.plan.fork_probe import kernel_facts
from notebook_accelerate.launch.plan.planner import LaunchPlan, make_plan
from notebook_accelerate.launch.processes import inline, process_backend
from notebook_accelerate.launch.run import DEFAULT_GRACE, Run
from notebook_accelerate.launch.state import error_messages
from notebook_accelerate.launch.supervisor.pausable_clock import PausableClock
from notebook_accelerate.launch.supervisor.rank_group import GroupCall, RankGroup
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP
from notebook_accelerate.telemetry import inherited_state
from notebook_accelerate.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.hosts.rendezvous.notebook_group import NotebookGroup


def start(config: LaunchConfig, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> Run:
    """Launch ``function(*arguments)`` as ``config`` says.

    Returns:
        The run: ended when ``config.block``, otherwise with all its ranks started.

    Raises:
        ValueError: The configuration does not fit this machine.
        LaunchError: Nothing could be started.
        SerializationError: The function or its arguments cannot travel to where they must.
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
    run_registry.release_held()
    run = Run(config, getattr(function, "__name__", type(function).__name__))
    run_display.reserve(run)
    launch_plan = _plan(run)
    if launch_plan.start_method == "inline":
        run._planned(launch_plan)
        try:
            run_registry.add(run)
            _announce(run, publisher_for(run.id))
            run_display.show(run)
            inline.execute(run, function, arguments)
        except KeyboardInterrupt:
            if run.ended is None:  # before the function had begun: who stops all runs waits for this one's end too
                run._finish("stopped", error_messages.stopped(run))
            raise
    else:
        launcher = _Launcher(run, launch_plan, function, arguments)
        launcher.start()
        if config.block:
            launcher.see_through()
    if config.block and run.error is not None:
        raise run.error from error_messages.original(run.error)
    return run


def _plan(run: Run) -> LaunchPlan:
    try:
        return make_plan(run.config, hardware.detect(), kernel_facts())
    except KeyboardInterrupt:
        run._finish("stopped", error_messages.stopped(run))
        raise RunInterrupted(run) from None


def _where(config: LaunchConfig) -> LaunchConfig:
    """Return ``config`` for the cluster that the environment names, where it names none itself.

    Only a launch that says nothing of where it runs is moved.
    """
    on = environ.text("NOTEBOOK_ACCELERATE_ON")
    if not on or config.on is not None or config.num_nodes > 1 or config.start_method != "auto":
        return config
    return config.changed(on=on)


class _Launcher:
    """The run's own thread: it forks, supervises, restarts, and finishes the run."""

    def __init__(
        self, run: Run, launch_plan: LaunchPlan, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self._run, self._plan, self._function, self._arguments = run, launch_plan, function, arguments
        self._inherited = inherited_state.capture()  # here: some of it belongs to the thread of the cell
        self._publisher = publisher_for(run.id)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._started, self._over = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        self._group: RankGroup | None = None
        self._party: NotebookGroup | None = None
        self._watch = PausableClock()
        self._call_lock = threading.Lock()
        self._calls: list[GroupCall] = []
        self._owner: dict[str, int] = {}
        run._stopper, run._post = self._request_stop, self._post
        name = f"notebook-accelerate-run-{run.id}"
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread and return once all ranks have started, or raise what kept them from it."""
        try:
            self._thread.start()
            self._started.wait()
            if self._problem is None and not self._run.config.block:
                run_display.show(self._run)  # once the ranks are off: making widgets takes as long as starting them
        except KeyboardInterrupt:
            self._see_stopped()
            if self._problem is not None or self._run.status == "stopped":  # otherwise it came too late
                raise RunInterrupted(self._run) from None
        if self._problem is not None:
            self._thread.join()
            raise self._problem

    def _see_stopped(self) -> None:
        """Stop the run and wait for its end; each further press of the button stops it once more, which kills."""
        while True:
            try:
                if self._is_mine():  # its thread has not begun, and will do nothing if it does
                    self._problem = error_messages.stopped(self._run)
                    self._run._finish("stopped", self._problem)
                    self._leave()
                    return
                self._request_stop(DEFAULT_GRACE)
                self._over.wait()  # Python before 3.13 takes a thread whose join was interrupted for ended (gh-90882)
            except KeyboardInterrupt:
                continue
            return

    def see_through(self) -> None:
        """Wait for the end; the notebook's stop button stops the run, pressed twice it kills it."""
        interrupted = pressed = shown = False
        while True:
            try:
                if pressed:  # here, where one more press is no end of waiting
                    pressed = False
                    self._request_stop(DEFAULT_GRACE)
                while not (self._run._done.is_set() and shown):
                    self._run.wait(None if shown else run_display.LIVE_AFTER_SECONDS)
                    if not shown:
                        shown = True
                        run_display.show(self._run)
                if self._run._released.is_set():
                    self._thread.join()
                break
            except KeyboardInterrupt:
                interrupted = pressed = True
        if interrupted and self._run.status == "stopped":
            raise RunInterrupted(self._run) from None

    # ---- any thread

    def _is_mine(self) -> bool:
        """Whether the thread that calls is the one that sees to the run's end: the first that asks."""
        mine = threading.get_ident()
        return self._owner.setdefault("thread", mine) == mine

    def _request_stop(self, grace: float) -> None:
        self._post(lambda group: group.stop(grace, USER_STOP))

    def _post(self, call: GroupCall) -> None:
        with self._call_lock:
            self._calls.append(call)
        with suppress(OSError):  # the run has just ended
            self._wake_writer.send(b"!")

    # ---- the run's thread

    def _main(self) -> None:
        if not self._is_mine():
            return
        status, error = "failed", None
        try:
            launch_plan = self._prepare()
            status, error = self._attempts(launch_plan)
        except RunStoppedError as problem:  # before the ranks had started
            if not self._started.is_set():
                self._problem = problem
            problem.run = self._run
            status, error = "stopped", problem
        except BaseException as problem:  # noqa: BLE001 - handed to the caller, or kept in the run
            if not self._started.is_set():
                self._problem = problem
            message = f"the launch failed: {type(problem).__name__}: {problem}"
            if self._party is not None:
                self._party.trouble = message
            error = WorkerError(message, self._run)
            error.__cause__ = problem
        finally:
            try:
                self._leave()
            finally:  # whatever cannot be shown or closed: somebody waits for this
                if self._run._released.is_set():
                    self._run._finish(status, error)
                else:
                    self._run._release()
                self._started.set()
                self._over.set()

    def _leave(self) -> None:
        """Let go of what the run had, and show what waits to be shown."""
        if self._party is not None:
            self._party.close()
        self._wake_reader.close()
        self._wake_writer.close()
        ports.release(self._run.id)
        self._publisher.flush(force=True)

    def _prepare(self) -> LaunchPlan:
        run, launch_plan = self._run, self._plan
        run_registry.check_devices(run, launch_plan)
        if launch_plan.world_size > 1 and not launch_plan.where:
            launch_plan = replace(launch_plan, port=self._port(launch_plan))
        run._planned(launch_plan)
        run_registry.add(run)
        _announce(run, self._publisher)
        return launch_plan

    def _port(self, launch_plan: LaunchPlan) -> int:
        config = self._run.config
        fixed = config.num_nodes > 1
        here = config.node_rank == 0 and not (fixed and config.rdzv_backend == "c10d")  # there, whoever comes first
        port, note = ports.reserve(self._run.id, launch_plan.port, fixed=fixed, here=here)
        if note:
            self._run.notes.append(note)
        return port

    def _attempts(self, launch_plan: LaunchPlan) -> tuple[str, WorkerError | None]:
        run, number = self._run, 0
        while True:
            found = self._gathered(launch_plan, number)
            if found is None:
                return self._stopped_waiting()
            if self._party is not None:
                number = self._party.attempt  # a late notebook joins the others in one of their later attempts
            run._begin_attempt(number)
            group = self._supervised(found, number)
            run.failures = group.verdicts()
            if not self._goes_on(group, number):
                break
            headline = self._party.reason if self._party else error_messages.headline(run.failures)
            run._end_attempt(headline)
            run._set_status("starting")
            how = "failed" if run.failures else "ended"
            self._publisher.line("stderr", f"attempt {number + 1} {how} ({headline}); starting again")
            number += 1
        return self._party.verdict() if self._party else self._verdict(group)

    def _goes_on(self, group: RankGroup, number: int) -> bool:
        """Whether there is another attempt; several notebooks decide that together."""
        if self._party is not None:
            return self._party.conclude(group)
        run = self._run
        if run.ended is not None:  # its ranks were kept after a failure, and have been let go
            return False
        if run.failures and not group.ending.reason and number == run.config.max_restarts:
            run._end_attempt(error_messages.headline(run.failures))
        return bool(run.failures) and not group.ending.reason and number < run.config.max_restarts

    def _gathered(self, launch_plan: LaunchPlan, number: int) -> LaunchPlan | None:
        """Return the plan once the other notebooks of the run have come; None when it was stopped before."""
        if self._run.config.num_nodes == 1:
            return launch_plan
        if self._party is None:
            from notebook_accelerate.launch.hosts.rendezvous.notebook_group import NotebookGroup

            self._party = NotebookGroup(self._run, launch_plan, self._publisher, self._wake_reader, self._take_calls)
        if not self._run.config.block:
            self._started.set()  # the others may take minutes, and the run can be stopped already
        return self._party.gather(number)

    def _stopped_waiting(self) -> tuple[str, WorkerError]:
        run = self._run
        why = self._party.why_stopped if self._party else USER_STOP
        text = f"run {run.id} ended after {run.elapsed:.1f} s, before all notebooks had joined: {why.text}"
        return "stopped", why.error(text, run)

    def _supervised(self, launch_plan: LaunchPlan, number: int) -> RankGroup:
        """Start the ranks of an attempt and see them to their end."""
        group = self._start_group(launch_plan, number)
        sampler = Sampler(group.pids(), self._party.keep if self._party else self._run.store.add)
        sampler.start()
        try:
            group.supervise()
        finally:
            group.abandon()
            sampler.stop()
            self._group = None
        return group

    def _start_group(self, launch_plan: LaunchPlan, number: int) -> RankGroup:
        backend = process_backend(launch_plan.start_method)(self._function, self._arguments)
        group = RankGroup(self._run, launch_plan, self._publisher, self._wake_reader, self._take_calls, self._watch)
        group.ending.on_hold = lambda: self._hold(group)
        if self._party is not None:
            backend = self._party.backend(backend)
            self._party.attend(group)
        backend.configure(self._run.config, self._tell, lambda: bool(self._calls))
        group.start(backend, number, self._inherited)
        self._group = group
        self._started.set()
        return group

    def _tell(self, text: str) -> None:
        """Show a line of the launch itself."""
        self._run.notes.append(text)
        self._publisher.line("stderr", text)
        self._publisher.flush(force=True)

    def _take_calls(self) -> list[GroupCall]:
        with self._call_lock:
            calls, self._calls = self._calls, []
        return calls

    def _hold(self, group: RankGroup) -> None:
        """Tell of the failure while the ranks are kept."""
        run = self._run
        run.failures = group.verdicts() or (self._party.told if self._party else ())
        run._end_attempt(error_messages.headline(run.failures))
        self._publisher.flush(force=True)
        run._hold("failed", error_messages.worker_error(run))

    def _verdict(self, group: RankGroup) -> tuple[str, WorkerError | None]:
        run = self._run
        if group.ending.reason and not run.failures:
            run._end_attempt("stopped")
            text = f"run {run.id} ended after {run.elapsed:.1f} s: {group.ending.reason.text}"
            return "stopped", group.ending.reason.error(text, run)
        if run.failures:
            return "failed", error_messages.worker_error(run)
        run._end_attempt("succeeded")
        return "succeeded", None


def _announce(run: Run, publisher: Publisher) -> None:
    """Show the run's header, where the launch is to be seen."""
    show = running_kernel() is not None if run.config.panel == "auto" else bool(run.config.panel)
    if not show or run.plan is None:
        return
    publisher.line("stdout", f"▶ run {run.id}: {run.plan.sentence()}")
    for note in run.notes:
        publisher.line("stdout", f"  {note}")
    publisher.flush(force=True)
    run_display.hold(run)
