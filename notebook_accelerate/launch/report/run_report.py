"""The report of a run as static HTML and as text, for the saved notebook."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from notebook_accelerate.config.plain_values import format_setting
from notebook_accelerate.hardware.versions import installed_version
from notebook_accelerate.launch.report import mesh_diagram, rank_rows, svg_curves
from notebook_accelerate.launch.report.curves import Source, shown_names
from notebook_accelerate.launch.report.markup import Markup, Rows, byte_size, element, html_table, join, text_table
from notebook_accelerate.launch.report.rank_rows import findings
from notebook_accelerate.launch.state import failures
from notebook_accelerate.telemetry.rank_devices import rank_names

if TYPE_CHECKING:
    import numpy as np

    from notebook_accelerate.errors import WorkerError
    from notebook_accelerate.launch.state.run_state import RunView
    from notebook_accelerate.telemetry import RankFailure, Store

MAX_CURVES = 24
"""Further metrics are listed in the table only: a saved notebook stores every image."""
METRICS = "Metrics"
_FOLDED = ("Configuration", "Environment", "Launch")
"""The captions of the tables behind a closed fold while the run goes on, too: an update would close what is opened."""
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24
_PACKAGES = ("notebook-accelerate", "torch", "numpy", "ipykernel", "ipywidgets")

# Mid-tones, legible on light and dark backgrounds.
_STATE_COLOURS = {"succeeded": "#2a9a68", "failed": "#d64545", "stopped": "#8a8a8a", "lost": "#c4881c"}
_OTHER_STATES = "#3b82d6"
_STATE = "border:1px solid {0};border-radius:1em;color:{0};font-weight:600;margin-right:0.6em;padding:0.1em 0.7em"
_UNFOLDED = ".notebook-accelerate-report details::details-content { content-visibility: visible; }"
_PRINT_STYLE = Markup(f"<style>@media print {{ {_UNFOLDED} }}</style>")
"""Folds cannot be opened on paper or in a PDF."""
_PRE = "font-family:monospace;white-space:pre-wrap;margin:0.3em 0"


class Report:
    """The report of a run; each property reads the run's present state.

    Attributes:
        run: The run.
    """

    def __init__(self, run: RunView) -> None:
        self.run = run

    @property
    def text(self) -> str:
        """The report as plain text."""
        return self._text(self._tables())

    @property
    def html(self) -> str:
        """The report as HTML without scripts or external references."""
        return self._html(self._tables())

    @property
    def bundle(self) -> dict[str, str]:
        """The report as a MIME bundle: HTML and text of the same state."""
        tables = self._tables()
        return {"text/html": self._html(tables), "text/plain": self._text(tables)}

    def error_lines(self, error: WorkerError) -> list[str]:
        """Return the lines that a failed cell shows: the failures at their cell lines, then the error's first line.

        Args:
            error: The run's error.
        """
        lines = failures.failure_lines(self.run.failures)
        text = f"{type(error).__name__}: {error}"
        return [*lines, "", text.partition("\n")[0]] if lines else [text]

    def _head(self) -> tuple[str, str]:
        run = self.run
        first = f"run {run.id} · {run.function_name} · {run.status} · {run.elapsed:.1f} s"
        return first, run.plan.sentence() if run.plan is not None else ""

    def _tables(self) -> list[tuple[str, Rows]]:
        attempts, ranks, devices = self._attempt_rows(), self.run.ranks, self.run.store.devices
        tables = [
            *rank_rows.rank_tables(self.run),
            ("Devices", rank_rows.device_rows(ranks, {rank.rank: devices.of_rank(rank.rank) for rank in ranks})),
            (METRICS, self._metric_rows()),
            (mesh_diagram.CAPTION, mesh_diagram.report_rows(mesh_diagram.latest_reports(self.run))),
            ("Step time", rank_rows.step_time_rows(self.run)),
            ("Profiler traces (Chrome trace format)", trace_rows(self.run.store)),
            ("Attempts", attempts if len(attempts) > 2 else []),
            ("Configuration", config_rows(self.run)),
            ("Environment", environment_rows(self.run)),
        ]
        return [(caption, rows) for caption, rows in tables if len(rows) > 1]

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
            started = datetime.fromtimestamp(attempt.started).strftime("%H:%M:%S")
            seconds = f"{(attempt.ended or attempt.started) - attempt.started:.1f}"
            rows.append([str(attempt.number + 1), started, seconds, attempt.outcome])
        return rows

    # ---- text

    def _text(self, tables: list[tuple[str, Rows]]) -> str:
        blocks = [" · ".join(filter(None, self._head())), *self.run.notes, "\n".join(findings(self.run))]
        blocks += [self._text_table(caption, rows) for caption, rows in tables]
        if self.run.failures:
            blocks.append("\n".join(failures.failure_lines(self.run.failures)))
        elif self.run.error is not None:
            blocks.append(str(self.run.error))
        return "\n\n".join(block for block in blocks if block)

    def _text_table(self, caption: str, rows: Rows) -> str:
        table = text_table(rows, rule=True)
        if caption != mesh_diagram.CAPTION:
            return table
        reports = mesh_diagram.latest_reports(self.run)
        mesh = mesh_diagram.mesh_rows(reports)
        parts = [mesh_diagram.summary(reports), text_table(mesh, rule=True) if len(mesh) > 1 else "", table]
        return "\n\n".join(filter(None, parts))

    # ---- HTML

    def _html(self, tables: list[tuple[str, Rows]]) -> str:
        run, (_, plan) = self.run, self._head()
        state = element(
            "span", run.status.capitalize(), style=_STATE.format(_STATE_COLOURS.get(run.status, _OTHER_STATES))
        )
        name = f" {run.function_name} · run {run.id} · {run.elapsed:.1f} s"
        parts: list[str] = [_PRINT_STYLE, element("p", state, element("strong", name))]
        parts += [element("p", plan)] if plan else []
        parts += [errors_html(run), self._findings_html()]
        parts.append(self._curves_html())
        launch = launch_rows(run)
        parts += [self._folded_table(caption, rows) for caption, rows in [*tables, ("Launch", launch)] if len(rows) > 1]
        return element("div", *parts, class_="notebook-accelerate-report")

    def _folded_table(self, caption: str, rows: Rows) -> Markup:
        inside = []
        is_open = self.run.ended is None and caption not in _FOLDED
        if caption == METRICS and len(rows) <= MAX_CURVES:  # their pictures are shown
            rows = [row[:-1] for row in rows]
        if caption == mesh_diagram.CAPTION:
            reports = mesh_diagram.latest_reports(self.run)
            caption = f"{caption}: {mesh_diagram.summary(reports)}"
            inside.append(element("div", mesh_diagram.image(reports)))
        return element("details", element("summary", caption), _report_table(rows), *inside, open=is_open)

    def _findings_html(self) -> Markup:
        found = findings(self.run)
        return element("ul", *(element("li", text) for text in found)) if found else Markup()

    def _curves_html(self) -> Markup:
        """Return the curves of what the run has logged; of a run that has logged nothing, the automatic ones."""
        run, failed = self.run, [failure.rank for failure in self.run.failures]
        source = Source(run.store, run.started, chosen=failed, automatic=run.config.automatic_metrics)
        names = shown_names([source])
        if not names:
            return Markup()
        images = element("div", join([svg_curves.metric_image([source], name) for name in names[:MAX_CURVES]], " "))
        more = len(names) - MAX_CURVES
        return join([images, element("p", f"{more} more metrics are in the table below.")]) if more > 0 else images

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def launch_rows(run: RunView) -> Rows:
    """Return the plan of a run, and the remarks of its launch."""
    rows = [["launch", "value"]]
    if (plan := run.plan) is not None:
        rows.append(
            [
                "ranks",
                f"{plan.num_processes} of {plan.world_size}"
                if plan.node or plan.world_size != plan.num_processes
                else str(plan.num_processes),
            ]
        )
        rows.append(["device", plan.where or plan.accelerator])
        rows.append(["start method", f"{plan.start_method}: {plan.reason}" if plan.reason else plan.start_method])
        rows += [["backend", plan.backend]] if plan.backend else []
        rows += [["threads of a rank", str(plan.threads)]] if plan.threads is not None else []
    return [*rows, *(["remark", note] for note in run.notes)]


def config_rows(run: RunView) -> Rows:
    """Return the settings of a run; of ``env`` and ``rdzv_conf`` only the names, since a value may be a secret."""
    rows = [["setting", "value"]]
    for name, value in run.config.non_default().items():
        rows.append([name, ", ".join(value) if name in ("env", "rdzv_conf") else format_setting(value)])
    return rows


def trace_rows(store: Store) -> Rows:
    """Return rank, path and size of each profiler trace; only the head without any."""
    return [["rank", "trace", "size"], *([str(rank), path, byte_size(size)] for rank, path, size in store.traces())]


@functools.cache
def _versions() -> dict[str, str]:
    """Look up once: reading the metadata takes 6 ms, and a launch shows its report several times."""
    return {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}


def environment() -> dict[str, str]:
    """Return the versions and the machine of this process, by their names in the report."""
    found = {"python": f"{platform.python_version()} on {platform.platform()}", **_versions()}
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch, "version", None) is not None and torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
    return {**found, "processors": str(os.cpu_count())}


def environment_rows(run: RunView) -> Rows:
    """Return the versions and the machine of a run."""
    rows = [["environment", "version"], *map(list, (run.environment or environment()).items())]
    started = datetime.fromtimestamp(run.started).astimezone()
    rows.append(["started", started.strftime("%Y-%m-%d %H:%M:%S %Z")])
    return rows


def errors_html(run: RunView) -> Markup:
    """Return why a run did not succeed, with a link to the page on its error; "" without an error."""
    error = run.error
    if error is None:
        return Markup("")
    text = failures_html(run.failures) if run.failures else element("p", str(error))
    if run.status == "stopped":
        return text
    link = element("a", f"What {type(error).__name__} means", href=error.page, target="_blank", rel="noopener")
    return join([text, element("p", link)])


def failures_html(found: Sequence[RankFailure]) -> Markup:
    """Return the failures as HTML, one block per group of ranks that failed in the same way, the first one open."""
    blocks = []
    for position, group in enumerate(failures.grouped(list(found))):
        lines = failures.failure_lines(group)
        ranks = rank_names([failure.rank for failure in group])
        verb = "failed" if position == 0 else "failed because of that" if group[0].consequence else "failed too"
        head = f"{ranks} {verb}: {failures.headline(group).partition(': ')[2]}"
        summary = element("summary", element("strong", head))
        blocks.append(element("details", summary, element("pre", "\n".join(lines[1:]), style=_PRE), open=not position))
    return join(blocks)


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
    # Divide before the sum: many numbers near the largest float64 would overflow.
    counts = np.diff(cuts)
    means = np.add.reduceat(finite / np.repeat(counts, counts), cuts[:-1])
    low, high = means.min(), means.max()
    # Half of each: the span of numbers near the largest float64 would overflow.
    scale = (len(_SPARK) - 1) / (high / 2 - low / 2) if high > low else 0.0
    return "".join(_SPARK[round(float((mean / 2 - low / 2) * scale))] for mean in means)


_NUMBER = re.compile(r"-?[\d.,]+(e[+-]?\d+)?( ?(%|B|[KMGT]iB))?|-?inf|nan")


def _report_table(rows: Rows) -> Markup:
    """Return a table with numbers aligned to the right, texts to the left."""
    head, *body = rows
    numeric = [all(not cell or _NUMBER.fullmatch(cell) for cell in column) for column in zip(*body, strict=True)]
    columns = [{"style": f"text-align:{'right' if right else 'left'}"} for right in numeric]
    return html_table(head, body, columns=columns)
