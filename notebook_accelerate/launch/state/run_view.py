"""The parts of a `Run` that other modules of the package use: its public attributes and its internals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.errors import WorkerError
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.state.call_arguments import RunCall
    from notebook_accelerate.launch.state.journal import Journal
    from notebook_accelerate.launch.state.run_commands import RunCommands
    from notebook_accelerate.launch.state.run_state import Attempt, RankInfo, Stall
    from notebook_accelerate.telemetry import Metrics, RankFailure, Store


@dataclass(eq=False)
class RunInternals:
    """The parts of a `Run` that only this package uses.

    Attributes:
        journal: The run's events, in order.
        commands: Sends commands to the supervisor.
        environment: The versions and the machine of an opened run, for its report. If empty, the report shows those of
            this process.
        call: The launched function and its arguments, for resuming the training, or None if another kernel launched it.
        journal_file: The file of the run's journal, or None if the run is not kept.
        delete_files: A function that deletes the journal's file and the results, or None if the run is not kept.
    """

    journal: Journal
    commands: RunCommands
    environment: Mapping[str, str] = field(default_factory=dict)
    call: RunCall | None = None
    journal_file: Path | None = None
    delete_files: Callable[..., None] | None = None

    @property
    def store(self) -> Store:
        """The records of the ranks: metrics, progress, step times and lines of output."""
        return self.journal.store


class HasInternals(Protocol):
    """An object with the internals of a run: a `Run` or a `RunView`."""

    _internals: RunInternals


def internals(run: HasInternals) -> RunInternals:
    """Return the parts of a run that only this package uses."""
    return run._internals


class RunView(Protocol):
    """A read-only run; see `launch.run.Run` for the attributes."""

    id: int
    config: LaunchConfig
    function_name: str
    _internals: RunInternals

    @property
    def status(self) -> str: ...

    @property
    def plan(self) -> LaunchPlan | None: ...

    @property
    def ranks(self) -> tuple[RankInfo, ...]: ...

    @property
    def attempts(self) -> Sequence[Attempt]: ...

    @property
    def failures(self) -> tuple[RankFailure, ...]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def warnings(self) -> Sequence[str]: ...

    @property
    def stall(self) -> Stall | None: ...

    @property
    def paused(self) -> Sequence[int]: ...

    @property
    def prompts(self) -> Sequence[int]: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def error(self) -> WorkerError | None: ...

    @property
    def ended(self) -> float | None: ...

    @property
    def started(self) -> float: ...

    @property
    def elapsed(self) -> float: ...
