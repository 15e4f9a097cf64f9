"""Every exception that notebook_accelerate raises on purpose.

A user's own error, a dead worker and a broken launch are different types::

    NotebookAccelerateError
    ├── LaunchError                     the launch could not be planned or started
    │   ├── PortInUseError              a fixed port of a multi-node launch is taken
    │   ├── DeviceBusyError             another run holds the accelerators
    │   └── AuthenticationError         another machine did not prove that it belongs to the run
    ├── WorkerError                     a run ended without success; carries ``.run``
    │   ├── RunStoppedError             stopped by the user
    │   ├── RunTimeoutError             ``timeout`` or ``hang_timeout`` was reached
    │   └── WorkerDiedError             a rank's process ended without an exception (signal, ``os._exit``)
    ├── AskError                        a rank could not answer a question
    ├── RunNotFinishedError             results were asked for before the end
    ├── CheckpointError                 a checkpoint could not be written or loaded
    │   ├── BrokenCheckpointError       it is incomplete or damaged
    │   └── CheckpointMismatchError     it belongs to another world size, strategy or set of objects
    ├── SerializationError              something cannot travel between the kernel and a rank
    ├── ChannelClosedError              the other end of a channel is gone
    └── DistributedOperationException   debug mode: ranks passed different tensors to a collective

Bad arguments raise plain ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry.failure import RankFailure


class NotebookAccelerateError(Exception):
    """Base of every exception of this package."""


class LaunchError(NotebookAccelerateError):
    """A launch could not be planned or its processes could not be started."""

    def _render_traceback_(self) -> list[str]:
        """Return the one line that IPython shows: where in the launcher it was noticed helps nobody."""
        return [f"{type(self).__name__}: {self}"]


class PortInUseError(LaunchError):
    """The fixed port of a multi-node launch is taken on this machine."""


class DeviceBusyError(LaunchError):
    """Another run of this kernel holds the accelerators that this launch needs."""


class AuthenticationError(LaunchError):
    """The other end of a connection did not prove that it belongs to this run."""


class WorkerError(NotebookAccelerateError):
    """A run ended without success.

    Args:
        message: What happened, in one paragraph.
        run: The run, with everything that was kept of it: logs, metrics, ranks, report.
        failures: One entry per rank that failed, the first failure first.
    """

    def __init__(self, message: str, run: Run | None = None, failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(message)
        self.run = run
        self.failures = tuple(failures)

    @property
    def rank(self) -> int | None:
        """Global index of the rank that failed first; None when no rank did."""
        return self.failures[0].rank if self.failures else None

    @property
    def results(self) -> Mapping[int, object]:
        """What the ranks that succeeded returned, by rank."""
        if self.run is None:
            return {}
        return {info.rank: info.result for info in self.run.ranks if info.state == "succeeded"}

    def _render_traceback_(self) -> list[str]:
        """Return the lines IPython shows instead of the supervisor's own frames."""
        if self.run is None:
            return [f"{type(self).__name__}: {self}"]
        return self.run.report().error_lines(self)


class RunStoppedError(WorkerError):
    """The run was stopped: by the stop button, by ``run.stop()``, or with the kernel."""


class RunTimeoutError(WorkerError):
    """The run reached its ``timeout`` or ``hang_timeout`` and was stopped."""


class RunInterrupted(KeyboardInterrupt):
    """The user interrupted a blocking launch; every rank has ended.

    It is a KeyboardInterrupt, so that what interrupts a cell still interrupts it, and it carries ``.run``.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(f"run {run.id} was stopped after {run.elapsed:.1f} s; all its ranks have ended")
        self.run = run

    def _render_traceback_(self) -> list[str]:
        """Return the lines IPython shows instead of the supervisor's own frames."""
        return [f"KeyboardInterrupt: {self}"]


class WorkerDiedError(WorkerError):
    """A rank's process ended without raising: killed by a signal, or by ``os._exit``."""


class RunNotFinishedError(NotebookAccelerateError):
    """The results of a run were asked for before it ended."""


class CheckpointError(NotebookAccelerateError, RuntimeError):
    """A checkpoint could not be written or loaded."""


class BrokenCheckpointError(CheckpointError):
    """A checkpoint was never finished, or its files are not what its manifest says."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint belongs to another world size, strategy or set of objects."""


class SerializationError(NotebookAccelerateError):
    """A function, argument, return value or exception cannot travel between the kernel and a rank."""


class AskError(NotebookAccelerateError):
    """A rank could not answer a question; it is the answer in that rank's place, not raised."""


class ChannelClosedError(NotebookAccelerateError):
    """The other end of a channel is gone."""


class DistributedOperationException(NotebookAccelerateError):  # noqa: N818 - Accelerate's name
    """Ranks passed different structures, shapes or dtypes to a collective (checked where ACCELERATE_DEBUG_MODE=1)."""
