"""One process: the kernel itself is the rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from notebook_accelerate.config.environ import worker_variables
from notebook_accelerate.config.launch_arguments import launch_arguments_set
from notebook_accelerate.errors import RunInterrupted
from notebook_accelerate.launch.plan.planner import rank_environment
from notebook_accelerate.launch.state import error_messages
from notebook_accelerate.telemetry import LogEvent, RankFailure, current_sink, install_sink, tracebacks
from notebook_accelerate.telemetry.store import Record, Store
from notebook_accelerate.worker import shared_state

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry import Event


class _DirectSink:
    """Takes the place of a worker's sink: events go straight to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def emit(self, event: Event) -> None:
        self._store.add([Record(0, time.time(), event)])

    send = emit

    def flush(self) -> None:
        return


class _Tee:
    """A standard stream that also keeps what passes for ``run.logs()``."""

    def __init__(self, stream: TextIO, name: str, store: Store) -> None:
        self._stream, self._name, self._store, self._rest = stream, name, store, ""

    def write(self, text: str) -> int:
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._keep(lines)
        self._stream.write(text)
        return len(text)

    def _keep(self, text: str) -> None:
        self._store.add([Record(0, time.time(), LogEvent(self._name, text))])

    def finish(self) -> None:
        """Keep an unfinished last line too."""
        if self._rest:
            self._keep(self._rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _guest(run: Run) -> Iterator[None]:
    """Lend the kernel a rank's environment, sink and streams, and take all of it back."""
    assert run.plan is not None
    before = dict(os.environ)
    sink, streams = current_sink(), (sys.stdout, sys.stderr)
    variables = worker_variables(mixed_precision=run.config.mixed_precision, cpu=run.config.cpu)
    tees = _Tee(sys.stdout, "stdout", run.store), _Tee(sys.stderr, "stderr", run.store)
    try:  # from here on, for an interrupt may come between any two lines
        os.environ.update({**variables, **rank_environment(run.plan, 0)})
        sys.stdout, sys.stderr = tees
        install_sink(_DirectSink(run.store))  # type: ignore[arg-type]
        with shared_state.isolated(), launch_arguments_set(run.config.accelerator):
            yield
    finally:
        for tee in tees:
            tee.finish()
        sys.stdout, sys.stderr = streams
        install_sink(sink)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def execute(run: Run, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run the function in this process and write its end into ``run``.

    Raises:
        RunInterrupted: The user stopped it.
    """
    run._begin_attempt(0)
    run._set_status("running")
    info = run._info(0)
    info.pid, info.state = os.getpid(), "running"
    try:
        with _guest(run):
            info.result = function(*arguments)
    except KeyboardInterrupt as stop:
        info.state = "stopped"
        run._end_attempt("stopped")
        run._finish("stopped", error_messages.stopped(run))
        raise RunInterrupted(run) from stop
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the function's own, kept in the run
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            _fail(run, error)
            return
    info.state = "succeeded"
    run._end_attempt("succeeded")
    run._finish("succeeded", None)


def _fail(run: Run, error: BaseException) -> None:
    chain = tracebacks.chain_of(error)
    kind = "exit" if isinstance(error, SystemExit) else "exception"
    message = f"{chain[-1].type}: {chain[-1].message}".rstrip(": ")
    if isinstance(error, SystemExit):
        message = f"the function called sys.exit({error.code!r})"
    run.failures = (RankFailure(0, kind, time.time(), message, chain, error),)
    run._info(0).state = "failed"
    run._end_attempt(error_messages.headline(run.failures))
    run._finish("failed", error_messages.worker_error(run))
