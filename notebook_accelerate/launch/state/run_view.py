"""The attributes of a run that reports read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.errors import RankFailure, WorkerError
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.state.run_state import Attempt, RankInfo
    from notebook_accelerate.telemetry import Metrics, Store


class RunView(Protocol):
    """A run, read-only; see `launch.run.Run` for the attributes."""

    id: int
    config: LaunchConfig
    function_name: str
    environment: Mapping[str, str]

    @property
    def status(self) -> str:
        """See ``Run.status``."""

    @property
    def plan(self) -> LaunchPlan | None:
        """See ``Run.plan``."""

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """See ``Run.ranks``."""

    @property
    def attempts(self) -> Sequence[Attempt]:
        """See ``Run.attempts``."""

    @property
    def failures(self) -> tuple[RankFailure, ...]:
        """See ``Run.failures``."""

    @property
    def notes(self) -> Sequence[str]:
        """See ``Run.notes``."""

    @property
    def warnings(self) -> Sequence[str]:
        """See ``Run.warnings``."""

    @property
    def store(self) -> Store:
        """See ``Run.store``."""

    @property
    def metrics(self) -> Metrics:
        """See ``Run.metrics``."""

    @property
    def error(self) -> WorkerError | None:
        """See ``Run.error``."""

    @property
    def ended(self) -> float | None:
        """See ``Run.ended``."""

    @property
    def started(self) -> float:
        """See ``Run.started``."""

    @property
    def elapsed(self) -> float:
        """See ``Run.elapsed``."""


__all__ = ["RunView"]
