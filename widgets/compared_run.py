"""The runs that a table of runs compares, and their last and best metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from notebook_accelerate.errors import BrokenRunError
from notebook_accelerate.launch.kept import kept_runs
from notebook_accelerate.launch.report.curves import Source
from notebook_accelerate.launch.report.run_comparison import RunEntry, Value, better, differences
from notebook_accelerate.launch.report.run_snapshot import status
from notebook_accelerate.launch.run import Run, given_name
from notebook_accelerate.launch.state.run_state import ResumePoint
from notebook_accelerate.launch.state.run_view import RunInternals, internals

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.kept.kept_runs import KeptRun
    from notebook_accelerate.launch.plan.planner import LaunchPlan


class ComparedRun(Protocol):
    """A run of this kernel, one that is running elsewhere, or one that was read from a file."""

    id: int
    function_name: str
    config: LaunchConfig
    _internals: RunInternals

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

    def stop(self, grace: float = ..., wait: bool = ...) -> None: ...


class KeptRow:
    """A kept run in a table of runs: its summary, and the run itself once it is open.

    Args:
        kept: The kept run.
        label: The name of the run in the table.

    Attributes:
        run: The open run, or None if it is not open yet.
        is_broken: Whether the run cannot be opened.
    """

    def __init__(self, kept: KeptRun, label: str) -> None:
        self.id, self._kept, self.entry = label, kept, kept_runs.entry_of(kept, label)
        self.run: Run | None = None
        self.is_broken = kept.status == "broken"

    def open(self) -> Run | None:
        """Open the run; return None if it cannot be opened, so that its row shows only the summary."""
        if self.run is None and not self.is_broken:
            try:
                self.run = self._kept.open()
            except (BrokenRunError, OSError):
                self.is_broken = True
        return self.run


def opened(run: ComparedRun | KeptRow) -> ComparedRun | None:
    """Return the run of a row, or None for a kept run that is not open."""
    return run.run if isinstance(run, KeptRow) else run


def label_of(run: ComparedRun | KeptRow) -> str:
    """Return the name of a run, such as "run 3 · baseline"."""
    return run.id if isinstance(run, KeptRow) else " · ".join([f"run {run.id}", *_more_names(run)])


def _more_names(run: ComparedRun) -> list[str]:
    name, branch = given_name(run) if isinstance(run, Run) else "", branch_of(run)
    name = name or (f"branch of {branch.name}" if branch is not None else "")
    return [name] if name else []


def names_of(runs: Sequence[ComparedRun | KeptRow]) -> list[str]:
    """Return the names of runs in the legend of a plot, such as "train 3: lr 0.001, width 64".

    The arguments are those that differ among the runs.
    """
    given = [run.entry.arguments if isinstance(run, KeptRow) else run.arguments for run in runs]
    names = [
        run.id if isinstance(run, KeptRow) else " · ".join([f"{run.function_name} {run.id}", *_more_names(run)])
        for run in runs
    ]
    return [f"{name}: {text}" if text else name for name, text in zip(names, differences(given), strict=True)]


def branch_of(run: ComparedRun) -> ResumePoint | None:
    """Return the point at which a run with other arguments continues an earlier run, or None for other runs."""
    points = internals(run).journal.state.resume_points
    return points[-1] if points and points[-1].changed else None


def state_of(run: ComparedRun | KeptRow) -> str:
    """Return the status of a run, including the reason why a run of this kernel waits; see `run_snapshot.status`."""
    known: Any = opened(run)
    if known is None:
        return str(cast("KeptRow", run).entry.state)
    return status(known) if hasattr(known, "stall") else str(known.status)


def source_of(run: ComparedRun, label: str) -> Source:
    """Return the curves of a run for a comparison with other runs. Each metric has the curve of the lowest rank."""
    branch, automatic = branch_of(run), run.config.automatic_metrics
    since = 0.0 if branch is None else branch.time
    return Source(internals(run).store, run.started, label, ranks=False, automatic=automatic, since=since)


class BestValues:
    """Finds the last and the best value of each metric. Each call reads only the points since the previous call."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[tuple[int, int], float]] = {}

    def last(self, run: ComparedRun, name: str) -> float | None:
        """Return the last value of a metric, or None if it has no values."""
        store = source_of(run, "").store_of(name)
        ranks = store.ranks_of(name)
        return store.last_value(name, ranks[0]) if ranks else None

    def best(self, run: ComparedRun, name: str) -> float | None:
        """Return the best finite value, or None if no value is finite or it is unknown whether higher is better."""
        store, direction = source_of(run, "").store_of(name), better(name)
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


def entry_of(run: ComparedRun | KeptRow, names: Sequence[str], values: BestValues, **more: Any) -> RunEntry:
    """Return the row of a run.

    Args:
        run: The run of the row.
        names: The metrics to show.
        values: The object that finds the last and the best values.
        more: Further attributes of the row.
    """
    known = opened(run)
    if known is None:
        return replace(cast("KeptRow", run).entry, **more)
    branch = branch_of(known)
    last, best = ({name: read(known, name) for name in names} for read in (values.last, values.best))
    entry = RunEntry(
        key=str(known.id),
        run=known.id,
        function=known.function_name,
        state=state_of(known),
        started=known.started,
        seconds=known.elapsed,
        ranks=known.plan.world_size if known.plan is not None else known.config.num_processes,
        settings=known.config.non_default(),
        arguments=known.arguments,
        last={name: value for name, value in last.items() if value is not None},
        best={name: value for name, value in best.items() if value is not None},
        name=given_name(known) if isinstance(known, Run) else "",
        step=max((step for step in list(internals(known).store.last_step.values()) if step >= 0), default=None),
        branch="" if branch is None else f"{branch.name}, step {'–' if branch.step is None else branch.step}",
        origin=str(getattr(known, "origin", "")),
        **more,
    )
    if not isinstance(run, KeptRow):
        return entry
    kept = run.entry
    return replace(entry, key=run.id, run=run.id, name="", code=kept.code, settings=kept.settings)
