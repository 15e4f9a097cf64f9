"""Run a launch with a single process in the kernel itself, which then acts as the rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.environ import worker_variables
from notebook_accelerate.config.launch_config import launch_arguments_set
from notebook_accelerate.integrations import accelerate_alias, reporting
from notebook_accelerate.launch.output.standard_streams import StandardStream
from notebook_accelerate.launch.plan.planner import rank_environment
from notebook_accelerate.launch.state import failures, rank_result
from notebook_accelerate.launch.state.interrupts import deferred_interrupts
from notebook_accelerate.launch.state.run_events import (
    AttemptEnded,
    AttemptStarted,
    FailuresRecorded,
    RankExited,
    RankFailed,
    RankReturned,
    RankRunning,
    RankStarted,
    RunEnded,
)
from notebook_accelerate.launch.state.run_state import ENDED
from notebook_accelerate.telemetry import LogEvent, RankFailure, current_sink, install_sink, steady_time, tracebacks
from notebook_accelerate.telemetry.automatic_metrics import sampler
from notebook_accelerate.telemetry.inherited_state import isolated_state
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.telemetry.tracebacks import built_in_attribute, exit_code

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.state.journal import Journal
    from notebook_accelerate.telemetry import Event


class _DirectSink:
    """A sink that writes events directly to the run's journal, in place of a worker's sink."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def emit(self, event: Event) -> None:
        self._journal.add([Record(0, steady_time.now(), event)])

    send = emit

    def flush(self) -> None:
        return


class _Tee:
    """A wrapper around a standard stream that also records what is written, for ``run.logs()``."""

    def __init__(self, stream: Any, name: str, journal: Journal) -> None:
        self._stream, self._name, self._rest = stream, name, ""
        self._journal: Journal | None = journal
        self._shown = StandardStream(stream, name)

    def write(self, text: str) -> int:
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._keep(lines)
        self._shown.write(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing, because every write is flushed."""

    def _keep(self, text: str) -> None:
        if self._journal is not None:
            self._journal.add([Record(0, steady_time.now(), LogEvent(self._name, text))])

    def finish(self) -> None:
        """Record an unfinished last line, then drop the reference to the run's journal.

        A library that has saved ``sys.stdout`` during the run keeps this object alive, but not the journal.
        """
        if self._rest:
            self._keep(self._rest)
        self._journal = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True)
class InlineContext:
    """The facts about a run that the functions of this module need.

    Attributes:
        id: The run's number in this kernel.
        config: The launch configuration.
        plan: The launch plan.
        journal: The journal that receives the run's events.
    """

    id: int
    config: LaunchConfig
    plan: LaunchPlan
    journal: Journal


@contextmanager
def _acting_as_rank(run: InlineContext) -> Iterator[None]:
    """Give the kernel the environment, the sink and the streams of a rank. Afterwards, restore the kernel's own."""
    before = dict(os.environ)
    sink, streams = current_sink(), (sys.stdout, sys.stderr)
    variables = worker_variables(
        mixed_precision=run.config.mixed_precision, cpu=run.config.cpu or run.plan.accelerator == "cpu"
    )
    tees = _Tee(sys.stdout, "stdout", run.journal), _Tee(sys.stderr, "stderr", run.journal)
    try:  # The block starts before the first change, because an interrupt may arrive at any time.
        os.environ.update({**variables, **rank_environment(run.plan, 0)})
        sys.stdout, sys.stderr = tees
        install_sink(_DirectSink(run.journal))  # type: ignore[arg-type]
        # Defer interrupts, because a library whose connection was interrupted would not report anything in later runs
        # either.
        with deferred_interrupts():
            reporting.connect_libraries(run.config.report_from)
        sampler.start(enabled=run.config.automatic_metrics)
        with (
            isolated_state(),
            launch_arguments_set(run.config.accelerator),
            accelerate_alias.installed(run.config.as_accelerate),
        ):
            yield
    finally:
        for tee in tees:
            tee.finish()
        sys.stdout, sys.stderr = streams
        sampler.start(enabled=False)
        install_sink(sink)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def run_in_kernel(context: InlineContext, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run the function in this process and record how it ended.

    Raises:
        KeyboardInterrupt: The user stopped the run.
    """
    journal = context.journal
    with deferred_interrupts():
        for event in (AttemptStarted(0), RankStarted(0, os.getpid()), RankRunning(0)):
            journal.append(event)
    try:
        with _acting_as_rank(context):
            result = function(*arguments)
            with deferred_interrupts():
                journal.append(RankReturned(0, rank_result.holding(result)))
    except KeyboardInterrupt:
        _end(context, failures.stopped(context.id, journal.state.started))
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised by the user's function, kept in the run
        if not _is_clean_exit(error):
            _fail(context, error)
            return
    _end(context, RunEnded("succeeded"))


def _is_clean_exit(error: BaseException) -> bool:
    """Return whether an exception is an exit with status 0. This avoids isinstance and ==, which may run user code."""
    if not issubclass(type(error), SystemExit):
        return False
    code = built_in_attribute(error, "code", SystemExit)
    return code is None or (type(code) in (int, bool) and code == 0)


@deferred_interrupts()
def end_before_start(context: InlineContext) -> None:
    """End a run that was interrupted before its function started. Otherwise, ``shutdown`` would wait for it."""
    state = context.journal.state
    if state.ended is None:
        _end(context, failures.stopped(context.id, state.started))


@deferred_interrupts()
def _end(context: InlineContext, ended: RunEnded) -> None:
    journal = context.journal
    if journal.state.attempt_status == "running":
        rank = journal.state.rank(0)
        if not rank.exited:
            journal.append(RankExited(0, rank.state if rank.state in ENDED else ended.status, ""))
        journal.append(AttemptEnded(ended.status))
    journal.append(ended)


@deferred_interrupts()
def _fail(context: InlineContext, error: BaseException) -> None:
    chain = tracebacks.chain_of(error)
    # Don't use isinstance, which would run code of the exception's class.
    is_exit = issubclass(type(error), SystemExit)
    kind = "exit" if is_exit else "exception"
    message = f"{chain[-1].type}: {chain[-1].message}".rstrip(": ")
    if is_exit:
        message = f"the function called sys.exit({exit_code(error)})"
    failure = RankFailure(0, kind, steady_time.now(), message, chain, error)
    context.journal.append(RankFailed(failure))
    context.journal.append(RankExited(0, "failed", ""))
    context.journal.append(FailuresRecorded([failure]))
    context.journal.append(AttemptEnded(failures.headline([failure])))
    context.journal.append(failures.failed(context.id, context.journal.state))
