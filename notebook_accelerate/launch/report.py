"""A run as static HTML and as text: what stays in the saved notebook."""

from __future__ import annotations

import itertools
import math
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

from notebook_accelerate.launch import messages

if TYPE_CHECKING:
    from notebook_accelerate.errors import WorkerError
    from notebook_accelerate.launch.run import Run

_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24


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
        blocks = [self._head(), *self.run.notes, _table(self._rank_rows())]
        metrics = self._metric_rows()
        if len(metrics) > 1:
            blocks.append(_table(metrics))
        if len(self.run.attempts) > 1:
            blocks.append(_table(self._attempt_rows()))
        if self.run.failures:
            blocks.append("\n".join(messages.failure_lines(self.run.failures)))
        elif self.run.error is not None:
            blocks.append(str(self.run.error))
        return "\n\n".join(block for block in blocks if block)

    def _head(self) -> str:
        run = self.run
        planned = f" · {run.plan.sentence()}" if run.plan is not None else ""
        return f"run {run.id} · {run.function_name} · {run.status} · {run.elapsed:.1f} s{planned}"

    def _rank_rows(self) -> list[list[str]]:
        rows = [["rank", "pid", "state", "last step", "peak memory", "exit"]]
        for info in self.run.ranks:
            peak = self.run.store.peak_memory.get(info.rank)
            rows.append([
                str(info.rank),
                str(info.pid or ""),
                info.state,
                "" if info.last_step is None or info.last_step < 0 else str(info.last_step),
                "" if peak is None else f"{peak / 2**20:,.0f} MiB",
                info.exit,
            ])  # fmt: skip
        return rows

    def _metric_rows(self) -> list[list[str]]:
        rows = [["metric", "points", "first", "last", "min", "max", "curve"]]
        for name, series in self.run.metrics.items():
            values = series.values
            if not len(values):
                continue
            numbers = [values[0], values[-1], values.min(), values.max()]
            rows.append([name, str(len(values)), *(f"{number:.4g}" for number in numbers), sparkline(list(values))])
        return rows

    def _attempt_rows(self) -> list[list[str]]:
        rows = [["attempt", "started", "seconds", "outcome"]]
        for attempt in self.run.attempts:
            began = datetime.fromtimestamp(attempt.started).strftime("%H:%M:%S")
            lasted = f"{(attempt.ended or attempt.started) - attempt.started:.1f}"
            rows.append([str(attempt.number + 1), began, lasted, attempt.outcome])
        return rows

    def error_lines(self, error: WorkerError) -> list[str]:
        """Return what a failed cell shows: the failures at their cell lines, and the error's own line last."""
        lines = messages.failure_lines(self.run.failures)
        if lines:
            lines.append("")
        return [*lines, f"{type(error).__name__}: {error}"]

    # ---- HTML

    @property
    def html(self) -> str:
        """The report as HTML without scripts or outside references."""
        parts = [f"<p><strong>{escape(self._head())}</strong></p>"]
        parts += [f"<p>{escape(note)}</p>" for note in self.run.notes]
        parts.append(_html_table("Ranks", self._rank_rows()))
        metrics = self._metric_rows()
        if len(metrics) > 1:
            parts.append(_html_table("Metrics", metrics))
        if len(self.run.attempts) > 1:
            parts.append(_html_table("Attempts", self._attempt_rows()))
        if self.run.failures:
            parts.append(f"<pre>{escape(chr(10).join(messages.failure_lines(self.run.failures)))}</pre>")
        elif self.run.error is not None:
            parts.append(f"<p>{escape(str(self.run.error))}</p>")
        return f'<div class="notebook-accelerate-report">{"".join(parts)}</div>'

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def sparkline(values: list[float]) -> str:
    """Return a curve of at most 24 characters; each is the mean of its share of the finite values."""
    finite = [value / 64 for value in values if math.isfinite(value)]  # so that no sum or difference overflows
    if not finite:
        return ""
    width = min(_SPARK_WIDTH, len(finite))
    cuts = [round(index * len(finite) / width) for index in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARK[round((mean - low) * scale)] for mean in means)


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)


def _html_table(caption: str, rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
