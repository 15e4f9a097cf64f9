"""`Run`, the user's handle to a launch, both while it runs and afterwards."""

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
from typing import TYPE_CHECKING, Any

from notebook_accelerate import errors
from notebook_accelerate._mistakes import reports_mistakes_of_methods
from notebook_accelerate.config.plain_values import check_seconds, check_whole_number, is_number
from notebook_accelerate.debugging.session import Session
from notebook_accelerate.errors import RunNotFinishedError, WorkerError
from notebook_accelerate.launch import run_debugging, run_display
from notebook_accelerate.launch.output.running_cell import running_kernel
from notebook_accelerate.launch.report.profile import Profile
from notebook_accelerate.launch.report.tensorboard import write_event_files
from notebook_accelerate.launch.state.interrupts import wait_for
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.run_commands import DEFAULT_GRACE, NoCommands, RunCommands
from notebook_accelerate.launch.state.run_events import RUN, RanksReleased, RunCreated, RunEnded, RunLost
from notebook_accelerate.launch.state.run_state import Attempt, RankInfo, ResumePoint, RunState, Stall
from notebook_accelerate.launch.state.run_view import RunInternals, internals
from notebook_accelerate.telemetry import Metrics, RankFailure, Store, steady_time
from notebook_accelerate.telemetry.curves import plot_with

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.debugging.session import Stacks
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.report.run_report import Report
    from notebook_accelerate.launch.report.samples import RunMemory, Samples
    from notebook_accelerate.launch.run_debugging import DebuggerReplies
    from notebook_accelerate.launch.state.call_arguments import Plain
    from notebook_accelerate.telemetry.store import Record

_numbers = itertools.count(1)


def default_name(function_name: str, number: int) -> str:
    """Return the default name of a run."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", function_name).strip("-._") or "run"
    return f"{plain[:80]}-{number}"


def next_number() -> int:
    """Return the number of the next run of this kernel, and reserve it."""
    return next(_numbers)


@reports_mistakes_of_methods
class Run:
    """A launch, in progress or ended. It reads the journal and forwards commands to the supervisor.

    Runs are created by ``notebook_launcher``, `attach` and `open_run`. The class itself starts nothing. ``await run``
    waits for the end without blocking the kernel's event loop, and returns the run or raises its error.

    Args:
        config: The launch configuration.
        function_name: Name of the launched function.
        journal: The journal to read. If None, a new one is created.
        commands: Sends commands to the supervisor, or None if the run has no supervisor.
        number: The run's number in this kernel. If None, the next free number is used.
        name: The run's name. If "", the configured name is used, or else the function's name with the run's number.
        arguments: The function's arguments by name, as plain values.

    Attributes:
        id: Number of the run in this kernel, from 1.
        config: The launch configuration.
        function_name: Name of the launched function.
        name: The run's name, chosen by the user or by default.
        folder: The folder of a kept run, or None.
        origin: The notebook or folder from which a detached run was launched, or "" for other runs.
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
        self.origin = ""
        self._internals = RunInternals(
            journal=Journal() if journal is None else journal, commands=NoCommands() if commands is None else commands
        )
        self._output = run_display.LaunchOutput()
        self._lock = threading.RLock()
        # The reference is weak, because the error refers to the run.
        self._error: weakref.ref[WorkerError] | None = None
        self._done, self._released = threading.Event(), threading.Event()
        self._released.set()
        self._callbacks: list[Callable[[Run], None]] = []
        self._ending_callbacks: list[Callable[[Run], None]] = []
        if not self._internals.journal.state.started:
            self._internals.journal.append(RunCreated(function_name, dict(arguments or {})))
        self._unsubscribe: Callable[[], None] | None = None
        state = self._internals.journal.state
        if state.ended is not None:
            self._done.set()
        if state.held:
            self._released.clear()
        if state.ended is None or state.held:
            # Use a weak reference, so that appenders, such as the thread that follows a file, do not keep the run
            # alive.
            known = weakref.ref(self)
            self._unsubscribe = self._internals.journal.subscribe(lambda records: _pass_on(known, records))

    # ---- results and state

    @property
    def status(self) -> str:
        """One of "queued", "starting", "running", "stopping", "succeeded", "failed", "stopped" and "lost"."""
        return self._state.status

    @property
    def _state(self) -> RunState:
        return self._internals.journal.state

    @property
    def arguments(self) -> Mapping[str, Plain]:
        """The function's arguments by name, as plain values.

        Values in dicts and dataclasses have names like "config.lr".
        """
        return self._state.arguments

    @property
    def plan(self) -> LaunchPlan | None:
        """The launch plan, or None until it has been made."""
        return self._state.plan

    @property
    def started(self) -> float:
        """When the launch started, in seconds since the epoch."""
        return self._state.started

    @property
    def ended(self) -> float | None:
        """When the run ended, in seconds since the epoch, or None while it is running."""
        return self._state.ended

    @property
    def done(self) -> bool:
        """Whether the run is over and its views show their static form, so that ``wait()`` returns immediately."""
        return self._done.is_set()

    @property
    def held(self) -> bool:
        """Whether ranks are kept for inspection after a failure (``hold_on_error=True``)."""
        return self._state.held

    @property
    def paused(self) -> tuple[int, ...]:
        """The ranks that ``pause()`` holds, in order."""
        return tuple(sorted(self._state.paused))

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts, oldest first."""
        return list(self._state.attempts)

    @property
    def failures(self) -> tuple[RankFailure, ...]:
        """The failures of the last attempt, starting with the first one."""
        return self._state.failures

    @property
    def resume_points(self) -> tuple[ResumePoint, ...]:
        """The points at which the run continues the training of earlier runs, oldest first."""
        return self._state.resume_points

    @property
    def notes(self) -> list[str]:
        """Notes about the launch, such as that a port was taken."""
        return list(self._state.notes)

    @property
    def warnings(self) -> list[str]:
        """The likely mistakes found by the sanity checks, each listed once."""
        return list(self._state.warnings)

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """The results of automatic diagnoses, oldest first."""
        return list(self._state.diagnoses)

    @property
    def stall(self) -> Stall | None:
        """The current stall, with its start time and cause, or None while at least one rank is making progress."""
        return self._state.stall

    @property
    def prompts(self) -> tuple[int, ...]:
        """The ranks that are waiting for a line of input, in order."""
        return tuple(sorted(self._state.prompts))

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """The ranks shown in this notebook, in order. On several machines, only the first notebook shows all ranks."""
        last_step = self._internals.store.last_step
        return tuple(
            replace(info, last_step=last_step[info.rank]) if info.rank in last_step else info
            for info in self._state.ranks
        )

    @property
    def results(self) -> tuple[Any, ...]:
        """The return values of the function, one per rank, each unpickled when it is first read.

        The values are kept while a variable (or IPython's ``Out``) refers to the run. The values of the last three
        ended runs are also kept, if they take at most 1 GB in total. `free_results` frees the values of a run.

        Raises:
            RunNotFinishedError: The run is still running.
            WorkerError: The run did not succeed. The results of individual ranks are in ``run.ranks``.
            SerializationError: A value cannot be transferred to the kernel. The values of other ranks are in
                ``run.ranks``.
            ResultsFreedError: The results were freed.
        """
        if self.ended is None:
            raise RunNotFinishedError(f"run {self.id} is {self.status}; wait for it with run.wait() or await run")
        if self.error is not None:
            raise self.error
        return tuple(info.result for info in self._state.ranks)

    @property
    def error(self) -> WorkerError | None:
        """Why the run did not succeed, or None if it is still running or has succeeded."""
        state = self._state
        with self._lock:
            known = self._error() if self._error is not None else None
            if known is not None or not state.error:
                return known
            found = getattr(errors, state.error, None)  # The journal of another version may name an unknown class.
            kind = found if isinstance(found, type) and issubclass(found, WorkerError) else WorkerError
            error = kind(state.message, self, state.failures if state.status == "failed" else ())
            error.__cause__ = state.cause
            self._error = weakref.ref(error)
            return error

    @property
    def metrics(self) -> Metrics:
        """The metrics that the ranks logged, by name: a live mapping, with ``plot()`` and ``to_pandas()``."""
        return _metrics_of(self._internals.store)

    @property
    def automatic_metrics(self) -> Metrics:
        """Like ``metrics``, but for values recorded without calling ``log``, such as "auto/loss".

        "system/memory_gb" is another example. With ``LaunchConfig(automatic_metrics=False)``, the mapping is empty.
        """
        return _metrics_of(self._internals.store.automatic if self.config.automatic_metrics else Store())

    @property
    def elapsed(self) -> float:
        """The seconds since the launch, or from the launch to the end if the run has ended."""
        return (self.ended or steady_time.now()) - self.started

    def logs(self, rank: int | None = None, tail: int | None = None) -> list[str]:
        """Return the lines that the ranks wrote, oldest first. The oldest lines of a long output are not kept.

        Args:
            rank: The rank whose lines to return. None means all ranks, with a label on each line.
            tail: Return only the last ``tail`` lines.

        Raises:
            ValueError: There is no such rank, or ``tail`` is negative.
        """
        if tail is not None:
            check_whole_number("tail", tail, 0)
        known = [info.rank for info in self._state.ranks]
        if rank is not None and rank not in known:
            raise ValueError(f"rank={rank!r} is not a rank that is shown here; pass one of {known}")
        if rank is not None:
            lines = [line.text for line in self._internals.store.log_lines(rank)]
        else:
            stamped = [
                (line.time, f"[rank {r}] {line.text}") for r in known for line in self._internals.store.log_lines(r)
            ]
            lines = [text for _, text in sorted(stamped, key=lambda pair: pair[0])]
        return lines if tail is None else lines[max(0, len(lines) - tail) :]

    def to_tensorboard(self, folder: str | PathLike[str]) -> Path:
        """Write the metrics as TensorBoard event files. If there are several ranks, each gets its own subfolder.

        Points without a step are numbered from 0.

        Args:
            folder: The folder to write to. It is created if it does not exist.

        Returns:
            The absolute path of the folder.

        Raises:
            ImportError: tensorboard is not installed.
        """
        return write_event_files(self._internals.store, folder)

    def report(self) -> Report:
        """Return a report of the run as static HTML and as text, which also works in the saved notebook."""
        from notebook_accelerate.launch.report.run_report import Report

        return Report(self)

    # ---- control

    def unpause(self, ranks: Iterable[int] | None = None, timeout: float = 5.0) -> dict[int, str]:
        """Let ranks that were paused by ``pause`` continue.

        Args:
            ranks: The global indices of the ranks. None means all ranks.
            timeout: Seconds to wait for their replies.

        Returns:
            For each rank, "unpaused" or the reason why the rank did not reply.

        Raises:
            ValueError: There is no such rank.
        """
        return run_debugging.unpause(self._session(), self._internals.commands, ranks, timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the run to end, and show the prompts of ranks that ask for input.

        Args:
            timeout: Seconds to wait. None means no limit.

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
            prompt = self._internals.commands.prompts.claim_next(left, until=self._done.is_set)
            if prompt is not None:
                # If an interrupt stops the run, as in a blocking launch, the prompt is not returned to the queue.
                run_debugging.show_prompt(prompt, self._internals.commands.prompts, keep=not self.config.block)
            elif left == 0.0:
                break
        return self._done.is_set()

    def stop(self, grace: float = DEFAULT_GRACE, wait: bool = True) -> None:
        """End the run and return once every rank has exited. If the run is over, do nothing.

        If the run was detached, has finished, and its process is waiting for space on a full disk, that process exits
        without writing the rest of the journal.

        Ranks receive a KeyboardInterrupt, then SIGTERM, then, after ``grace`` seconds, SIGKILL. A second call during
        the first kills the ranks immediately.

        Args:
            grace: Seconds that the ranks have to end by themselves.
            wait: Whether to wait until the run has ended. If False, the call may be made from any thread.

        Raises:
            ValueError: ``grace`` is negative, or not a number.
            NotebookAccelerateError: The run belongs to another process, and was only opened here with `open_run`.
        """
        check_seconds("grace", grace)
        commands = self._internals.commands
        if not (self._done.is_set() and self._released.is_set()) or commands.connected:
            commands.stop(grace)
        if wait:
            wait_for_release(self)

    def free_results(self) -> None:
        """Free the results of an ended run. Its report, metrics and logs remain.

        Raises:
            RunNotFinishedError: The run is still running, or its ranks are held.
        """
        self._check_ended()
        for info in self._state.ranks:
            if info.returned is not None:
                info.returned.free(f"the results of run {self.id} were freed by run.free_results()")

    def delete(self) -> None:
        """Delete the journal and the results of an ended kept run, and its folder if it is then empty.

        Other files in the folder, such as those that the function saved there, remain. The folder itself also remains
        if it was renamed, or was not created for the run.

        Raises:
            RunNotFinishedError: The run is still running, or its ranks are held.
            ValueError: The run is not kept in a folder.
            FileNotFoundError: The run has already been deleted.
            OSError: A file cannot be deleted.
        """
        self._check_ended()
        file, delete_files = self._internals.journal_file, self._internals.delete_files
        if file is None or delete_files is None:
            raise ValueError(f"run {self.name} is not kept in a folder: it was launched without save='runs'")
        delete_files(file, self.name, self.started, lost=self.status == "lost")

    def _check_ended(self) -> None:
        if self.ended is None or self.held:
            status = "held" if self.held else self.status
            raise RunNotFinishedError(f"run {self.id} is {status}; end it first: run.stop()")

    def add_done_callback(self, callback: Callable[[Run], None]) -> None:
        """Call ``callback(run)`` on the supervisor's thread at the end of the run, or immediately if it is over.

        Args:
            callback: The function to call, once, with the run. Its exceptions become warnings.
        """
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
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
            # Wake up regularly, because ipykernel notices an interrupt of an await only when its loop wakes up.
            while not future.done():
                await asyncio.wait([future], timeout=0.2)
        except (asyncio.CancelledError, KeyboardInterrupt):
            # Don't stop a run of another process, because it outlives the kernel, whose exit also cancels the cell.
            if not (self.config.detach or self._internals.commands.connected):
                self.stop()
            raise
        if self.error is not None:
            raise self.error
        return self

    # ---- debugging

    def _session(self) -> Session:
        return Session(self._internals.commands.requests, lambda: self._state.rank_states)

    def diagnose(self) -> Diagnosis:
        """Find out, within about two seconds, where every rank is and why the run is stuck.

        Returns:
            A verdict in one sentence, and the ranks grouped by location, including ranks that cannot answer.
        """
        return run_debugging.diagnose(self._session(), self._internals.journal)

    def stacks(self, ranks: Iterable[int] | None = None) -> Stacks:
        """Return the main thread's frames by rank, outermost first.

        Args:
            ranks: The global indices of the ranks. None means all ranks.

        Raises:
            ValueError: There is no such rank.
        """
        return self._session().stacks(ranks)

    def sample(self, seconds: float = 5.0, ranks: Iterable[int] | None = None, rate: float = 100.0) -> Samples:
        """Sample where the main threads of live ranks spend their time, without stopping them.

        A thread of each rank inspects the main thread's stack. Each sample stands for the time since the previous one.
        While native code holds the interpreter lock, no sample can be taken, and the next one counts for that time.

        Args:
            seconds: How long to sample, at most 600. The call returns after that time.
            ranks: The global indices of the ranks. None means all ranks.
            rate: Samples per second, at most 1,000.

        Returns:
            The time in each line of your code, by rank, and a flame graph. A cell whose last line is this object
            displays both.

        Raises:
            ValueError: ``seconds`` or ``rate`` is out of range, or there is no such rank.
        """
        return run_debugging.sample(self._session(), seconds, ranks, rate)

    def profile(
        self,
        steps: int | None = None,
        ranks: Iterable[int] | None = None,
        memory: bool = False,
        seconds: float | None = None,
    ) -> Profile:
        """Record steps of live ranks with torch's profiler, without changing or stopping their code.

        Recording starts at the next step boundary (an optimizer step, or ``log`` without an optimizer), and this call
        returns after the last recorded step. Traces grow with each operation, so record only a few steps.

        Args:
            steps: The number of steps, at most 1,000. If None, 3 steps are recorded, and the stacks are sampled for at
                least half a second, even if later steps have begun, because three short steps give too few samples to
                find something small in each step.
            ranks: The global indices of the ranks. None means all ranks.
            memory: Whether to record memory allocations as well.
            seconds: Record for at most this many seconds (600 at most), and start even if no step boundary is reached.
                If None, record until the last step ends.

        Returns:
            Findings as sentences, tables of operations and lines, and the ranks' timeline. A cell whose last line is
            this object displays them. Its ``missing`` gives the reason for each rank without a trace.

        Raises:
            ValueError: ``steps`` or ``seconds`` is out of range, or there is no such rank.
        """
        return run_debugging.profile(self._session(), steps, ranks, seconds, memory=memory)

    @property
    def profiles(self) -> list[Profile]:
        """The profiles recorded by ``Accelerator.profile`` with ``output_trace_dir``, one per folder, oldest first.

        Each access reads the files. A profile's ``missing`` lists files that were deleted, or are on another machine.
        """
        return Profile.written((rank, path) for rank, path, _ in self._internals.journal.store.traces())

    def memory(self, ranks: Iterable[int] | None = None, estimate: Any = None, seconds: float = 30.0) -> RunMemory:
        """Find out what the memory of live ranks holds, and what else would fit into it.

        One step is recorded to find the activations at the peak. If no step ends within ``seconds``, the activations
        remain unknown.

        Args:
            ranks: The global indices of the ranks. None means all ranks.
            estimate: The return value of ``estimate_memory`` for the same training, to compare with.
            seconds: How long to wait for a step, at most 600. With 0, do not wait.

        Returns:
            The memory in bytes, by rank: parameters, gradients, optimizer state, activations, other tensors, cache and
            process. It is also broken down by module, by variable and by line. A cell whose last line is this object
            displays tables.

        Raises:
            ValueError: ``seconds`` is out of range, or there is no such rank.
        """
        return run_debugging.memory_of(self._session(), self, ranks, estimate, seconds)

    def ask(
        self, expression: str, ranks: Iterable[int] | None = None, frame: str | None = None, timeout: float = 5.0
    ) -> dict[int, Any]:
        """Evaluate an expression in live ranks, between two steps, without stopping them.

        A rank evaluates the expression at its next step boundary (an optimizer step, or ``log``). If there is none
        within half a second, the expression is evaluated at the main thread's next bytecode, or by another thread if
        the main thread is waiting in native code. A rank that holds the interpreter lock in native code cannot evaluate
        expressions; only its stacks can be read.

        Args:
            expression: A Python expression, such as "model.head.weight.norm()".
            ranks: The global indices of the ranks. None means all ranks.
            frame: The function on the stack whose variables to use, by name. None means the launched function.
            timeout: Seconds to wait for the answers.

        Returns:
            The value on each rank, or an ``AskError`` for a rank that did not answer.

        Raises:
            ValueError: ``expression`` is not a Python expression, or there is no such rank.
        """
        check_seconds("timeout", timeout)
        return self._session().ask(expression, ranks, frame, timeout)

    def complete(self, text: str, rank: int = 0, frame: str | None = None, timeout: float = 3.0) -> list[str]:
        """Complete the last name of an expression with the variables of a rank's frame.

        Args:
            text: The beginning of the expression, such as "model.head.wei".
            rank: The rank's global index.
            frame: The function on the stack whose variables to use, by name. None means the one where the debugger
                stopped, or else the launched function.
            timeout: Seconds to wait for the answer.

        Returns:
            The completed expressions, or an empty list if there are none or the rank does not answer.

        Raises:
            ValueError: There is no such rank.
        """
        check_seconds("timeout", timeout)
        return self._session().complete(text, rank, frame, timeout)

    def pause(self, ranks: Iterable[int] | None = None, timeout: float = 5.0) -> dict[int, str]:
        """Make ranks wait at their next step boundary until ``unpause``. While they wait, time limits are suspended.

        A step boundary is an optimizer step, or ``log`` without an optimizer.

        Args:
            ranks: The global indices of the ranks. None means all ranks.
            timeout: Seconds to wait for the ranks to reach a boundary.

        Returns:
            For each rank, "paused" or the reason why the rank is not paused.

        Raises:
            ValueError: There is no such rank.
        """
        wanted = [info.rank for info in self.ranks] if ranks is None else list(ranks)
        return run_debugging.pause(self._session(), self._internals.commands, wanted, timeout)

    def debugpy(self, rank: int = 0, timeout: float = 30.0) -> str:
        """Start debugpy in a rank so that an editor can attach to the rank, and print the address to connect to.

        Args:
            rank: The rank's global index.
            timeout: Seconds to wait for the rank.

        Returns:
            The address on the loopback interface of the rank's machine, such as "127.0.0.1:5678", or the reason why the
            rank did not reply.

        Raises:
            ValueError: There is no such rank.
            NotebookAccelerateError: debugpy is not installed on the rank's machine, or cannot open a port.
        """
        check_seconds("timeout", timeout)
        address = self._session().debugpy(rank, timeout)
        print(f"debugpy of rank {rank} listens on {address}")  # noqa: T201 - the answer to a command typed in a cell
        return address

    def debug(self, rank: int | None = None) -> None:
        """Use a rank's debugger in this cell, until the rank continues or quits.

        A running rank stops at its next bytecode. For a rank that failed with ``hold_on_error=True``, the debugger
        opens at the failing line. For a rank that waits in ``input()``, the rank's prompt is shown, even if it is
        already shown elsewhere.

        If several ranks are stopped, ``rank 1`` at the prompt switches to the debugger of rank 1.

        Args:
            rank: The rank's global index. None means the first rank stopped in a debugger, or else the first that
                failed, the first that waits for input, or the first that is running, in this order.

        Raises:
            ValueError: There is no such rank, or the rank has already ended.
        """
        run_debugging.debug(self._session(), self, self._internals.commands, self._internals.journal, rank)

    def debug_command(self, command: str, ranks: Iterable[int] | None = None, timeout: float = 10.0) -> DebuggerReplies:
        """Send one debugger command to several stopped ranks and return the replies side by side.

        Args:
            command: The command, as one would type it at the debugger's prompt, such as "p loss".
            ranks: The global indices of the ranks. None means all stopped ranks.
            timeout: Seconds to wait for the answers.

        Returns:
            The debugger's output by rank, or "(continues)" for a rank that has left the debugger.

        Raises:
            ValueError: One of the ranks is not stopped, or no rank is stopped.
        """
        return run_debugging.debug_command(self._internals.commands.prompts, command, ranks, timeout)

    # ---- display

    def __repr__(self) -> str:
        count = len(self._state.ranks) or self.config.num_processes or 1
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        given = given_name(self)
        name = f" {given!r}" if given else ""
        return f"<Run {self.id}{name}: {self.function_name}, {self.status}, {ranks}, {self.elapsed:.1f} s>"

    def panel(self) -> Any:
        """Return the run's live panel. Any number of cells can display it, as the value of their last line.

        In JupyterLab and Notebook, the panel stays live after the run has ended, until the kernel exits. A saved
        notebook shows the static report, as does a notebook that is opened without the kernel. In other front ends, the
        report replaces the panel when the run ends. If live widgets are not available, the panel is the report, which
        is updated while the run is running.
        """
        return self._output.panel(self._shown())

    def debug_panel(self) -> Any:
        """Return a panel for debugging the ranks, which a cell displays if it is the value of the last line.

        The panel shows where the ranks are, and their stacks, and evaluates expressions on them.

        Raises:
            ImportError: ipywidgets is not installed.
        """
        return self._output.debug_panel(self._shown())

    def _shown(self) -> Run:
        """Return the run to show in a view. For an ended run, this is a copy without the results.

        A view may outlive the user's references to the run, and must not keep the results alive.
        """
        return self if self.ended is None or self.held else without_results(self)

    # ---- called by IPython

    def _repr_html_(self) -> str | None:
        # The run's panel is already shown under this cell.
        if (cell := self._output.launched_under) and cell == run_display.current_cell():
            return None
        return str(self.report().html)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self)} if self._repr_html_() is None else self._static()

    def _static(self) -> dict[str, str]:
        return self.report().bundle

    def _ipython_display_(self) -> None:
        """Show the live panel while the run is running. Otherwise, let IPython show the static form."""
        live = self.ended is None and run_display.current_cell() != self._output.launched_under
        if not live or running_kernel() is None or not run_display.try_to_show(lambda: self.panel().show()):
            raise NotImplementedError  # IPython then requests the MIME bundle.

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
            self._unsubscribe()  # The journal must not keep the run alive once the user has dropped it.
            self._unsubscribe = None

    def _finish(self) -> None:
        with self._lock:
            if self._internals.journal.state.held:
                self._released.clear()
            ending, self._ending_callbacks = self._ending_callbacks, []
        try:
            _call(self, ending)
        finally:  # An interrupt may end the callbacks of an inline run, which are called on the main thread.
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
                self._done.set()
            self._internals.commands.prompts.close()
            if self._internals.journal.state.held:
                self._internals.commands.prompts.reopen()
        _call(self, callbacks)


def rebuild(config: LaunchConfig, function_name: str, records: Iterable[Record]) -> Run:
    """Return a run rebuilt from its journal's ``records``. It has panels and a report, but no processes.

    If the records do not include the end of the run, the run counts as lost.
    """
    journal = Journal()
    journal.replay(records)
    if journal.state.ended is None:
        journal.append(RunLost("the journal ends before the run"), journal.last_time)
    return Run(config, function_name, journal)


def without_results(run: Run) -> Run:
    """Return an ended run without its results and exception objects, which views and the registry must not keep."""
    why = (
        f"the results of run {run.id} were freed: only the last runs, and runs that a variable refers to, "
        "keep their results; assign the run to a variable: run = notebook_launcher(...)"
    )
    parts = internals(run)
    copied = Run(run.config, run.function_name, parts.journal.without_results(why), number=run.id, name=run.name)
    copied.folder, copied.origin = run.folder, run.origin
    kept = internals(copied)
    kept.journal_file, kept.environment = parts.journal_file, parts.environment
    kept.call, kept.delete_files = parts.call, parts.delete_files
    return copied


def result_bytes(run: Run) -> int:
    """Return the approximate size of a run's results in bytes. The registry uses it to decide which ones to keep."""
    ranks = internals(run).journal.state.ranks
    return sum(info.returned.nbytes for info in ranks if info.returned is not None)


def add_ending_callback(run: Run, callback: Callable[[Run], None]) -> None:
    """Call ``callback(run)`` at the end of the run, before ``stop()`` and ``wait()`` return.

    If the run is already over, call it immediately. Views show their static output in this callback, because the
    notebook may be saved as soon as the cell that waits for the run has finished.

    Args:
        run: The run whose end to wait for.
        callback: The function to call, once, with the run. Its exceptions become warnings.
    """
    with run._lock:
        if run.ended is None:
            run._ending_callbacks.append(callback)
            return
    callback(run)


def output_of(run: Run) -> run_display.LaunchOutput:
    """Return the object that holds a run's panels and the output that the launch has reserved for them."""
    return run._output


def given_name(run: Run) -> str:
    """Return the run's name if it differs from the default, or ""."""
    return "" if run.name == default_name(run.function_name, run.id) else run.name


def _metrics_of(store: Store) -> Metrics:
    from notebook_accelerate.launch.report import svg_curves  # Imported here, because a launch needs no charts.

    plot_with(svg_curves.plot)
    return Metrics(store)


def wait_for_release(run: Run) -> None:
    """Wait until a run has ended, and until any ranks that it holds have been released."""
    # A subscriber may stop its run, but must not wait here, because the run cannot end before the subscriber returns.
    if threading.current_thread().name not in (f"notebook-accelerate-run-{run.id}", "notebook-accelerate-sampler"):
        wait_for(run._done)
        wait_for(run._released)


def _call(run: Run, callbacks: list[Callable[[Run], None]]) -> None:
    for callback in callbacks:
        try:
            callback(run)
        except Exception as problem:  # noqa: BLE001 - user code may raise any error
            # Call the remaining callbacks even if warnings are configured to raise errors.
            with suppress(Warning):
                warnings.warn(f"a done callback failed: {type(problem).__name__}: {problem}", stacklevel=2)


def _pass_on(known: weakref.ref[Run], records: Sequence[Record]) -> None:
    if (run := known()) is not None:
        run._on_records(records)


def _resolve(future: asyncio.Future[Run], run: Run) -> None:
    if not future.done():  # The future may have been cancelled.
        future.set_result(run)
