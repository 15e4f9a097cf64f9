"""A table of runs with their states, arguments, settings that differ, and last and best metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import repeat
from types import EllipsisType
from typing import Any

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.plain_values import VARIABLES, value_in_words
from notebook_accelerate.launch.report.document import Action, Cell, Column, Group, Row, Table
from notebook_accelerate.launch.report.markup import duration, number

Value = bool | int | float | str | None
MAX_ARGUMENTS, MAX_METRICS = 12, 8
"""The maximum numbers of arguments and of metrics that get a column."""
MAX_NAMED, MAX_CHARS = 4, 24
"""The maximum number of arguments in the name of a curve, and of characters of each value."""
_MISSING = "–"
_CAPTION = "Runs, latest first; metrics are the last and the best values of the lowest rank"
_HIDDEN_SETTINGS = (*VARIABLES, "num_processes", "block", "panel", "use_port", "tags", "output", "save", "name")
"""Settings that get no column, because they do not affect the training, have one already, or may contain a secret."""
_DEFAULTS = {each.name: each.default for each in fields(LaunchConfig)}
_PLACES = ("devices",)
"""Settings whose columns come after the metrics, because they differ in every sweep."""
_CHOICES = frozenset(_DEFAULTS) - {*_HIDDEN_SETTINGS, *_PLACES}
_HIGHER = re.compile(r"acc|f1|auc|bleu|rouge|reward|score|precision|recall|iou|psnr|ssim|r2", re.IGNORECASE)
_LOWER = re.compile(r"loss|err|perplexity|ppl|mae|mse|nll|fid|(?:^|[/_])(?:wer|cer)", re.IGNORECASE)


@dataclass(kw_only=True)  # Not frozen, because creating thousands of frozen entries would take four times as long.
class RunEntry:
    """One run in a table of runs.

    Attributes:
        key: Identifies the run in later tables.
        run: The run's number or name.
        function: Name of the launched function.
        state: The run's status, or the reason why the run is waiting.
        started: When the run was launched, in seconds since the epoch, or 0.0 if unknown.
        seconds: How long the run has taken so far, or None if unknown.
        ranks: The number of ranks, or None if unknown.
        settings: The settings of the launch that differ from the defaults.
        arguments: The function's arguments, by parameter.
        last: The last value of each metric.
        best: The best value of each metric, or None if unknown.
        name: The name that the user chose, if ``run`` is a number, or "".
        step: The last step, or None if unknown.
        branch: The run and the step from which a run with other arguments continues, or "".
        origin: The notebook or folder from which the run was launched, or "" if unknown.
        code: The commit of the code, or "" if unknown.
        colour: The index of the colour of the run's curves, or -1 if it has no curves.
        tone: The tone of the row; see `Row`.
        actions: The buttons at the end of the row.
    """

    key: str
    run: int | str
    function: str
    state: str
    started: float
    seconds: float | None
    ranks: int | None
    settings: Mapping[str, Any]
    arguments: Mapping[str, Value]
    last: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] | None = None
    name: str = ""
    step: int | None = None
    branch: str = ""
    origin: str = ""
    code: str = ""
    colour: int = -1
    tone: str = ""
    actions: tuple[Action, ...] = ()


def runs_table(entries: Sequence[RunEntry], empty: str = "", *, sortable: bool = False) -> Table:
    """Return a table that compares runs.

    Args:
        entries: The runs to compare, oldest first.
        empty: The text to show if there are no runs.
        sortable: Whether users can sort and filter the rows of the live table.
    """
    columns = list(_columns(entries))
    cells = zip(*(column.cells for column in columns), strict=True)
    orders = zip(*(column.order for column in columns), strict=True) if sortable else repeat((), len(entries))
    rows = [
        Row(key=entry.key, cells=texts, order=order, tone=entry.tone, actions=entry.actions)
        for entry, texts, order in zip(entries, cells, orders, strict=True)
    ]
    return Table(
        key="runs",
        columns=tuple(Column(title=each.title, kind=each.kind, numeric=each.kind == "number") for each in columns),
        groups=(Group(key="runs", rows=tuple(rows[::-1])),),
        caption=_CAPTION,
        sortable=sortable,
        empty=empty,
    )


def better(name: str) -> int:
    """Return 1 if high values of a metric are better, -1 if low values are better, or 0 if its name does not say."""
    last = name.rpartition("/")[2]
    return 1 if _HIGHER.search(last) else -1 if _LOWER.search(last) else 0


def differences(given: Sequence[Mapping[str, Value]]) -> list[str]:
    """Return the arguments of each run that differ among the runs, such as "lr 0.001, width 64", or ""."""
    columns = [column for column in _arguments(given) if column.differs][:MAX_NAMED]
    rows = zip(*([(column.title, str(cell)) for cell in column.cells] for column in columns), strict=True)
    texts = [", ".join(f"{name} {text[:MAX_CHARS]}" for name, text in row if text != _MISSING) for row in rows]
    return texts or [""] * len(given)


# ---- columns


@dataclass(frozen=True)
class _Column:
    """A column with a cell for each run.

    Attributes:
        title: The heading of the column.
        kind: The kind of the column; see `Column`.
        cells: A cell for each run.
        values: The value of each run, which is the sort key if possible.
    """

    title: str
    kind: str
    cells: Sequence[str | Cell]
    values: Sequence[object]

    @property
    def differs(self) -> bool:
        """Whether the runs have different cells."""
        return len(set(self.cells)) > 1

    @property
    def order(self) -> Iterator[float | str | None]:
        """The sort keys. Values that are neither numbers nor strings become None, which comes last."""
        for value in self.values:
            # Test for a float first: a file may contain an integer for which math.isnan raises an OverflowError.
            is_nan = isinstance(value, float) and math.isnan(value)
            yield value if isinstance(value, (int, float, str)) and not is_nan else None


def _columns(runs: Sequence[RunEntry]) -> Iterator[_Column]:
    """Yield the columns for some runs: what readers compare first, and what identifies a run in detail last."""
    yield _Column("run", "run", [_run_cell(one) for one in runs], [one.run for one in runs])
    yield _states([one.state for one in runs])
    if any(one.branch for one in runs):
        yield _text("branch of", [one.branch for one in runs])
    arguments = _arguments([one.arguments for one in runs])[:MAX_ARGUMENTS]
    yield from (column for column in arguments if column.differs)
    yield from _settings(runs, _CHOICES)
    if any(one.settings.get("detach") for one in runs):
        yield _number("step", [one.step for one in runs], str, "")
    yield from _metrics(runs)
    yield _number("took", [one.seconds for one in runs], duration)
    yield _Column("started", "text", _starts(runs), [one.started for one in runs])
    if any(one.settings.get("tags") for one in runs):
        yield _text("tags", [_joined(one.settings.get("tags", ())) for one in runs])
    yield _number("ranks", [one.ranks for one in runs], str, "")
    yield from _settings(runs, _PLACES)
    yield _text("function", [one.function for one in runs])
    if any(one.settings.get("detach") for one in runs):
        yield _text("from", [one.origin for one in runs])
    if any(one.code for one in runs):
        yield _text("code", [one.code for one in runs])
    yield from (column for column in arguments if not column.differs)


def _run_cell(one: RunEntry) -> str | Cell:
    text = f"{one.run} · {one.name}" if one.name else str(one.run)
    return text if one.colour < 0 else Cell(text=text, colour=one.colour)


def _metrics(runs: Sequence[RunEntry]) -> Iterator[_Column]:
    """Yield the last and the best values of the metrics. Automatic metrics come last."""
    names = dict.fromkeys(name for one in runs for name in one.last)
    for name in sorted(names, key=lambda name: name.startswith("auto/"))[:MAX_METRICS]:
        yield _number(name, [one.last.get(name) for one in runs], number)
        if better(name) and any(one.best is not None for one in runs):
            yield _number(f"best {name}", [(one.best or {}).get(name) for one in runs], number)


def _text(title: str, texts: Sequence[str]) -> _Column:
    return _Column(title, "text", texts, texts)


def _number(title: str, values: Sequence[float | None], write: Callable[[float], str], unknown: str = "–") -> _Column:
    texts = [unknown if value is None else write(value) for value in values]
    return _Column(title, "number", texts, values)


def _states(states: Sequence[str]) -> _Column:
    marked = {state: Cell(text=state, state=state) for state in set(states)}
    return _Column("state", "state", [marked[state] for state in states], states)


def _starts(runs: Sequence[RunEntry]) -> list[str]:
    """Return when each run was launched, as a time, or as a date and time if it was not today."""
    today = datetime.now().date()

    def text(started: float) -> str:
        try:
            launch = datetime.fromtimestamp(started)
        except (ValueError, OverflowError, OSError):  # The file of a run may contain any number.
            return ""
        if launch.date() == today:
            return launch.time().isoformat("seconds")
        return launch.isoformat(" ", "minutes") if started else ""

    return [text(one.started) for one in runs]


def _joined(tags: object) -> str:
    # The file of a run may contain any value.
    return ", ".join(map(str, tags)) if isinstance(tags, list | tuple) else str(tags)


def _arguments(given: Sequence[Mapping[str, Value]]) -> list[_Column]:
    """Return a column for each argument, first those that differ among the runs."""
    names = dict.fromkeys(name for arguments in given for name in arguments)
    columns = [_argument(name, [arguments.get(name, ...) for arguments in given]) for name in names]
    return sorted(columns, key=lambda column: not column.differs)


def _argument(name: str, values: Sequence[object]) -> _Column:
    kinds = set(map(type, values)) - {EllipsisType}
    is_number = all(issubclass(kind, (int, float)) and kind is not bool for kind in kinds)
    texts = [
        _MISSING if value is ... else number(value) if isinstance(value, float) else str(value) for value in values
    ]
    return _Column(name, "number" if is_number else "text", texts, values)


def _settings(runs: Sequence[RunEntry], shown: Collection[str]) -> Iterator[_Column]:
    """Yield a column for each of the shown settings that differs among the runs."""
    names = dict.fromkeys(name for one in runs for name in one.settings)
    for name in names:
        if name in shown:  # The file of a run may contain any name.
            texts = [value_in_words(one.settings.get(name, _DEFAULTS[name])) for one in runs]
            if len(set(texts)) > 1:
                yield _text(name, texts)
