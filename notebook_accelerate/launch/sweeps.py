"""Sweeps: runs of one function with different arguments, side by side on the devices of this machine."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate._mistakes import reports_mistakes, reports_mistakes_of_methods
from notebook_accelerate.config import environ
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.plain_values import check_seconds, check_whole_number
from notebook_accelerate.hardware import detect, device_table
from notebook_accelerate.launch import starting
from notebook_accelerate.launch.kept.kept_runs import KeptRun, KeptRuns, kept_run_of, kept_runs
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.run_display import current_cell, load, try_to_show
from notebook_accelerate.launch.run_registry import Runs, watch_shutdown
from notebook_accelerate.launch.state.call_arguments import call_arguments
from notebook_accelerate.launch.state.interrupts import wait_for
from notebook_accelerate.launch.state.run_commands import DEFAULT_GRACE
from notebook_accelerate.launch.state.run_view import internals

if TYPE_CHECKING:
    import pandas as pd

WATCH_SECONDS = 0.25
"""Seconds between two checks of the metrics of live runs."""
Space = Mapping[str, Any] | Iterable[Mapping[str, Any]] | Callable[[Any], Mapping[str, Any]]
Slot = tuple[int | str, ...] | None


@reports_mistakes
def sweep(
    function: Callable[..., Any],
    space: Space,
    *,
    devices_per_run: int = 1,
    stop_if: Callable[[Mapping[str, Any]], bool] | None = None,
    resume: bool = False,
    study: Any = None,
    metric: str = "",
    trials: int | None = None,
    config: LaunchConfig | None = None,
    **settings: Any,
) -> Sweep:
    """Run ``function`` with different arguments, several runs at a time, each on its own devices.

    The call returns as soon as the first runs have started, and shows a table of the runs. A failed run does not stop
    the sweep.

    Args:
        function: The function that every rank of every run calls.
        space: The function's arguments by name. A dict is a grid: each list, tuple or range in it is an axis, and all
            runs share the other values. Other iterables, such as a list or a generator, contain a dict for each run.
            With a study, it is a dict of Optuna's distributions, or a function that takes an Optuna trial and returns
            the arguments.
        devices_per_run: The number of devices of each run, or of cores on a machine without accelerators.
        stop_if: A function that takes the metrics of a live run, by name, and returns whether to stop that run. It is
            called after each change. KeyError and IndexError mean that a metric has not been logged yet.
        resume: Whether to continue a sweep that was interrupted, for example because the kernel died. Runs in the
            folder ``save`` with the same arguments are not repeated if they succeeded or failed. If they were stopped
            or lost, they continue from their newest checkpoints. Detached runs that still run are adopted.
        study: An Optuna study that chooses the arguments, and prunes runs. Its trials are recorded as usual.
        metric: The metric that the study optimizes. Each point is reported to the study, and the last one is the
            trial's value.
        trials: The number of runs. It is required with a study.
        config: Settings of all runs. ``devices`` are the devices that the sweep may use; if None, all of them.
        settings: Fields of `LaunchConfig`, which override those of ``config``.

    Returns:
        The sweep, with ``runs``, ``wait()``, ``best()`` and ``to_pandas()``.

    Raises:
        ValueError: An argument is invalid, or does not fit this machine.
        LaunchError: The first runs could not be started.
    """
    used = (config or LaunchConfig()).changed(**settings)
    folder = used.save or environ.text("NOTEBOOK_ACCELERATE_RUNS")
    if resume and not folder:
        raise ValueError("resume=True needs the folder of the interrupted sweep; pass save='runs'")
    if trials is not None:
        check_whole_number("trials", trials)
    if stop_if is not None and not callable(stop_if):
        raise ValueError(f"stop_if={stop_if!r} is not allowed; pass a function that takes the metrics of a run")
    earlier = _earlier_runs(folder) if resume and folder and Path(folder).is_dir() else []
    source = _FixedTrials(space, trials) if study is None else _StudyTrials(study, space, metric, trials, resume=resume)
    new = Sweep(function, source, used, _slots(used, devices_per_run), stop_if, earlier)
    new._begin()
    return new


class Trial:
    """The arguments of a run of a sweep, before and while the run exists.

    Args:
        values: The function's arguments, by name.
        asked: Optuna's trial, or None.

    Attributes:
        run: The run, once it is launched.
        is_cut_short: Whether ``stop_if`` or the study has stopped the run.
        seen: The number of points of the study's metric that were reported.
    """

    def __init__(self, values: Mapping[str, Any], asked: Any = None) -> None:
        self.values, self.asked = values, asked
        self.run: Run
        self.is_cut_short, self.seen, self.version = False, 0, -1


@reports_mistakes_of_methods
class Sweep:
    """Runs of one function with different arguments. `sweep` creates it.

    Attributes:
        runs: The runs, in the order of their launches. As the value of a cell's last line, they are shown as a table.
        error: The error that ended the sweep before all runs were launched, or None. Live runs continue.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        source: _FixedTrials | _StudyTrials,
        config: LaunchConfig,
        slots: Sequence[Slot],
        stop_if: Callable[[Mapping[str, Any]], bool] | None,
        earlier: list[KeptRun],
    ) -> None:
        self._function, self._source, self._slots = function, source, slots
        self._config, self._name = config.changed(block=False, queue=True, panel=False, output="none"), config.name
        self._shows, self._stop_if, self._earlier = config.panel, stop_if, earlier
        self._live: list[Trial] = []
        self._wake, self._over = threading.Event(), threading.Event()
        self._stopping = self._exhausted = False
        self._view: Any = None
        self._cell = ""
        self.runs = Runs()
        self.error: BaseException | None = None

    # ---- the user's methods

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of all runs.

        Args:
            seconds: Seconds to wait. None means no limit.

        Returns:
            Whether all runs have ended.

        Raises:
            ValueError: ``seconds`` is not a number of seconds.
            Exception: The sweep ended with this error, which a launch, the space, ``stop_if`` or the study has raised.
        """
        check_seconds("seconds", seconds, none="no limit")
        over = wait_for(self._over, seconds)
        if over and self.error is not None:
            raise self.error
        return over

    def stop(self, grace: float = DEFAULT_GRACE) -> None:
        """Launch no further runs, and stop those that are running or waiting. ``resume=True`` continues them.

        Args:
            grace: Seconds that the ranks have to end by themselves.

        Raises:
            ValueError: ``grace`` is negative, or not a number.
        """
        check_seconds("grace", grace)
        self._end_launches()
        for trial in list(self._live):
            trial.run.stop(grace, wait=False)
        wait_for(self._over)

    def _end_launches(self) -> None:
        self._stopping = True
        self._wake.set()

    def best(self, metric: str, mode: str) -> Run:
        """Return the run with the best value of a metric at any step, on its lowest rank.

        Args:
            metric: The name of the metric.
            mode: "min" if low values are better, or "max".

        Raises:
            ValueError: No run has logged a finite value of this metric, or ``mode`` is neither "min" nor "max".
        """
        import numpy as np

        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is not allowed; pass 'min' or 'max'")
        choose = {"min": np.min, "max": np.max}[mode]
        found = [(float(choose(values)), run) for run in self.runs if len(values := _finite(run, metric))]
        if not found:
            known = ", ".join(sorted({name for run in self.runs for name in run.metrics})) or "none yet"
            raise ValueError(f"no run has logged a finite {metric!r}; the metrics are: {known}")
        return {"min": min, "max": max}[mode](found, key=lambda pair: pair[0])[1]

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with a row for each run, and a column for each argument and metric. This needs pandas."""
        return KeptRuns(map(kept_run_of, self.runs)).to_pandas()

    # ---- the sweep's thread

    def _begin(self) -> None:
        """Launch the first runs, so that mistakes are raised in the cell, and show the table."""
        self._launch_trials()
        if not self.runs and isinstance(self._source, _FixedTrials):
            raise ValueError("space has no arguments for any run; pass at least one value for each argument")
        watch_shutdown(self._end_launches)
        threading.Thread(target=self._main, name="notebook-accelerate-sweep", daemon=True).start()
        if self._shows in (True, "auto"):
            self._cell = current_cell()
            try_to_show(lambda: self._table().show())

    def _main(self) -> None:
        try:
            while self._live or not (self._exhausted or self._stopping):
                self._wake.wait(WATCH_SECONDS)
                self._wake.clear()
                self._watch_trials()
                self._launch_trials()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self.error = error
        finally:
            self._over.set()

    def _launch_trials(self) -> None:
        """Launch runs until all slots are in use, or all trials have a run."""
        while not (self._exhausted or self._stopping):
            used = [trial.run.config.devices for trial in self._live]
            slot = next((slot for slot in self._slots if slot not in used), ())
            if slot == () or len(self._live) >= len(self._slots):
                return
            trial = self._source.next_trial()
            if trial is None:
                self._exhausted = True
                return
            self._start(trial, slot)

    def _start(self, trial: Trial, slot: Slot) -> None:
        """Launch the run of a trial, or adopt the run that an interrupted sweep has launched for it."""
        function, arguments = _call(self._function, trial.values)
        run = self._earlier_run(call_arguments(function, arguments))
        if run is None or not self._is_settled(run):
            name = self._name and f"{self._name}-{len(self.runs) + 1}"
            run = starting.start(self._config.changed(devices=slot, name=name), function, arguments, run)
        trial.run = run
        self.runs.append(run)
        self._live.append(trial)
        if self._stopping:  # The launch may have overlapped with `stop`, which then does not know this run.
            run.stop(wait=False)
        run.add_done_callback(lambda _: self._wake.set())
        if self._view is not None:
            self._view.add_run(run)

    def _earlier_run(self, arguments: Mapping[str, Any]) -> Run | None:
        found = next((row for row in self._earlier if row.arguments == arguments), None)
        if found is None:
            return None
        self._earlier.remove(found)
        return found.open()

    def _is_settled(self, run: Run) -> bool:
        """Return whether an earlier run needs no continuation: it is live, has succeeded or failed, or would be cut."""
        return run.ended is None or run.status in ("succeeded", "failed") or self._stop_says(run)

    def _watch_trials(self) -> None:
        for trial in list(self._live):
            ended = trial.run.done
            version = internals(trial.run).store.metric_changes
            if version != trial.version and not trial.is_cut_short:
                trial.version = version
                trial.is_cut_short = self._source.prunes(trial) or self._stop_says(trial.run)
                if trial.is_cut_short and not ended:
                    trial.run.stop(wait=False)
            if ended:
                self._live.remove(trial)
                if trial.run.status != "stopped" or not self._stopping:  # A stopped sweep may continue later.
                    self._source.finish(trial)

    def _stop_says(self, run: Run) -> bool:
        with suppress(KeyError, IndexError):  # The run has yet to log the metric.
            return self._stop_if is not None and bool(self._stop_if(run.metrics))
        return False

    # ---- display

    def _table(self) -> Any:
        if self._view is None or self._view.closed:
            self._view = load("runs")(list(self.runs), title=f"Sweep of {self._function.__name__}")
        return self._view

    def __repr__(self) -> str:
        states = Counter(run.status for run in list(self.runs))
        counts = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
        return f"<Sweep of {self._function.__name__}: {len(self.runs)} runs: {counts}>"

    def _ipython_display_(self) -> None:
        if not self._cell or current_cell() != self._cell:  # Otherwise, this cell already shows the table.
            self._table()._ipython_display_()


# ---- the trials


class _FixedTrials:
    """The trials of a grid, or of another iterable of arguments.

    Args:
        space: The grid, or an iterable of arguments.
        most: The maximum number of trials, or None.
    """

    def __init__(self, space: Any, most: int | None) -> None:
        if isinstance(space, (str, bytes)) or not isinstance(space, Iterable):
            raise ValueError(
                f"space={space!r} is not allowed; pass a grid such as {{'lr': [0.1, 0.01]}}, or a list or generator of "
                "dicts. With a function, also pass an Optuna study: study=optuna.create_study()"
            )
        self._values = itertools.islice(_grid(space) if isinstance(space, Mapping) else iter(space), most)

    def next_trial(self) -> Trial | None:
        """Return the next trial, or None after the last one."""
        values = next(self._values, None)
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(f"{values!r} is not a dict of arguments; pass dicts such as {{'lr': 0.1}}")
        return None if values is None else Trial(values)

    def prunes(self, trial: Trial) -> bool:
        """Return whether to stop a run, given its metrics."""
        return False

    def finish(self, trial: Trial) -> None:
        """Record the end of a run."""


class _StudyTrials:
    """The trials of an Optuna study.

    Args:
        study: The study.
        space: Distributions by name, or a function that takes Optuna's trial and returns the arguments.
        metric: The metric to optimize.
        count: The number of trials.
        resume: Whether to continue with the study's unfinished trials, and to count its finished ones.
    """

    def __init__(self, study: Any, space: Any, metric: str, count: int | None, *, resume: bool) -> None:
        if not metric or count is None or len(study.directions) > 1:
            raise ValueError(
                "study= needs a study with one objective, its metric and the number of trials; "
                "pass metric='loss', trials=20"
            )
        self._optuna: Any = importlib.import_module("optuna")
        self._study, self._space, self._metric = study, space, metric
        known = study.get_trials(deepcopy=False) if resume else []
        left = [trial for trial in known if trial.state.name == "RUNNING"]
        self._left = iter([self._optuna.trial.Trial(study, trial._trial_id) for trial in left])
        self._count = count - len(known) + len(left)

    def next_trial(self) -> Trial | None:
        """Return the next trial, or None after the last one."""
        if self._count <= 0:
            return None
        self._count -= 1
        fixed = None if callable(self._space) else dict(self._space)
        asked = next(self._left, None) or self._study.ask(fixed)
        return Trial(asked.params if fixed is not None else self._space(asked), asked)

    def prunes(self, trial: Trial) -> bool:
        """Report the new points of a run to the study. Return whether the study prunes the run."""
        if self._metric not in trial.run.metrics:
            return False
        series = _lowest(trial.run, self._metric)
        points = list(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        known = {} if trial.seen else self._study.get_trials(deepcopy=False)[trial.asked.number].intermediate_values
        for place, (step, value) in enumerate(points[trial.seen :], trial.seen):
            if (step := step if step >= 0 else place) not in known:
                trial.asked.report(value, step)
        trial.seen = len(points)
        return trial.run.ended is None and bool(trial.asked.should_prune())

    def finish(self, trial: Trial) -> None:
        """Tell the study how a run ended."""
        states, values = self._optuna.trial.TrialState, _finite(trial.run, self._metric)
        trial.asked.set_user_attr("run", trial.run.name)
        outcome: dict[str, Any] = {"state": states.PRUNED if trial.is_cut_short and len(values) else states.FAIL}
        if trial.run.status == "succeeded" and len(values):
            outcome = {"values": float(values[-1])}
        # After its last trial, GridSampler tries to end `optimize`, which is not running. The trial is recorded anyway.
        with suppress(RuntimeError):
            self._study.tell(trial.asked, **outcome)


def _grid(space: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    axes = [value if isinstance(value, (list, tuple, range)) else [value] for value in space.values()]
    return (dict(zip(space, values, strict=True)) for values in itertools.product(*axes))


def _call(function: Callable[..., Any], values: Mapping[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and positional arguments for a call with arguments by name."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind(**values)
    except TypeError as error:
        names, given = ", ".join(signature.parameters) or "none", ", ".join(values) or "no arguments"
        raise ValueError(
            f"{function.__name__}() cannot be called with {given}: {error}; its parameters are: {names}"
        ) from None
    if not bound.kwargs:
        return function, bound.args
    named: Any = partial(function, **bound.kwargs)
    named.__name__ = function.__name__
    return named, bound.args


def _earlier_runs(folder: str | os.PathLike[str]) -> list[KeptRun]:
    """Return the kept runs in a folder. Of runs that continue one another, return only the last one."""
    return list({(row.name, repr(row.arguments)): row for row in kept_runs(folder)}.values())


def _slots(config: LaunchConfig, size: int) -> list[Slot]:
    """Return the devices of each of the runs that can run at the same time."""
    check_whole_number("devices_per_run", size)
    machine = detect({**os.environ, **(config.env or {})})
    kind = "cpu" if config.cpu else machine.accelerator
    if kind != "cpu" and not device_table.row(kind).is_numbered:
        return [None]
    known: tuple[int | str, ...] = machine.cores if kind == "cpu" else tuple(range(machine.count))
    asked: Any = config.devices
    pool = asked if isinstance(asked, tuple) else known[:asked]
    if len(pool) < size:
        raise ValueError(f"devices_per_run={size}, but the sweep may use {len(pool)} devices; pass at most {len(pool)}")
    return [pool[place : place + size] for place in range(0, len(pool) - size + 1, size)]


def _lowest(run: Run, metric: str) -> Any:
    series = run.metrics[metric]
    return series.rank(int(series.ranks.min())) if len(series.ranks) else series


def _finite(run: Run, metric: str) -> Any:
    import numpy as np

    values = _lowest(run, metric).values if metric in run.metrics else np.array([])
    return values[np.isfinite(values)]
