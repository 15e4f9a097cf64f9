"""List the kept runs in a folder, without reading their curves and output."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from notebook_accelerate.config.plain_values import given_folder
from notebook_accelerate.errors import BrokenRunError
from notebook_accelerate.launch.kept.journal_format import JOURNAL_NAME
from notebook_accelerate.launch.kept.journal_reader import read_journal
from notebook_accelerate.launch.kept.opened_run import end_if_lost, open_run
from notebook_accelerate.launch.kept.run_folder import read_summary, stored_config
from notebook_accelerate.launch.kept.run_writer import summary_of
from notebook_accelerate.launch.output.running_cell import running_kernel
from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.run_comparison import RunEntry, runs_table
from notebook_accelerate.launch.run_display import load
from notebook_accelerate.launch.state.run_view import internals

if TYPE_CHECKING:
    import pandas as pd

    from notebook_accelerate.launch.report.document import Table
    from notebook_accelerate.launch.run import Run

_COMMIT_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """A kept run, without its curves and output.

    Attributes:
        path: The run's folder.
        name: The run's name.
        function: Name of the launched function.
        status: A value of ``Run.status``, or "broken" if the journal cannot be read.
        started: When the run was launched, in seconds since the epoch, or 0.0 if unknown.
        ended: When the run ended, in seconds since the epoch, or None while it is running.
        ranks: The number of ranks.
        config: The settings of the launch that differ from the defaults. Secrets are hidden.
        arguments: The function's arguments, by parameter. Values other than numbers and strings are given as the names
            of their types.
        commit: The git commit of the working directory at the launch, or "" if unknown.
        dirty: Whether files differed from that commit, or None if unknown.
        metrics: The last value of each metric, from the lowest rank that logged the metric.
        message: The message of the run's error, or the reason why the journal cannot be read.
        continues: Names of the runs whose training this run continues, oldest first.
    """

    path: Path
    name: str
    function: str = ""
    status: str = "broken"
    started: float = 0.0
    ended: float | None = None
    ranks: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    dirty: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    message: str = ""
    continues: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """The seconds from the launch to the end, or None while it is running."""
        return None if self.ended is None else self.ended - self.started

    def open(self) -> Run:
        """Open the run for reading; see `open_run`."""
        return open_run(self.path)


class KeptRuns(Sequence[KeptRun]):
    """The kept runs in a folder, oldest first. As the value of a cell's last line, they are shown as a table.

    Args:
        rows: The runs to list.
    """

    def __init__(self, rows: Iterable[KeptRun]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> KeptRun: ...

    @overload
    def __getitem__(self, index: slice) -> KeptRuns: ...

    def __getitem__(self, index: int | slice) -> KeptRun | KeptRuns:
        return KeptRuns(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def open(self) -> list[Run]:
        """Open the runs whose journals can be read; see `open_run`."""
        return [row.open() for row in self if row.status != "broken"]

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with a row for each run, and a column for each metric and argument. This needs pandas."""
        import pandas as pd

        def time_of(seconds: float | None) -> Any:
            try:
                return pd.to_datetime(seconds, unit="s", utc=True, errors="coerce")
            except OverflowError:  # The summary is damaged. Versions of pandas before 3 raise this error.
                return pd.NaT

        return pd.DataFrame(
            [
                {
                    "name": row.name,
                    "status": row.status,
                    "started": time_of(row.started),
                    "seconds": row.seconds,
                    "ranks": row.ranks,
                    "commit": row.commit,
                    "dirty": row.dirty,
                    **{f"args.{name}": value for name, value in row.arguments.items()},
                    **{f"config.{name}": value for name, value in row.config.items()},
                    **row.metrics,
                    "path": str(row.path) if row.path.name else "",
                }
                for row in self
            ]
        )

    @property
    def labels(self) -> list[str]:
        """A unique label for each run: the run's name, or the folder's name if another run has the same name."""
        names = Counter(row.name for row in self)
        return [row.name if names[row.name] == 1 else row.path.name for row in self]

    @cached_property
    def _entries(self) -> list[RunEntry]:
        return [entry_of(row, label) for row, label in zip(self, self.labels, strict=True)]

    def _table(self) -> Table:
        return runs_table(self._entries, "no kept runs")

    def __repr__(self) -> str:
        return rendering.text(self._table())

    def _repr_html_(self) -> str:
        return rendering.html(self._table())

    def _ipython_display_(self) -> None:
        if running_kernel() is None:
            raise NotImplementedError  # This makes IPython show the other representations.
        load("runs")(self)._ipython_display_()


def entry_of(row: KeptRun, label: str) -> RunEntry:
    """Return the row for a kept run in a table of runs.

    Args:
        row: The kept run to show.
        label: The run's name in the table.
    """
    return RunEntry(
        key=label,
        run=label,
        function=row.function,
        state=row.status,
        started=row.started,
        seconds=row.seconds,
        ranks=row.ranks,
        settings=row.config,
        arguments=row.arguments,
        last=row.metrics,
        code=row.commit[:_COMMIT_SHOWN] + (" +changes" if row.dirty else ""),
    )


def kept_runs(folder: str | os.PathLike[str]) -> KeptRuns:
    """Return the kept runs in a folder, oldest first.

    Args:
        folder: The folder that was passed as ``save``.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    base = given_folder(folder)
    if not base.is_dir():
        raise FileNotFoundError(f"{base} is not a folder. Pass the folder that was passed as save: runs('runs')")
    # List a broken link, too: glob() finds it only since Python 3.14.
    rows = [_row(path) for path in sorted(base.iterdir()) if os.path.lexists(path / JOURNAL_NAME)]
    return KeptRuns(sorted(rows, key=lambda row: (row.started, row.path)))


def _row(path: Path) -> KeptRun:
    summary = read_summary(path)
    row = None if summary is None else _from_summary(path, summary)
    if row is not None:
        return row
    try:
        contents = read_journal(path / JOURNAL_NAME)
        end_if_lost(contents, path / JOURNAL_NAME)
    except (BrokenRunError, OSError) as error:
        return KeptRun(path=path, name=path.name, message=str(error))
    code = contents.sections.get("code", {})
    return _from_summary(path, summary_of(contents.header, code, contents.journal)) or KeptRun(
        path=path, name=path.name
    )


def _from_summary(path: Path, summary: Mapping[str, Any]) -> KeptRun | None:
    """Return the run that a summary describes, or None if this package does not write such summaries."""
    try:
        return KeptRun(
            path=path,
            name=_text(summary["name"]),
            function=_text(summary["function"]),
            status=_text(summary["status"]),
            started=float(summary["started"]),
            ended=None if summary["ended"] is None else float(summary["ended"]),
            ranks=int(summary["ranks"]),
            config=dict(summary["config"]),
            arguments=dict(summary["arguments"]),
            commit=_text(summary["commit"]),
            dirty=None if summary["dirty"] is None else bool(summary["dirty"]),
            metrics={_text(name): float(value) for name, value in summary["metrics"].items()},
            message=_text(summary["message"]),
            continues=tuple(map(_text, summary["continues"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def kept_run_of(run: Run) -> KeptRun:
    """Return the row for a run of this kernel, kept or not."""
    header = {
        "name": run.name,
        "function": run.function_name,
        "config": stored_config(run.config),
        "arguments": run.arguments,
    }
    found = _from_summary(run.folder or Path(), summary_of(header, {}, internals(run).journal))
    assert found is not None, "this package wrote the summary"
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
