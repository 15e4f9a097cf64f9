"""Every exception that notebook_accelerate raises on purpose, and how a rank's failure is described.

A user's own error, a dead worker and a broken launch are different types::

    NotebookAccelerateError
    ├── LaunchError                     the launch could not be planned or started
    │   ├── PortInUseError              a fixed port of a multi-node launch is taken
    │   ├── DeviceBusyError             another run holds the accelerators
    │   └── AuthenticationError         another machine did not prove that it belongs to the run
    ├── WorkerError                     a run ended without success; carries ``.run``
    │   ├── RunStoppedError             stopped by the user
    │   ├── RunTimeoutError             ``timeout`` or ``hang_timeout`` was reached
    │   ├── WorkerDiedError             a rank's process ended without an exception (signal, ``os._exit``)
    │   └── RunLostError                the process that ran a kept run is gone, and recorded no end
    ├── BrokenRunError                  the journal of a kept run is damaged, or not of this package
    ├── AskError                        a rank could not answer a question
    ├── RunNotFinishedError             results requested, or run closed, before its end
    ├── ResultsFreedError               results were requested after they were freed
    ├── CheckpointError                 a checkpoint could not be written or loaded
    │   ├── BrokenCheckpointError       it is incomplete or damaged
    │   └── CheckpointMismatchError     it belongs to another world size, strategy or set of objects
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

PAGES = "https://notebook-accelerate.github.io/notebook-accelerate/e/"
"""Where the documentation's pages on exceptions have short addresses, which stay: the name of a class follows."""


class FrameInfo(NamedTuple):
    """One line of a traceback."""

    filename: str
    lineno: int
    function: str
    source: str


class ExceptionInfo(NamedTuple):
    """One exception of a chain; ``link`` says how it led to the next: "cause", "context" or "" for the last."""

    type: str
    message: str
    frames: tuple[FrameInfo, ...]
    link: str = ""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why one rank did not succeed.

    Attributes:
        rank: Global index.
        kind: "exception", "exit" (``sys.exit``, ``os._exit``), "signal", "interrupted" or "lost" (with its machine).
        time: Seconds since the epoch.
        message: One sentence.
        chain: The exceptions, the one that left the function last; empty when the process just died.
        exception: The original exception, if it could be transferred to the kernel.
        signal: Number of the signal that ended the process.
        consequence: Whether another rank's failure caused this one.
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
    """One rank of a `FailedRun`."""

    @property
    def rank(self) -> int:
        """Global index."""

    @property
    def state(self) -> str:
        """One of "starting", "running", "succeeded", "failed", "stopped" and "lost"."""

    @property
    def exit(self) -> str:
        """How its process ended, as "exit 0" or "SIGKILL"; "" while it runs."""

    @property
    def last_step(self) -> int | None:
        """The last step it logged; None when it logged none."""

    @property
    def result(self) -> Any:
        """What the function returned; None unless the rank succeeded."""


class RunReport(Protocol):
    """A run as static HTML and as text."""

    @property
    def text(self) -> str:
        """The report as plain text."""

    @property
    def html(self) -> str:
        """The report as HTML."""

    def error_lines(self, error: WorkerError) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""


class FailedRun(Protocol):
    """The run that an error carries: a `notebook_accelerate.Run`.

    These are the attributes that are of use after a failure; ``isinstance(error.run, Run)`` narrows it to all of them.
    """

    @property
    def id(self) -> int:
        """Number of the run in its kernel, from 1."""

    @property
    def status(self) -> str:
        """One of "starting", "running", "stopping", "succeeded", "failed", "stopped" and "lost"."""

    @property
    def error(self) -> WorkerError | None:
        """Why the run did not succeed; see `Run.error`."""

    @property
    def elapsed(self) -> float:
        """Seconds from the launch to the end."""

    @property
    def ranks(self) -> Sequence[RankOutcome]:
        """The ranks, in order."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The series that the ranks logged, by name; see `Run.metrics`."""

    def logs(self, rank: int | None = None, tail: int | None = None) -> list[str]:
        """Return the lines that the ranks wrote; see `Run.logs`."""

    def report(self) -> RunReport:
        """Return the run as static HTML and as text; see `Run.report`."""

    def debug(self, rank: int | None = None) -> None:
        """Open a debugger in a rank that was kept; see `Run.debug`."""

    def stop(self, grace: float = 5.0) -> None:
        """End the ranks that were kept; see `Run.stop`."""


def page_of(kind: type[BaseException]) -> str:
    """Return the address of the page on an exception's class, or on the nearest base that is of this module."""
    documented = next(each for each in kind.__mro__ if each.__module__ == __name__)
    return f"{PAGES}{documented.__name__}"


def with_page(lines: list[str], kind: type[BaseException]) -> list[str]:
    """Return the lines of an error that IPython shows; in a notebook, which makes links, the page's address follows.

    A terminal gets the lines alone: there an error is often one line, and a log has no use for the address.
    """
    in_notebook = getattr(ipython_shell(), "kernel", None) is not None
    return [*lines, f"see {page_of(kind)}"] if in_notebook else lines


def ipython_shell() -> Any:
    """Return IPython's shell in this process; None outside IPython, which is not imported for this."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


class NotebookAccelerateError(Exception):
    """Base of every exception of this package."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: its own, and in a notebook the address of the class's page."""
        formatter = getattr(ipython_shell(), "InteractiveTB", None)
        if formatter is None:
            return traceback.format_exception(self)
        return with_page(formatter.structured_traceback(type(self), self, self.__traceback__, tb_offset=1), type(self))


class LaunchError(NotebookAccelerateError):
    """A launch could not be planned or its processes could not be started."""

    def _render_traceback_(self) -> list[str]:
        """Return the one line that IPython shows: the launcher's own frames explain nothing."""
        return with_page([f"{type(self).__name__}: {self}"], type(self))


class PortInUseError(LaunchError):
    """The fixed port of a multi-node launch is taken on this machine."""


class DeviceBusyError(LaunchError):
    """Another run of this kernel, or a detached run, holds the accelerators that this launch needs."""


class AuthenticationError(LaunchError):
    """The other end of a connection did not prove that it belongs to this run."""


class _Results(Mapping[int, Any]):
    """Return values by rank, each of which is unpickled when it is read."""

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
    """A run ended without success.

    Args:
        message: What happened, in one paragraph.
        run: The run.
        failures: One entry per rank that failed.

    Attributes:
        run: The run, with its logs, metrics, ranks and report.
        failures: One `RankFailure` per rank that failed, in order of time; empty if none did.
    """

    def __init__(self, message: str, run: FailedRun | None = None, failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(message)
        self.run = run
        self.failures = tuple(failures)

    @property
    def rank(self) -> int | None:
        """Global index of the rank that failed first; None when no rank did."""
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
        """Address of the page that explains the error."""
        return page_of(self.documented_kind)

    @property
    def documented_kind(self) -> type[BaseException]:
        """The class whose page helps: that of the first rank's exception where it is one of this module."""
        chain = self.failures[0].chain if self.failures else ()
        kind = globals().get(chain[-1].type.rpartition(".")[2]) if chain else None
        return kind if isinstance(kind, type) and issubclass(kind, NotebookAccelerateError) else type(self)


class RunStoppedError(WorkerError):
    """The run was stopped: by the stop button, by ``run.stop()``, or with the kernel."""


class RunTimeoutError(WorkerError):
    """The run reached its ``timeout`` or ``hang_timeout`` and was stopped."""


class RunLostError(WorkerError):
    """The process that ran a kept run is gone, and recorded no end: its kernel was killed, or its machine restarted."""


class RunInterrupted(KeyboardInterrupt):
    """The user interrupted a launch; every rank has ended.

    It is a KeyboardInterrupt, so that what interrupts a cell still interrupts it, and it carries ``.run``. An interrupt
    that arrives as a run ends is raised too, so that the code after the launch does not go on; ``run.status`` then
    tells how the run had ended.

    Attributes:
        run: The run.
    """

    def __init__(self, run: FailedRun) -> None:
        if run.status == "stopped":
            text = f"run {run.id} was stopped after {run.elapsed:.1f} s; all its ranks have ended"
        else:
            text = f"the interrupt arrived as run {run.id} ended: it had {run.status} after {run.elapsed:.1f} s"
        super().__init__(text)
        self.run = run

    def _render_traceback_(self) -> list[str]:
        """Return the lines IPython shows instead of the supervisor's own frames."""
        error = self.run.error if self.run.status == "failed" else None
        if error is not None:
            return [*error._render_traceback_(), f"KeyboardInterrupt: {self}"]
        return with_page([f"KeyboardInterrupt: {self}"], type(self))


class WorkerDiedError(WorkerError):
    """A rank's process ended without raising: killed by a signal, or by ``os._exit``."""


class RunNotFinishedError(NotebookAccelerateError, RuntimeError):
    """The results of a run were requested, or the run was closed, before it ended."""


class ResultsFreedError(NotebookAccelerateError):
    """The results of a run were requested after they were freed."""


class BrokenRunError(NotebookAccelerateError, ValueError):
    """The journal of a kept run is damaged, or was not written by this package."""


class CheckpointError(NotebookAccelerateError, RuntimeError):
    """A checkpoint could not be written or loaded."""


class BrokenCheckpointError(CheckpointError):
    """A checkpoint was never finished, or its files are not what its manifest says."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint belongs to another world size, strategy or set of objects."""


class SerializationError(NotebookAccelerateError):
    """A function, argument, return value or exception cannot be transferred between the kernel and a rank."""


class AskError(NotebookAccelerateError):
    """A rank could not answer a question; returned in place of its answer, not raised."""


class ChannelClosedError(NotebookAccelerateError):
    """The other end of a channel is gone."""


class DistributedOperationException(NotebookAccelerateError):  # noqa: N818 - Accelerate's name
    """Ranks passed different structures, shapes or dtypes to a collective (checked where ACCELERATE_DEBUG_MODE=1)."""
