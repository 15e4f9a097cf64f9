"""The runs that a table of runs compares, and their last and best metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from notebook_accelerate.launch.report.curves import Source
from notebook_accelerate.launch.report.run_comparison import RunEntry, Value, better
from notebook_accelerate.launch.report.run_snapshot import status

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.state.run_commands import RunCommands
    from notebook_accelerate.telemetry import Store


class ComparedRun(Protocol):
    """A run of this kernel, one that goes on elsewhere, or one that was read from a file."""

    id: int
    function_name: str
    config: LaunchConfig
    commands: RunCommands

    @property
    def status(self) -> str: ...

    @property
    def started(self) -> float: ...

    @property
    def ended(self) -> float | None: ...

    @property
    def elapsed(self) -> float: ...

    @property
    def arguments(self) -> Mapping[str, Value]: ...

    @property
    def plan(self) -> LaunchPlan | None: ...

    @property
    def store(self) -> Store: ...

    def request_stop(self) -> None: ...


def label_of(run: ComparedRun) -> str:
    """Return the name of a run in legends."""
    return f"run {run.id}"


def state_of(run: ComparedRun) -> str:
    """Return the status of a run, or what holds one of this kernel that is running; see `run_snapshot.status`."""
    known: Any = run
    return status(known) if hasattr(run, "stall") else run.status


def source_of(run: ComparedRun) -> Source:
    """Return the curves of a run for a comparison with others: of each metric, the curve of the lowest rank."""
    return Source(run.store, run.started, label_of(run), ranks=False, automatic=run.config.automatic_metrics)


class BestValues:
    """The last and the best value of each metric, from the points of the lowest rank since the last call."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[tuple[int, int], float]] = {}

    def last(self, run: ComparedRun, name: str) -> float | None:
        """Return the last value; None where there is none."""
        store = source_of(run).store_of(name)
        ranks = store.ranks_of(name)
        return store.last_value(name, ranks[0]) if ranks else None

    def best(self, run: ComparedRun, name: str) -> float | None:
        """Return the best finite value; None where there is none, or where neither high nor low is better."""
        store, direction = source_of(run).store_of(name), better(name)
        ranks = store.ranks_of(name)
        if not direction or not ranks:
            return None
        cursor, best = self._known.get((id(run), name), ((0, 0), -np.inf * direction))
        tail = store.tail(name, ranks[0], cursor)
        values = tail.values[np.isfinite(tail.values)]
        if len(values):
            found = float(values.max() if direction > 0 else values.min())
            best = max(best, found) if direction > 0 else min(best, found)
        self._known[id(run), name] = tail.cursor, best
        return best if np.isfinite(best) else None


def entry_of(run: ComparedRun, names: Sequence[str], values: BestValues, **more: Any) -> RunEntry:
    """Return what the table shows of a run.

    Args:
        run: The run.
        names: The metrics.
        values: Returns their values.
        more: Other attributes of the entry.
    """
    last, best = ({name: read(run, name) for name in names} for read in (values.last, values.best))
    return RunEntry(
        key=str(run.id),
        run=run.id,
        function=run.function_name,
        state=state_of(run),
        started=run.started,
        seconds=run.elapsed,
        ranks=run.plan.world_size if run.plan is not None else run.config.num_processes,
        config=run.config,
        arguments=run.arguments,
        last={name: value for name, value in last.items() if value is not None},
        best={name: value for name, value in best.items() if value is not None},
        name=str(getattr(run, "given_name", "")),
        step=max((step for step in list(run.store.last_step.values()) if step >= 0), default=None),
        origin=str(getattr(run, "origin", "")),
        **more,
    )
