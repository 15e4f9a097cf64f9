"""The table of several runs: their states, arguments, differing settings, and last and best metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.config.plain_values import format_setting, hide_credentials
from notebook_accelerate.launch.report.document import Action, Cell, Column, Group, Row, Table
from notebook_accelerate.launch.report.markup import duration, number

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig

Value = bool | int | float | str | None
MAX_ARGUMENTS, MAX_METRICS = 12, 8
"""Columns of arguments, and metrics that have columns."""
_CAPTION = "Runs, the latest first; metrics are the last and the best values of the lowest rank"
_HIDDEN_SETTINGS = ("env", "num_processes", "block", "panel", "use_port", "rdzv_conf", "tags", "output", "save", "name")
"""Settings without a column: they do not affect the training, have another column, or may hold a secret."""
_HIGHER = re.compile(r"acc|f1|auc|bleu|rouge|reward|score|precision|recall|iou|psnr|ssim|r2", re.IGNORECASE)
_LOWER = re.compile(r"loss|err|perplexity|ppl|mae|mse|nll|fid|(?:^|[/_])(?:wer|cer)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run in a table of runs.

    Attributes:
        key: Identifies the run in later tables.
        run: Its number or its name.
        function: Name of the launched function.
        state: Its status, or what holds it.
        started: Seconds since the epoch; 0.0: not known.
        seconds: How long it took, or has taken until now; None: not known.
        ranks: Number of its ranks; None: not known.
        config: The settings of the launch.
        arguments: The arguments of the function, by parameter.
        last: The last value of each metric.
        best: The best value of each metric; None: not known.
        name: The name that its user gave it, if ``run`` is not a name.
        step: Its last step; None: not known.
        origin: The notebook or the folder that launched it; "": not known.
        code: The commit of the code; "": not known.
        colour: The index of its curves' colour; -1: it has no curves.
        tone: The tone of its row.
        actions: The buttons of its row.
    """

    key: str
    run: int | str
    function: str
    state: str
    started: float
    seconds: float | None
    ranks: int | None
    config: LaunchConfig
    arguments: Mapping[str, Value]
    last: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] | None = None
    name: str = ""
    step: int | None = None
    origin: str = ""
    code: str = ""
    colour: int = -1
    tone: str = ""
    actions: tuple[Action, ...] = ()


def runs_table(entries: Sequence[RunEntry], empty: str = "") -> Table:
    """Return the table of some runs.

    Args:
        entries: The runs, the oldest first.
        empty: Shown instead of a table without runs.
    """
    columns = list(_columns(entries))
    rows = [
        Row(
            key=entry.key,
            cells=tuple(column.cell(entry) for column in columns),
            order=tuple(column.value(entry) for column in columns),
            tone=entry.tone,
            actions=entry.actions,
        )
        for entry in reversed(entries)
    ]
    return Table(
        key="runs",
        columns=tuple(Column(title=each.title, kind=each.kind, numeric=each.kind == "number") for each in columns),
        groups=(Group(key="runs", rows=tuple(rows)),),
        caption=_CAPTION,
        sortable=True,
        empty=empty,
    )


def better(name: str) -> int:
    """Return 1 if a metric should be high, -1 if it should be low, and 0 if its name does not say."""
    last = name.rpartition("/")[2]
    return 1 if _HIGHER.search(last) else -1 if _LOWER.search(last) else 0


# ---- columns


@dataclass(frozen=True)
class _Column:
    """A column; its cells are sorted by ``value``, with None last."""

    title: str
    kind: str
    cell: Callable[[RunEntry], str | Cell]
    value: Callable[[RunEntry], float | str | None]


def _columns(entries: Sequence[RunEntry]) -> Iterable[_Column]:
    """Yield the columns for these runs; arguments that differ come before those that do not."""
    yield _Column("run", "run", lambda one: Cell(text=str(one.run), colour=one.colour), lambda one: one.run)
    yield _text("function", lambda one: one.function)
    yield _Column("state", "state", lambda one: Cell(text=one.state, state=one.state), lambda one: one.state)
    yield _Column("started", "text", _start, lambda one: one.started)
    yield _number("took", lambda one: one.seconds, duration)
    yield _number("ranks", lambda one: one.ranks, str, "")
    if any(one.name for one in entries):
        yield _text("name", lambda one: one.name)
    if any(one.config.detach for one in entries):
        yield _number("step", lambda one: one.step, str, "")
        yield _text("from", lambda one: one.origin)
    if any(one.code for one in entries):
        yield _text("code", lambda one: one.code)
    if any(one.config.tags for one in entries):
        yield _text("tags", lambda one: ", ".join(one.config.tags))
    yield from (_argument(name, entries) for name in _arguments(entries)[:MAX_ARGUMENTS])
    yield from (_text(name, partial(_setting, name)) for name in _settings(entries))
    names = sorted(
        dict.fromkeys(name for one in entries for name in one.last), key=lambda name: name.startswith("auto/")
    )
    for name in names[:MAX_METRICS]:
        yield _number(name, partial(_last, name), number)
        if better(name) and any(one.best is not None for one in entries):
            yield _number(f"best {name}", partial(_best, name), number)


def _text(title: str, text: Callable[[RunEntry], str]) -> _Column:
    return _Column(title, "text", text, text)


def _number(
    title: str, read: Callable[[RunEntry], float | None], write: Callable[[float], str], unknown: str = "–"
) -> _Column:
    def text(entry: RunEntry) -> str:
        value = read(entry)
        return unknown if value is None else write(value)

    def order(entry: RunEntry) -> float | None:
        value = read(entry)
        # A file may have an integer that is too large for a float, which math.isnan refuses.
        return None if isinstance(value, float) and math.isnan(value) else value

    return _Column(title, "number", text, order)


def _start(entry: RunEntry) -> str:
    """Return the time, and the date of a run of another day."""
    with suppress(ValueError, OverflowError, OSError):  # a file may have any number
        started = datetime.fromtimestamp(entry.started)
        if entry.started:
            return started.strftime("%H:%M:%S" if started.date() == datetime.now().date() else "%Y-%m-%d %H:%M")
    return ""


def _last(name: str, entry: RunEntry) -> float | None:
    return entry.last.get(name)


def _best(name: str, entry: RunEntry) -> float | None:
    return (entry.best or {}).get(name)


def _arguments(entries: Sequence[RunEntry]) -> list[str]:
    names = dict.fromkeys(name for one in entries for name in one.arguments)
    return sorted(names, key=lambda name: len({repr(one.arguments.get(name, ...)) for one in entries}) == 1)


def _argument(name: str, entries: Sequence[RunEntry]) -> _Column:
    known = [one.arguments[name] for one in entries if name in one.arguments]
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)

    def text(entry: RunEntry) -> str:
        value = entry.arguments.get(name)
        if isinstance(value, float):
            return number(value)
        return "–" if name not in entry.arguments else str(value)

    def order(entry: RunEntry) -> float | str | None:
        value = entry.arguments.get(name)
        return value if isinstance(value, int | float | str) else None

    return _Column(name, "number" if is_number else "text", text, order)


def _settings(entries: Sequence[RunEntry]) -> list[str]:
    """Return the settings that are not the same in all runs."""
    names = dict.fromkeys(name for one in entries for name in one.config.non_default() if name not in _HIDDEN_SETTINGS)
    return [name for name in names if len({repr(getattr(one.config, name)) for one in entries}) > 1]


def _setting(name: str, entry: RunEntry) -> str:
    value = getattr(entry.config, name)
    return hide_credentials(value) if isinstance(value, str) else format_setting(value)
