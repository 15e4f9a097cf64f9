"""`Run`: the user's handle of a launch, during and after it."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from notebook_accelerate import errors
from notebook_accelerate.config.plain_values import check_seconds, check_whole_number, is_number
from notebook_accelerate.errors import LaunchError, RunNotFinishedError, WorkerError
from notebook_accelerate.launch.run_debugging import RunDebugging
from notebook_accelerate.launch.run_display import RunDisplay
from notebook_accelerate.launch.state.interrupts import wait_for
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.run_events import (
    DEFAULT_GRACE,
    RUN,
    NoCommands,
    RanksReleased,
    RunCommands,
    RunCreated,
    RunEnded,
    RunLost,
)
from notebook_accelerate.launch.state.run_state import Attempt, Break, RankInfo, RunState, Stall
from notebook_accelerate.telemetry import Metrics, RankFailure, Store, steady_time

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.report.run_report import Report
    from notebook_accelerate.launch.state.call_arguments import Plain
    from notebook_accelerate.telemetry.store import Record


_START = "notebook_accelerate.launch.start"
_TENSORBOARD = "notebook_accelerate.launch.kept.run_folder"
_FOLDER = "notebook_accelerate.launch.kept.run_folder"
"""Modules above this one, by name."""
_numbers = itertools.count(1)


def default_name(function_name: str, number: int) -> str:
    """Return the name of a run without one."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", function_name).strip("-._") or "run"
    return f"{plain[:80]}-{number}"


def next_number() -> int:
    """Return the number of the next run of this kernel, which is taken by this call."""
    return next(_numbers)


class Run(RunDebugging, RunDisplay):
    """A launch, in progress or ended: reads the journal and forwards commands to the supervisor.

    Created by ``notebook_launcher``, `attach` and `open_run`; the class itself starts nothing. ``await run`` waits for
    the end without blocking the kernel's event loop: it returns the run, or raises its error.

    Args:
        config: Configuration of the launch.
        function_name: Name of the launched function.
        journal: The run's journal; None means a new one.
        commands: Commands to the supervisor; None for a run without one.
        number: The run's number in this kernel; None means the next one.
        name: The run's name; "" means that of the configuration, or the function's with the number.
        arguments: The function's arguments by name, as plain values.

    Attributes:
        id: Number of the run in this kernel, from 1.
        config: Configuration of the launch.
        function_name: Name of the launched function.
        name: The run's name.
        folder: Where the run is kept; None where it is not.
        journal_file: The file of its journal in that folder; None where it is not kept.
        environment: Versions and machine of an opened run, shown in its report. If empty, this process's are shown.
        origin: The notebook, or the folder, that launched a detached run; "" for other runs.
        journal: The run's events, in order.
        commands: Commands to the supervisor.
    """

    def __init__(
        self,
        config: LaunchConfig,
        function_name: str,
        journal: Journal | None = None,
        commands: RunCommands | None = None,
        number: int | None = None,
        name: str = "",
        arguments: Mapping[str, Plain] | None = None,
    ) -> None:
        self.id = next(_numbers) if number is None else number
        self.config, self.function_name = config, function_name
        self.name = name or config.name or default_name(function_name, self.id)
        self.folder: Path | None = None
        self.journal_file: Path | None = None
        self.environment: Mapping[str, str] = {}
        self.origin = ""
        self.call: RunCall | None = None
        self.journal = Journal() if journal is None else journal
        self.commands: RunCommands = NoCommands() if commands is None else commands
        self._lock = threading.RLock()
        self._error: weakref.ref[WorkerError] | None = None  # the error refers to the run
        self._done, self._released = threading.Event(), threading.Event()
        self._released.set()
        self._callbacks: list[Callable[[Run], None]] = []
        self._ending_callbacks: list[Callable[[Run], None]] = []
        if not self.journal.state.started:
            self.journal.append(RunCreated(function_name, dict(arguments or {})))
        self._unsubscribe: Callable[[], None] | None = None
        state = self.journal.state
        if state.ended is not None:
            self._done.set()
        if state.held:
            self._released.clear()
        if state.ended is None or state.held:
            # Weakly: what appends to the journal, such as the thread that follows a file, does not keep the run alive.
            known = weakref.ref(self)
            self._unsubscribe = self.journal.subscribe(lambda records: _pass_on(known, records))

    @classmethod
    def rebuilt(cls, config: LaunchConfig, function_name: str, records: Iterable[Record]) -> Run:
        """Return a run rebuilt from its journal's ``records``, with panels and report, without any process.

        A run whose journal has no end is lost.
        """
        journal = Journal()
        journal.replay(records)
        if journal.state.ended is None:
            journal.append(RunLost("the journal ends before the run"), journal.last_time)
        return cls(config, function_name, journal)

    # ---- results and state

    @property
    def status(self) -> str:
        """One of "starting", "running", "stopping", "succeeded", "failed", "stopped" and "lost"."""
        return self._state.status

    @property
    def _state(self) -> RunState:
        return self.journal.state

    @property
    def arguments(self) -> Mapping[str, Plain]:
        """The function's arguments by name, as plain values: entries of dicts and dataclasses as "config.lr"."""
        return self._state.arguments

    @property
    def plan(self) -> LaunchPlan | None:
        """The launch plan; None until it is made."""
        return self._state.plan

    @property
    def store(self) -> Store:
        """Records of the ranks: metrics, progress, step times, lines of output."""
        return self.journal.store

    @property
    def started(self) -> float:
        """When the launch began, in seconds since the epoch."""
        return self._state.started

    @property
    def ended(self) -> float | None:
        """When the run ended, in seconds since the epoch; None while it runs."""
        return self._state.ended

    @property
    def done(self) -> bool:
        """Whether the run has ended and its views have left their static form: ``wait()`` returns at once."""
        return self._done.is_set()

    @property
    def held(self) -> bool:
        """Whether ranks are kept for inspection after a failure (``debug=True``)."""
        return self._state.held

    @property
    def paused(self) -> tuple[int, ...]:
        """The ranks that ``pause()`` holds, in order."""
        return tuple(sorted(self._state.paused))

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts, the oldest first."""
        return list(self._state.attempts)

    @property
    def failures(self) -> tuple[RankFailure, ...]:
        """The failures of the last attempt, the first one first."""
        return self._state.failures

    @property
    def breaks(self) -> tuple[Break, ...]:
        """Where the run goes on with the training of earlier runs, the oldest first."""
        return self._state.breaks

    @property
    def notes(self) -> list[str]:
        """Remarks of the launch, such as a port that was taken."""
        return list(self._state.notes)

    @property
    def warnings(self) -> list[str]:
        """The likely mistakes found by the sanity checks, each once."""
        return list(self._state.warnings)

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """Results of automatic diagnoses, the oldest first."""
        return list(self._state.diagnoses)

    @property
    def stall(self) -> Stall | None:
        """Since when no rank makes progress while some wait in a collective, and why; None while ranks do."""
        return self._state.stall

    @property
    def prompts(self) -> tuple[int, ...]:
        """The ranks that wait for a line of text, in order."""
        return tuple(sorted(self._state.prompts))

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """The ranks shown in this notebook, in order; of several notebooks, all but the first show only their own."""
        last_step = self.store.last_step
        return tuple(
            replace(info, last_step=last_step[info.rank]) if info.rank in last_step else info
            for info in self._state.ranks
        )

    @property
    def results(self) -> tuple[Any, ...]:
        """The return values of the function, one per rank; each is unpickled when it is first read.

        They live as long as a variable (or IPython's ``Out``) refers to the run, or the run is one of the last three
        that ended and these hold at most 1 GiB; `close` frees them.

        Raises:
            RunNotFinishedError: The run has not ended.
            WorkerError: The run did not succeed; the results of individual ranks are in ``run.ranks``.
            SerializationError: A value cannot be brought to the kernel; those of other ranks are in ``run.ranks``.
            ResultsFreedError: They were freed.
        """
        if self.ended is None:
            raise RunNotFinishedError(f"run {self.id} is {self.status}; wait for it with run.wait() or await run")
        if self.error is not None:
            raise self.error
        return tuple(info.result for info in self._state.ranks)

    @property
    def error(self) -> WorkerError | None:
        """Why the run did not succeed; None while it runs and if it succeeded."""
        state = self._state
        with self._lock:
            known = self._error() if self._error is not None else None
            if known is not None or not state.error:
                return known
            found = getattr(errors, state.error, None)  # a journal of another version may name another class
            kind = found if isinstance(found, type) and issubclass(found, WorkerError) else WorkerError
            error = kind(state.message, self, state.failures if state.status == "failed" else ())
            error.__cause__ = state.cause
            self._error = weakref.ref(error)
            return error

    @property
    def metrics(self) -> Metrics:
        """The metrics that the ranks logged, by name: a live mapping, with ``plot()`` and ``to_pandas()``."""
        return Metrics(self.store)

    @property
    def automatic_metrics(self) -> Metrics:
        """The metrics that nobody logged, such as "auto/loss" and "system/memory_gb", like ``metrics``.

        None with ``LaunchConfig(automatic_metrics=False)``.
        """
        return Metrics(self.store.automatic if self.config.automatic_metrics else Store())

    @property
    def elapsed(self) -> float:
        """Seconds since the launch, up to the end of the run."""
        return (self.ended or steady_time.now()) - self.started

    def logs(self, rank: int | None = None, tail: int | None = None) -> list[str]:
        """Return the lines that the ranks wrote, oldest first, as far back as the store keeps them.

        Args:
            rank: Return only this rank's lines; None means all ranks' lines, each with its label.
            tail: Return only the last ``tail`` lines.

        Raises:
            ValueError: No such rank, or a negative ``tail``.
        """
        if tail is not None:
            check_whole_number("tail", tail, 0)
        known = [info.rank for info in self._state.ranks]
        if rank is not None and rank not in known:
            raise ValueError(f"rank={rank!r} is not a rank that is shown here; there are {known}")
        if rank is not None:
            lines = [line.text for line in self.store.log_lines(rank)]
        else:
            stamped = [(line.time, f"[rank {r}] {line.text}") for r in known for line in self.store.log_lines(r)]
            lines = [text for _, text in sorted(stamped, key=lambda pair: pair[0])]
        return lines if tail is None else lines[max(0, len(lines) - tail) :]

    def to_tensorboard(self, folder: str | PathLike[str]) -> Path:
        """Write the metrics as event files of TensorBoard; of several ranks, each has a folder of its own.

        Points without a step are numbered from 0.

        Args:
            folder: Where to write; created where it is missing.

        Returns:
            The folder, absolute.

        Raises:
            ImportError: tensorboard is not installed.
        """
        path: Path = import_module(_TENSORBOARD).export(self.store, folder)
        return path

    def report(self) -> Report:
        """Return a report of the run as static HTML and as text, also for the saved notebook."""
        from notebook_accelerate.launch.report.run_report import Report

        return Report(self)

    # ---- control

    @overload
    def resume(self, ranks: Iterable[int], timeout: float = 5.0) -> dict[int, str]: ...

    @overload
    def resume(self, ranks: None = None, timeout: float = 5.0) -> dict[int, str] | Run: ...

    def resume(self, ranks: Iterable[int] | None = None, timeout: float = 5.0) -> dict[int, str] | Run:
        """Let paused ranks continue; of a run that has ended, launch the same function to go on with its training.

        The new run loads the newest complete checkpoint of this one, and its curves and output continue this one's; see
        ``resume`` of `notebook_launcher`.

        Args:
            ranks: The paused ranks, by global index; None means all, or the training of a run that has ended.
            timeout: Seconds to wait for the replies of paused ranks.

        Returns:
            The reply of each paused rank; or the new run, as ``notebook_launcher`` returns it.

        Raises:
            ValueError: There is no such rank.
            LaunchError: The function, or one of its arguments, exists no more, or the run was opened from its folder:
                pass them to ``notebook_launcher(train, args, resume=run)``.
        """
        if ranks is not None or self.ended is None or self.held:
            return self._release_paused(ranks, timeout)
        if self.call is None:
            raise LaunchError(
                f"run {self.name} does not hold its function; pass it: "
                f"notebook_launcher({self.function_name}, args, config=run.config, resume=run)"
            )
        function, arguments = self.call.restore(self.function_name)
        run: Run = import_module(_START).start(self.config, function, arguments, self)
        return run

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, and show prompts of ranks that ask for input.

        Args:
            timeout: Seconds; None waits without a limit.

        Returns:
            Whether the run has ended.

        Raises:
            ValueError: ``timeout`` is not a number of seconds.
        """
        # A negative timeout expires immediately, as in threading.
        past = timeout is not None and is_number(timeout) and timeout < 0
        check_seconds("timeout", abs(timeout) if timeout is not None and past else timeout, none="no limit")
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done.is_set():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            prompt = self.commands.prompts.take(left, until=self._done.is_set)
            if prompt is not None:
                self._show_prompt(prompt, keep=not self.config.block)  # in a blocking launch an interrupt stops the run
            elif left == 0.0:
                break
        return self._done.is_set()

    def stop(self, grace: float = DEFAULT_GRACE) -> None:
        """End the run and return once every rank is reaped; does nothing if it has ended.

        If the process of a finished detached run is waiting for space on a full disk, it ends without writing the rest.

        Ranks receive a KeyboardInterrupt, then SIGTERM, then, after ``grace`` seconds, SIGKILL. A second call during
        the first kills at once.

        Args:
            grace: Seconds that the ranks have to end by themselves.

        Raises:
            ValueError: ``grace`` is not a number of at least 0.
            NotebookAccelerateError: Another process runs this run, which was opened by `open_run`: stop it there.
        """
        self.request_stop(grace)
        wait_for_release(self)

    def request_stop(self, grace: float = DEFAULT_GRACE) -> None:
        """Request the end of the run and return at once; safe from any thread. A second call kills.

        Args:
            grace: Seconds that the ranks have to end by themselves.

        Raises:
            ValueError: ``grace`` is not a number of at least 0.
        """
        check_seconds("grace", grace)
        if not (self._done.is_set() and self._released.is_set()) or self.commands.lingers:
            self.commands.stop(grace)

    def close(self) -> None:
        """Free the results of a run that has ended; its report, metrics and logs stay. Closing twice does nothing.

        Raises:
            RunNotFinishedError: The run has not ended, or its ranks are held.
        """
        self._check_ended()
        for info in self._state.ranks:
            if info.returned is not None:
                info.returned.free(f"the results of run {self.id} were freed by run.close()")

    def delete(self) -> None:
        """Delete the journal and the results of a kept run that has ended, and its folder if that is empty then.

        Other files in the folder, such as those that the function saved there, stay. So does a folder that was not
        created for the run, or that has been renamed.

        Raises:
            RunNotFinishedError: The run has not ended, or its ranks are held.
            ValueError: The run is not kept in a folder.
            FileNotFoundError: It was deleted before.
            OSError: A file cannot be deleted.
        """
        self._check_ended()
        if self.journal_file is None:
            raise ValueError(f"run {self.name} is not kept in a folder: it was launched without save='runs'")
        import_module(_FOLDER).delete(self.journal_file, self.name, self.started, lost=self.status == "lost")

    def _check_ended(self) -> None:
        if self.ended is None or self.held:
            status = "held" if self.held else self.status
            raise RunNotFinishedError(f"run {self.id} is {status}; end it first: run.stop()")

    def add_done_callback(self, callback: Callable[[Run], None]) -> None:
        """Call ``callback(run)`` when the run has ended, on the supervisor's thread; at once if it has.

        Args:
            callback: Called once; its exceptions become warnings.
        """
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def add_ending_callback(self, callback: Callable[[Run], None]) -> None:
        """Call ``callback(run)`` when the run has ended, before ``stop()`` and ``wait()`` return; at once if it has.

        Views leave their static output here: the waiting cell may be the last one, and the notebook may be saved at
        once.

        Args:
            callback: Called once; its exceptions become warnings.
        """
        with self._lock:
            if self.ended is None:
                self._ending_callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, Run]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Run] = loop.create_future()

        def finish(run: Run) -> None:
            loop.call_soon_threadsafe(_resolve, future, run)

        self.add_done_callback(finish)
        return self._awaited(future).__await__()

    async def _awaited(self, future: asyncio.Future[Run]) -> Run:
        try:
            # ipykernel notices an interrupt of an await only when its loop wakes up for another reason.
            while not future.done():
                await asyncio.wait([future], timeout=0.2)
        except (asyncio.CancelledError, KeyboardInterrupt):
            if not self.config.detach:  # the end of the kernel cancels the cell, too
                self.stop()
            raise
        if self.error is not None:
            raise self.error
        return self

    # ---- display

    def __repr__(self) -> str:
        count = len(self._state.ranks) or self.config.num_processes or 1
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        name = f" {self.given_name!r}" if self.given_name else ""
        return f"<Run {self.id}{name}: {self.function_name}, {self.status}, {ranks}, {self.elapsed:.1f} s>"

    @property
    def given_name(self) -> str:
        """The run's name, where it is another one than that of the function with the number; "" else."""
        return "" if self.name == default_name(self.function_name, self.id) else self.name

    # ---- called by the registry and by views

    @property
    def result_bytes(self) -> int:
        """Approximate bytes of the results, by which the registry decides which runs keep theirs."""
        return sum(info.returned.nbytes for info in self._state.ranks if info.returned is not None)

    def without_results(self) -> Run:
        """Return an ended run without its results and exception objects.

        For views and the registry, which must not keep them.
        """
        why = (
            f"the results of run {self.id} were freed: the last runs keep theirs, and runs that a variable refers to: "
            "run = notebook_launcher(...)"
        )
        copied = Run(self.config, self.function_name, self.journal.without_results(why), number=self.id, name=self.name)
        copied.folder, copied.journal_file, copied.environment = self.folder, self.journal_file, self.environment
        copied.origin, copied.call = self.origin, self.call
        return copied

    # ---- from the journal

    def _on_records(self, records: Sequence[Record]) -> None:
        if records[0].rank != RUN:
            return
        for record in records:
            if isinstance(record.event, (RunEnded, RunLost)):
                self._finish()
            elif isinstance(record.event, RanksReleased):
                self._released.set()
        if self.ended is not None and not self.held and self._unsubscribe is not None:
            self._unsubscribe()  # the journal must not refer to the run, which its user may drop
            self._unsubscribe = None

    def _finish(self) -> None:
        with self._lock:
            if self.journal.state.held:
                self._released.clear()
            ending, self._ending_callbacks = self._ending_callbacks, []
        try:
            _call(self, ending)
        finally:  # an inline run calls views on the main thread: after an interrupt there it must still end
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
                self._done.set()
            self.commands.prompts.close()
            if self.journal.state.held:
                self.commands.prompts.reopen()
        _call(self, callbacks)


def wait_for_release(run: Run) -> None:
    """Wait for the end of a run, and for the end of ranks that are held."""
    # A subscriber may stop its run; the threads that call subscribers cannot wait for their own end.
    if threading.current_thread().name not in (f"notebook-accelerate-run-{run.id}", "notebook-accelerate-sampler"):
        wait_for(run._done)
        wait_for(run._released)


def _call(run: Run, callbacks: list[Callable[[Run], None]]) -> None:
    for callback in callbacks:
        try:
            callback(run)
        except Exception as problem:  # noqa: BLE001 - user code on the supervisor's thread
            with suppress(Warning):  # where warnings are errors: the other callbacks are called all the same
                warnings.warn(f"a done callback failed: {type(problem).__name__}: {problem}", stacklevel=2)


def _pass_on(known: weakref.ref[Run], records: Sequence[Record]) -> None:
    if (run := known()) is not None:
        run._on_records(records)


def _resolve(future: asyncio.Future[Run], run: Run) -> None:
    if not future.done():  # it may have been cancelled
        future.set_result(run)


# What was launched, for a run that goes on with it: nothing that the user has deleted is kept alive.

_VALUES = (type(None), bool, int, float, complex, str, bytes)
_MAX_SIZE = 10_000
"""Characters or bytes of a text that is kept itself."""


class RunCall:
    """A function and its arguments, by weak references where they are objects.

    Args:
        function: The launched function.
        arguments: Its arguments.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = _reference(function)
        self._arguments = [_reference(argument) for argument in arguments]

    def restore(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function and its arguments.

        Args:
            name: The function's name, for the error.

        Raises:
            LaunchError: One of them exists no more.
        """
        function, *arguments = (reference() for reference in (self._function, *self._arguments))
        gone = ["the function"] if function is _GONE else []
        gone += [f"argument {index}" for index, value in enumerate(arguments) if value is _GONE]
        if gone:
            raise LaunchError(
                f"{' and '.join(gone)} of the run exist no more; pass them: notebook_launcher({name}, args, resume=run)"
            )
        return function, tuple(arguments)


_GONE: Any = object()


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value, or `_GONE` once the user has deleted it."""
    if type(value) in _VALUES and (not isinstance(value, (str, bytes)) or len(value) <= _MAX_SIZE):
        return lambda: value
    if type(value) is tuple and len(value) <= _MAX_SIZE:
        parts = [_reference(part) for part in value]
        return lambda: _GONE if any(part() is _GONE for part in parts) else tuple(part() for part in parts)
    if type(value) is dict and len(value) <= _MAX_SIZE and all(type(key) in _VALUES for key in value):
        items = {key: _reference(part) for key, part in value.items()}
        return lambda: (
            _GONE if any(part() is _GONE for part in items.values()) else {key: part() for key, part in items.items()}
        )
    if type(value) is list and len(value) <= _MAX_SIZE:
        parts = [_reference(part) for part in value]
        return lambda: _GONE if any(part() is _GONE for part in parts) else [part() for part in parts]
    try:
        known = weakref.ref(value)
    except TypeError:
        return lambda: _GONE
    return lambda: _GONE if (found := known()) is None else found
