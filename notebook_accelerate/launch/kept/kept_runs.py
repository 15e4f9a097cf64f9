"""A table of the kept runs of a folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from notebook_accelerate.config.plain_values import given_folder
from notebook_accelerate.errors import BrokenRunError
from notebook_accelerate.launch.kept.journal_format import JOURNAL_NAME
from notebook_accelerate.launch.kept.journal_reader import read_journal
from notebook_accelerate.launch.kept.opened_run import end_if_lost, open_run
from notebook_accelerate.launch.kept.run_folder import read_summary
from notebook_accelerate.launch.kept.run_writer import summary_of

if TYPE_CHECKING:
    import pandas as pd

    from notebook_accelerate.launch.run import Run

_METRICS_SHOWN = 6
_COMMIT_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """A row of the table: a kept run, without its curves and its output.

    Attributes:
        path: Its folder.
        name: Its name.
        function: Name of the launched function.
        status: As ``Run.status``; "broken" where its journal cannot be read.
        started: When it was launched, in seconds since the epoch; 0.0 where that is unknown.
        ended: When it ended, in seconds since the epoch; None while it runs.
        ranks: Number of its ranks.
        config: The settings of the launch that differ from their defaults; secrets are hidden.
        arguments: The arguments of the function, by parameter: numbers and texts; of other values the type.
        commit: The git commit of the folder in which it was launched; "" where that is unknown.
        dirty: Whether files differed from that commit; None where that is unknown.
        metrics: The last value of each metric, on the lowest rank that logged it.
        message: The text of its error, or why its journal cannot be read.
        continues: Names of the runs whose training it goes on with, the oldest first.
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
        """Seconds from the launch to the end; None while it runs."""
        return None if self.ended is None else self.ended - self.started

    def open(self) -> Run:
        """Open the run; see `open_run`."""
        return open_run(self.path)


class KeptRuns(Sequence[KeptRun]):
    """The kept runs of a folder, the oldest first; as the last line of a cell it is a table.

    Args:
        rows: The runs.
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
        """Open the runs that can be read; see `open_run`."""
        return [row.open() for row in self if row.status != "broken"]

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame with a row per run, and a column per metric and argument (needs pandas)."""
        import pandas as pd

        def time_of(seconds: float | None) -> Any:
            try:
                return pd.to_datetime(seconds, unit="s", utc=True, errors="coerce")
            except OverflowError:  # of a damaged summary, before pandas 3
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
                    "path": str(row.path),
                }
                for row in self
            ]
        )

    def _cells(self) -> list[list[str]]:
        names = list(dict.fromkeys(name for row in self for name in row.metrics))[:_METRICS_SHOWN]
        arguments = list(dict.fromkeys(name for row in self for name in row.arguments))[:_METRICS_SHOWN]
        head = ["name", "status", "started", "duration", "ranks", "code", *arguments, *names]
        return [head, *([*_fixed(row), *_values(row, arguments, names)] for row in self)]

    def __repr__(self) -> str:
        if not self:
            return "no kept runs"
        cells = self._cells()
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head, *rows = [[escape(cell) for cell in line] for line in self._cells()]
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in rows)
        first = "".join(f"<th>{cell}</th>" for cell in head)
        return f"<table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table>"


def _fixed(row: KeptRun) -> list[str]:
    started = ""
    with suppress(ValueError, OverflowError, OSError):  # a file may have any number
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started)) if row.started else ""
    duration = "" if row.seconds is None else f"{row.seconds:.1f} s"
    code = row.commit[:_COMMIT_SHOWN] + (" +changes" if row.dirty else "")
    return [row.name, row.status, started, duration, str(row.ranks), code]


def _values(row: KeptRun, arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    shown = [str(row.arguments.get(name, ""))[:40] for name in arguments]
    return [*shown, *(f"{row.metrics[name]:.4g}" if name in row.metrics else "" for name in names)]


def kept_runs(folder: str | PathLike[str]) -> KeptRuns:
    """Return the kept runs of a folder, the oldest first.

    Args:
        folder: The folder that ``save`` named.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    base = given_folder(folder)
    if not base.is_dir():
        raise FileNotFoundError(f"{base} is no folder; pass the one that was given to save, as runs('runs')")
    found = sorted(path.parent for path in base.glob(f"*/{JOURNAL_NAME}"))
    rows = [_row(path) for path in found]
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
    """Return the row of a summary; None where it is not what this package writes."""
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


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
