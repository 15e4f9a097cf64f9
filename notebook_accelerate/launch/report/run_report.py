"""A run as static HTML and as text: what stays in the saved notebook."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from html import escape
from importlib import metadata
from typing import TYPE_CHECKING

from notebook_accelerate.config.plain_values import format_setting
from notebook_accelerate.launch.report import mesh_diagram, rank_rows, sharding_table, svg_curves
from notebook_accelerate.launch.state import error_messages, failures
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    import numpy as np

    from notebook_accelerate.errors import WorkerError
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry import RankFailure, Store

MAX_CURVES = 24
"""Metrics beyond this are in the table alone: a saved notebook holds every picture."""
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24
_PACKAGES = ("notebook-accelerate", "torch", "numpy", "ipykernel", "ipywidgets")

_FOLDED = ("Configuration", "Environment")
"""Tables that are there for later, and closed until somebody wants them."""
_UNFOLDED = ".notebook-accelerate-report details::details-content { content-visibility: visible; }"
_ON_PAPER = f"<style>@media print {{ {_UNFOLDED} }}</style>"
"""Nothing can be unfolded on paper, nor in a PDF."""
_PRE = ' style="font-family:monospace;white-space:pre-wrap;margin:0.3em 0"'

Rows = list[list[str]]


class Report:
    """Everything worth keeping of a run.

    Attributes:
        run: The run it is about; the report is made anew each time it is asked for.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    # ---- text

    @property
    def text(self) -> str:
        """The report as plain text."""
        return self._text(self._tables())

    @property
    def bundle(self) -> dict[str, str]:
        """The report as a MIME bundle: HTML and text of one moment."""
        tables = self._tables()
        return {"text/html": self._html(tables), "text/plain": self._text(tables)}

    def _text(self, tables: list[tuple[str, Rows]]) -> str:
        blocks = [self._head(), *self.run.notes, *(self._table(*table) for table in tables if len(table[1]) > 1)]
        if self.run.failures:
            blocks.append("\n".join(error_messages.failure_lines(self.run.failures)))
        elif self.run.error is not None:
            blocks.append(str(self.run.error))
        return "\n\n".join(block for block in blocks if block)

    def _table(self, caption: str, rows: Rows) -> str:
        if caption != sharding_table.CAPTION:
            return _table(rows)
        ranks = sharding_table.holdings_of(self.run)
        grid = mesh_diagram.mesh_rows(ranks)
        return "\n\n".join([sharding_table.sentence(ranks), *([_table(grid)] if len(grid) > 1 else []), _table(rows)])

    def _head(self) -> str:
        run = self.run
        planned = f" · {run.plan.sentence()}" if run.plan is not None else ""
        return f"run {run.id} · {run.function_name} · {run.status} · {run.elapsed:.1f} s{planned}"

    def _tables(self) -> list[tuple[str, Rows]]:
        attempts = self._attempt_rows()
        return [
            *rank_rows.tables(self.run),
            ("Metrics", self._metric_rows()),
            (sharding_table.CAPTION, sharding_table.report_rows(sharding_table.holdings_of(self.run))),
            ("Where the step's time went", rank_rows.step_time_rows(self.run)),
            ("Profiler traces, for a viewer of Chrome traces", trace_rows(self.run.store)),
            ("Attempts", attempts if len(attempts) > 2 else []),
            ("Configuration", self._config_rows()),
            ("Environment", environment_rows(self.run)),
        ]

    def _metric_rows(self) -> Rows:
        rows = [["metric", "points", "first", "last", "min", "max", "curve"]]
        for name, series in self.run.metrics.items():
            values = series.values
            if not len(values):
                continue
            numbers = [values[0], values[-1], values.min(), values.max()]
            curve = sparkline(series.rank(int(series.ranks.min())).values)
            rows.append([name, str(len(values)), *(f"{number:.4g}" for number in numbers), curve])
        return rows

    def _attempt_rows(self) -> Rows:
        rows = [["attempt", "started", "seconds", "outcome"]]
        for attempt in self.run.attempts:
            began = datetime.fromtimestamp(attempt.started).strftime("%H:%M:%S")
            lasted = f"{(attempt.ended or attempt.started) - attempt.started:.1f}"
            rows.append([str(attempt.number + 1), began, lasted, attempt.outcome])
        return rows

    def _config_rows(self) -> Rows:
        """What was asked for; of variables and of the rendezvous only the names, for a value may be a secret."""
        rows = [["setting", "value"]]
        for name, value in self.run.config.non_default().items():
            rows.append([name, ", ".join(value) if name in ("env", "rdzv_conf") else format_setting(value)])
        return rows

    def error_lines(self, error: WorkerError) -> list[str]:
        """Return what a failed cell shows: the failures at their cell lines, and the error's own line last."""
        lines = error_messages.failure_lines(self.run.failures)
        if lines:
            lines.append("")
        return [*lines, f"{type(error).__name__}: {error}"]

    # ---- HTML

    @property
    def html(self) -> str:
        """The report as HTML without scripts or outside references."""
        return self._html(self._tables())

    def _html(self, rows_by_caption: list[tuple[str, Rows]]) -> str:
        head, _, plan = self._head().partition(" s · ")
        parts = [f"<p><strong>{escape(head)}{' s' if plan else ''}</strong></p>"]
        parts += [f"<p>{escape(plan)}</p>"] if plan else []
        parts += [f"<p>{escape(note)}</p>" for note in self.run.notes]
        if self.run.failures:
            parts.append(failures_html(self.run.failures))
        elif self.run.error is not None:
            parts.append(f"<p>{escape(str(self.run.error))}</p>")
        parts.append(self._curves_html())
        tables = [(caption, self._html_table(caption, rows)) for caption, rows in rows_by_caption if len(rows) > 1]
        parts += [table for caption, table in tables if caption not in _FOLDED]
        parts.append(_folded(" and ".join(_FOLDED), "".join(table for caption, table in tables if caption in _FOLDED)))
        return f'<div class="notebook-accelerate-report">{_ON_PAPER}{"".join(parts)}</div>'

    def _html_table(self, caption: str, rows: Rows) -> str:
        if caption != sharding_table.CAPTION:
            return _html_table(caption, rows)
        ranks = sharding_table.holdings_of(self.run)
        return (
            f"{_html_table(f'{caption}: {sharding_table.sentence(ranks)}', rows)}<div>{mesh_diagram.image(ranks)}</div>"
        )

    def _curves_html(self) -> str:
        store, metrics = self.run.store, self.run.metrics
        names, failed = store.metric_names(), [failure.rank for failure in self.run.failures]
        shown = [
            svg_curves.image(name, svg_curves.tracks_of(store, name, failed), svg_curves.description(metrics[name]))
            for name in names[:MAX_CURVES]
        ]
        more = len(names) - len(shown)
        note = f"<p>{more} more metrics are in the table below.</p>" if more > 0 else ""
        return f"<div>{' '.join(shown)}</div>{note}" if shown else ""

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def trace_rows(store: Store) -> Rows:
    """Return, per trace that a profiler has written, its rank, path and size; only the head where there is none."""
    return [["rank", "trace", "size"], *([str(rank), path, file_size(size)] for rank, path, size in store.traces())]


def file_size(count: int) -> str:
    """Return bytes as "312 B", "12 KiB" or "3.4 MiB"."""
    if count < 2**10:
        return f"{count} B"
    return f"{count / 2**10:,.0f} KiB" if count < 2**20 else f"{count / 2**20:,.1f} MiB"


@functools.cache
def _versions() -> dict[str, str]:
    """Look up once: reading the metadata takes 6 ms, and a launch shows its report several times."""
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def environment_rows(run: Run) -> Rows:
    """Return what the run ran on."""
    rows = [["environment", "version"], ["python", f"{platform.python_version()} on {platform.platform()}"]]
    rows += [[name, version] for name, version in _versions().items()]
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch, "version", None) is not None and torch.version.cuda:
        rows.append(["cuda", str(torch.version.cuda)])
    started = datetime.fromtimestamp(run.started).astimezone()
    rows.append(["processors", str(os.cpu_count())])
    rows.append(["started", started.strftime("%Y-%m-%d %H:%M:%S %Z")])
    return rows


def failures_html(found: Sequence[RankFailure]) -> str:
    """Return the failures as HTML, one block per group of ranks that failed in the same way, the first one open."""
    blocks = []
    for position, group in enumerate(failures.grouped(list(found))):
        lines = error_messages.failure_lines(group)
        who = rank_names([failure.rank for failure in group])
        kind = "failed" if position == 0 else "failed because of that" if group[0].consequence else "failed too"
        head = f"{who} {kind}: {error_messages.headline(group).partition(': ')[2]}"
        body = escape("\n".join(lines[1:]))
        opened = " open" if position == 0 else ""
        blocks.append(
            f"<details{opened}><summary><strong>{escape(head)}</strong></summary><pre{_PRE}>{body}</pre></details>"
        )
    return "".join(blocks)


def sparkline(values: Sequence[float] | np.ndarray) -> str:
    """Return a curve of at most 24 characters; each is the mean of its share of the finite values.

    Args:
        values: Numbers, float64, shape (n,).
    """
    import numpy as np

    found = np.asarray(values, dtype=float)
    finite = found[np.isfinite(found)] / 64  # so that no sum or difference overflows
    if not len(finite):
        return ""
    width = min(_SPARK_WIDTH, len(finite))
    cuts = np.round(np.arange(width + 1) * len(finite) / width).astype(int)
    # Divided before they are summed: the sum of many numbers near the largest that there are would overflow.
    counts = np.diff(cuts)
    means = np.add.reduceat(finite / np.repeat(counts, counts), cuts[:-1])
    low, high = means.min(), means.max()
    # Halves: the span of numbers near the largest that there are would overflow.
    scale = (len(_SPARK) - 1) / (high / 2 - low / 2) if high > low else 0.0
    return "".join(_SPARK[round(float((mean / 2 - low / 2) * scale))] for mean in means)


def _table(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)


_NUMBER = re.compile(r"-?[\d.,]+(e[+-]?\d+)?( ?(%|B|[KMGT]iB))?|-?inf|nan")


def _html_table(caption: str, rows: Rows) -> str:
    """Return a table; front ends put everything to the right, which is right for numbers alone."""
    if len(rows) < 2:
        return ""
    numeric = [
        all(not row[column] or _NUMBER.fullmatch(row[column]) for row in rows[1:]) for column in range(len(rows[0]))
    ]
    styles = [f' style="text-align:{"right" if column else "left"}"' for column in numeric]
    head = "".join(f'<th scope="col"{style}>{escape(cell)}</th>' for cell, style in zip(rows[0], styles, strict=True))
    body = "".join(_html_row(row, styles) for row in rows[1:])
    return (
        f'<table><caption style="text-align:left;caption-side:top">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _html_row(row: list[str], styles: list[str]) -> str:
    cells = "".join(f"<td{style}>{escape(cell)}</td>" for cell, style in zip(row[1:], styles[1:], strict=True))
    return f'<tr><th scope="row"{styles[0]}>{escape(row[0])}</th>{cells}</tr>'


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
