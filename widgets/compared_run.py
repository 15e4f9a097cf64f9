"""What a table of runs needs of a run, and the columns of the table: no launch, no process."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from notebook_accelerate.config.plain_values import format_setting, hide_credentials
from notebook_accelerate.launch.report.curves import Source, shown_names
from notebook_accelerate.launch.report.markup import number
from notebook_accelerate.widgets.run_summary import duration, status

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.state.run_commands import RunCommands
    from notebook_accelerate.telemetry import Store

Value = bool | int | float | str | None
MAX_ARGUMENTS, MAX_METRICS = 12, 8
"""Columns of arguments, and metrics that have columns."""
_HIDDEN_SETTINGS = ("env", "num_processes", "block", "panel", "use_port", "rdzv_conf", "tags", "output", "save", "name")
"""Settings without a column: they do not affect the training, have a column of their own, or may hold a secret."""
_HIGHER = re.compile(r"acc|f1|auc|bleu|rouge|reward|score|precision|recall|iou|psnr|ssim|r2", re.IGNORECASE)
_LOWER = re.compile(r"loss|err|perplexity|ppl|mae|mse|nll|fid|(?:^|[/_])(?:wer|cer)", re.IGNORECASE)


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


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        title: Its head.
        kind: "run", "state", "text" or "number"; numbers are aligned at the right.
        text: Returns the text of a cell.
        value: Returns what the cell is sorted by; None is last.
    """

    title: str
    kind: str
    text: Callable[[ComparedRun], str]
    value: Callable[[ComparedRun], float | str | None]


def label_of(run: ComparedRun) -> str:
    """Return the name of a run in legends."""
    return f"run {run.id}"


def state_of(run: ComparedRun) -> str:
    """Return the status of a run, or what holds one of this kernel that is running; see `run_summary.status`."""
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


def better(name: str) -> int:
    """Return 1 where a metric should be high, -1 where it should be low, and 0 where its name does not say."""
    last = name.rpartition("/")[2]
    return 1 if _HIGHER.search(last) else -1 if _LOWER.search(last) else 0


def columns(runs: Sequence[ComparedRun], values: BestValues) -> list[Column]:
    """Return the columns for these runs; arguments that differ come before those that do not."""
    found = [
        Column("run", "run", lambda run: str(run.id), lambda run: run.id),
        Column("function", "text", lambda run: run.function_name, lambda run: run.function_name),
        Column("state", "state", state_of, state_of),
        Column("started", "text", _start, lambda run: run.started),
        Column("took", "number", lambda run: duration(run.elapsed), lambda run: run.elapsed),
        Column("ranks", "number", lambda run: str(_ranks(run) or ""), _ranks),
    ]
    if any(map(_name, runs)):
        found.append(Column("name", "text", _name, _name))
    if any(run.config.detach for run in runs):
        found += [
            Column("step", "number", lambda run: str(_step(run) or ""), _step),
            Column("from", "text", _from, _from),
        ]
    if any(run.config.tags for run in runs):
        found.append(Column("tags", "text", _tags, _tags))
    found += [_argument(name, runs) for name in _arguments(runs)[:MAX_ARGUMENTS]]
    found += [_setting(name) for name in _settings(runs)]
    for name in shown_names([source_of(run) for run in runs])[:MAX_METRICS]:
        found.append(_metric(name, name, values.last))
        if better(name):
            found.append(_metric(f"best {name}", name, values.best))
    return found


def _start(run: ComparedRun) -> str:
    """Return the time, and the date of a run of another day."""
    started = datetime.fromtimestamp(run.started)
    return started.strftime("%H:%M:%S" if started.date() == datetime.now().date() else "%Y-%m-%d %H:%M")


def _step(run: ComparedRun) -> int | None:
    steps = [step for step in list(run.store.last_step.values()) if step >= 0]
    return max(steps, default=None)


def _name(run: ComparedRun) -> str:
    return str(getattr(run, "given_name", ""))


def _from(run: ComparedRun) -> str:
    return str(getattr(run, "origin", ""))


def _tags(run: ComparedRun) -> str:
    return ", ".join(run.config.tags)


def _ranks(run: ComparedRun) -> int | None:
    return run.plan.world_size if run.plan is not None else run.config.num_processes


def _arguments(runs: Sequence[ComparedRun]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.arguments)
    return sorted(names, key=lambda name: len({repr(run.arguments.get(name, ...)) for run in runs}) == 1)


def _argument(name: str, runs: Sequence[ComparedRun]) -> Column:
    known = [run.arguments[name] for run in runs if name in run.arguments]
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)

    def text(run: ComparedRun) -> str:
        value = run.arguments.get(name)
        if isinstance(value, float):
            return number(value)
        return "–" if name not in run.arguments else str(value)

    def order(run: ComparedRun) -> float | str | None:
        value = run.arguments.get(name)
        return value if isinstance(value, int | float | str) else None

    return Column(name, "number" if is_number else "text", text, order)


def _settings(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that are not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.config.non_default() if name not in _HIDDEN_SETTINGS)
    return [name for name in names if len({repr(getattr(run.config, name)) for run in runs}) > 1]


def _setting(name: str) -> Column:
    def text(run: ComparedRun) -> str:
        value = getattr(run.config, name)
        return hide_credentials(value) if isinstance(value, str) else format_setting(value)

    return Column(name, "text", text, text)


def _metric(title: str, name: str, read: Callable[[ComparedRun, str], float | None]) -> Column:
    def text(run: ComparedRun) -> str:
        value = read(run, name)
        return "–" if value is None else number(value)

    def order(run: ComparedRun) -> float | None:
        value = read(run, name)
        return None if value is None or math.isnan(value) else value

    return Column(title, "number", text, order)
