"""The exceptions that notebook_accelerate raises on purpose, and the description of a rank's failure.

A user's own error, a dead worker and a broken launch are different types::

    NotebookAccelerateError
    ├── LaunchError                     the launch could not be planned or started
    │   ├── PortInUseError              a fixed port of a multi-node launch is taken
    │   ├── DeviceBusyError             another run holds a device
    │   └── AuthenticationError         another machine did not prove that it belongs to the run
    ├── WorkerError                     a run ended without success; its ``.run`` is the run
    │   ├── RunStoppedError             stopped by the user
    │   ├── RunTimeoutError             ``timeout`` or ``hang_timeout`` was reached
    │   ├── WorkerDiedError             a rank's process ended without an exception (signal, ``os._exit``)
    │   └── RunLostError                the process of a kept run is gone, and has not recorded an end
    ├── BrokenRunError                  the journal of a kept run is damaged, or not from this package
    ├── AskError                        a rank could not answer a question
    ├── RunNotFinishedError             the results of a run were requested or freed before its end
    ├── ResultsFreedError               results were requested after they were freed
    ├── CheckpointError                 a checkpoint could not be written or loaded
    │   ├── BrokenCheckpointError       a checkpoint is incomplete or damaged
    │   └── CheckpointMismatchError     a checkpoint belongs to another world size, strategy or set of objects
    ├── SerializationError              something cannot be transferred between the kernel and a rank
    ├── ChannelClosedError              the other end of a channel is gone
    └── DistributedOperationException   debug mode: ranks passed different tensors to a collective

Bad arguments raise plain ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

SITE = "https://notebook-accelerate.github.io/notebook-accelerate/"
"""The address of the published documentation."""
PAGES = f"{SITE}e/"
"""The permanent short address of the documentation's pages on exceptions, without the name of the class at its end."""


class FrameInfo(NamedTuple):
    """A line of a traceback."""

    filename: str
    lineno: int
    function: str
    source: str


class ExceptionInfo(NamedTuple):
    """An exception in a chain. ``link`` says how it led to the next one: "cause", "context", or "" for the last one."""

    type: str
    message: str
    frames: tuple[FrameInfo, ...]
    link: str = ""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The reason why a rank did not succeed.

    Attributes:
        rank: The global index of the rank.
        kind: "exception", "exit" (``sys.exit``, ``os._exit``), "signal", "interrupted" or "lost" (together with its
            machine).
        time: The time of the failure, in seconds since the epoch.
        message: The reason in one sentence.
        chain: The exceptions, ending with the one that left the function. Empty if the process ended without an
            exception.
        exception: The original exception, if it could be transferred to the kernel.
        signal: The number of the signal that killed the process.
        consequence: Whether another rank's failure caused this failure.
    """

    rank: int
    kind: str
    time: float
    message: str
    chain: tuple[ExceptionInfo, ...] = ()
    exception: BaseException | None = None
    signal: int | None = None
    consequence: bool = False


class RankOutcome(Protocol):
    """The facts that are known about a rank of a `FailedRun`."""

    @property
    def rank(self) -> int:
        """The global index of the rank."""

    @property
    def state(self) -> str:
        """One of "starting", "running", "succeeded", "failed", "stopped" and "lost"."""

    @property
    def exit(self) -> str:
        """How the rank's process ended, such as "exit 0" or "SIGKILL", or "" while it is running."""

    @property
    def last_step(self) -> int | None:
        """The last step that the rank logged, or None if it has not logged a step."""

    @property
    def result(self) -> Any:
        """The return value of the function, or None unless the rank has succeeded."""


class RunReport(Protocol):
    """The report on a run, as static HTML or as plain text."""

    @property
    def text(self) -> str:
        """The report as plain text."""

    @property
    def html(self) -> str:
        """The report as HTML."""

    def error_lines(self, error: WorkerError) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""


class FailedRun(Protocol):
    """The run that an error belongs to, which is a `notebook_accelerate.Run`.

    This class lists the attributes that are useful after a failure. ``isinstance(error.run, Run)`` gives type checkers
    all attributes.
    """

    @property
    def id(self) -> int:
        """The number of the run in its kernel, counted from 1."""

    @property
    def status(self) -> str:
        """One of "starting", "running", "stopping", "succeeded", "failed", "stopped" and "lost"."""

    @property
    def error(self) -> WorkerError | None:
        """The reason why the run did not succeed (see `Run.error`)."""

    @property
    def elapsed(self) -> float:
        """The seconds from the launch to the end of the run."""

    @property
    def ranks(self) -> Sequence[RankOutcome]:
        """The ranks of the run, in order."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The series that the ranks have logged, by name (see `Run.metrics`)."""

    def logs(self, rank: int | None = None, tail: int | None = None) -> list[str]:
        """Return the lines that the ranks have written (see `Run.logs`)."""

    def report(self) -> RunReport:
        """Return the report on the run (see `Run.report`)."""

    def debug(self, rank: int | None = None) -> None:
        """Open a debugger in a rank that was held after its failure (see `Run.debug`)."""

    def stop(self, grace: float = 5.0) -> None:
        """End the ranks that were held after their failure (see `Run.stop`)."""


def page_of(kind: type[BaseException]) -> str:
    """Return the address of the page on an exception's class, or on the nearest base class in this module."""
    documented = next(each for each in kind.__mro__ if each.__module__ == __name__)
    return f"{PAGES}{documented.__name__}"


def with_page(lines: list[str], kind: type[BaseException]) -> list[str]:
    """Return the lines that IPython shows for an error, followed in a notebook by the address of its page.

    In a terminal, only the lines are shown, because an error is often a single line there, and logs do not need the
    address.
    """
    in_notebook = getattr(ipython_shell(), "kernel", None) is not None
    return [*lines, f"see {page_of(kind)}"] if in_notebook else lines


def ipython_shell() -> Any:
    """Return IPython's shell in this process, or None outside of IPython. This does not import IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


class NotebookAccelerateError(Exception):
    """The base class of all exceptions of this package."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows, followed in a notebook by the address of the class's page."""
        formatter = getattr(ipython_shell(), "InteractiveTB", None)
        if formatter is None:
            return traceback.format_exception(self)
        return with_page(formatter.structured_traceback(type(self), self, self.__traceback__, tb_offset=1), type(self))


class LaunchError(NotebookAccelerateError):
    """Raised when a launch cannot be planned, or its processes cannot be started."""

    def _render_traceback_(self) -> list[str]:
        """Return the single line that IPython shows, because the launcher's own frames explain nothing."""
        return with_page([f"{type(self).__name__}: {self}"], type(self))


class PortInUseError(LaunchError):
    """Raised when the fixed port of a multi-node launch is taken on this machine."""


class DeviceBusyError(LaunchError):
    """Raised when another run of the user holds a device that a launch needs."""


class AuthenticationError(LaunchError):
    """Raised when the other end of a connection does not prove that it belongs to this run."""


class _Results(Mapping[int, Any]):
    """The return values, by rank. Each value is unpickled only when it is read."""

    def __init__(self, infos: Mapping[int, RankOutcome]) -> None:
        self._infos = infos

    def __getitem__(self, rank: int) -> Any:
        return self._infos[rank].result

    def __iter__(self) -> Iterator[int]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __repr__(self) -> str:
        return f"<results of ranks {', '.join(map(str, self._infos)) or 'none'}>"


class WorkerError(NotebookAccelerateError):
    """Raised when a run ends without success.

    Args:
        message: A description of the failure, in one paragraph.
        run: The run that ended without success.
        failures: One entry for each rank that failed.

    Attributes:
        run: The run, with its logs, metrics, ranks and report.
        failures: One `RankFailure` for each rank that failed, in chronological order. Empty if no rank failed.
    """

    def __init__(self, message: str, run: FailedRun | None = None, failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(message)
        self.run = run
        self.failures = tuple(failures)

    @property
    def rank(self) -> int | None:
        """The global index of the rank that failed first, or None if no rank failed."""
        return self.failures[0].rank if self.failures else None

    @property
    def results(self) -> Mapping[int, object]:
        """The return values of the ranks that succeeded, by rank."""
        if self.run is None:
            return {}
        return _Results({info.rank: info for info in self.run.ranks if info.state == "succeeded"})

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of the supervisor's own frames."""
        lines = [f"{type(self).__name__}: {self}"] if self.run is None else self.run.report().error_lines(self)
        return with_page(lines, self.documented_kind)

    @property
    def page(self) -> str:
        """The address of the page that explains the error."""
        return page_of(self.documented_kind)

    @property
    def documented_kind(self) -> type[BaseException]:
        """The class whose page is shown: the first exception's if this module defines it, or else this error's."""
        chain = self.failures[0].chain if self.failures else ()
        kind = globals().get(chain[-1].type.rpartition(".")[2]) if chain else None
        return kind if isinstance(kind, type) and issubclass(kind, NotebookAccelerateError) else type(self)


class RunStoppedError(WorkerError):
    """Raised when a run is stopped by the stop button, by ``run.stop()``, or together with the kernel."""


class RunTimeoutError(WorkerError):
    """Raised when a run reaches its ``timeout`` or ``hang_timeout`` and is stopped."""


class RunLostError(WorkerError):
    """Raised when the process of a kept run is gone without having recorded an end, for example after a restart."""


class RunInterrupted(KeyboardInterrupt):
    """Raised when the user interrupts a launch, after all ranks have exited.

    This is a KeyboardInterrupt, so it still interrupts the cell. An interrupt that arrives while a run is ending is
    raised, too, so that the code after the launch does not continue. In that case, ``run.status`` says how the run
    ended.

    Attributes:
        run: The run that was interrupted.
    """

    def __init__(self, run: FailedRun) -> None:
        if run.status == "stopped":
            text = f"run {run.id} was stopped after {run.elapsed:.1f} s; all its ranks have ended"
        else:
            text = f"the interrupt arrived as run {run.id} ended: it had {run.status} after {run.elapsed:.1f} s"
        super().__init__(text)
        self.run = run

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of the supervisor's own frames."""
        error = self.run.error if self.run.status == "failed" else None
        if error is not None:
            return [*error._render_traceback_(), f"KeyboardInterrupt: {self}"]
        return with_page([f"KeyboardInterrupt: {self}"], type(self))


class WorkerDiedError(WorkerError):
    """Raised when a rank's process ends without an exception, because of a signal or ``os._exit``."""


class RunNotFinishedError(NotebookAccelerateError, RuntimeError):
    """Raised when the results of a run are requested, or freed, while the run is still active."""


class ResultsFreedError(NotebookAccelerateError):
    """Raised when the results of a run are requested after they have been freed."""


class BrokenRunError(NotebookAccelerateError, ValueError):
    """Raised when the journal of a kept run is damaged, or was not written by this package."""


class CheckpointError(NotebookAccelerateError, RuntimeError):
    """Raised when a checkpoint cannot be written or loaded."""


class BrokenCheckpointError(CheckpointError):
    """Raised when a checkpoint was never finished, or its files do not match its manifest."""


class CheckpointMismatchError(CheckpointError):
    """Raised when a checkpoint was saved with a different number of ranks, strategy or set of objects."""


class SerializationError(NotebookAccelerateError):
    """Raised when a function, argument, return value or exception cannot be sent between the kernel and a rank."""


class AskError(NotebookAccelerateError):
    """Returned (not raised) instead of a rank's answer if the rank could not answer a question."""


class ChannelClosedError(NotebookAccelerateError):
    """Raised when the other end of a channel is gone."""


class DistributedOperationException(NotebookAccelerateError):  # noqa: N818 - Accelerate's name
    """Raised when ranks pass different structures, shapes or dtypes to a collective (with ACCELERATE_DEBUG_MODE=1)."""
