"""The report of a run as static HTML and as text, for saved notebooks and terminals."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from notebook_accelerate.config.plain_values import shown_value, size_text, value_in_words
from notebook_accelerate.config.settings import labels_of
from notebook_accelerate.hardware.versions import installed_version
from notebook_accelerate.launch.report import mesh_diagram, rank_tables, svg_curves
from notebook_accelerate.launch.report.curves import Source, shown_names
from notebook_accelerate.launch.report.document import Drawing, Node, Rows, Section, Table, Text, table_of
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.report.rank_rows import findings
from notebook_accelerate.launch.report.rendering import DocumentView
from notebook_accelerate.launch.report.run_snapshot import RunWatcher
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    import numpy as np

    from notebook_accelerate.errors import WorkerError
    from notebook_accelerate.launch.state.run_view import RunView
    from notebook_accelerate.telemetry import RankFailure, Store

MAX_TRACES = 256
"""Maximum number of profiler traces to list."""
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24
_PACKAGES = ("notebook-accelerate", "torch", "numpy", "ipykernel", "ipywidgets")

# These mid-tones are legible on both light and dark backgrounds.
_STATE_COLOURS = {"succeeded": "#2a9a68", "failed": "#d64545", "stopped": "#8a8a8a", "lost": "#c4881c"}
_OTHER_STATES = "#3b82d6"
_STATE = "border:1px solid {0};border-radius:1em;color:{0};font-weight:600;margin-right:0.6em;padding:0.1em 0.7em"
_UNFOLDED = ".notebook-accelerate-report details::details-content { content-visibility: visible; }"
_PRINT_STYLE = Markup(f"<style>@media print {{ {_UNFOLDED} }}</style>")
"""A style sheet that opens all folds in print, because they cannot be opened on paper or in a PDF."""
_PRE = "font-family:monospace;white-space:pre-wrap;margin:0.3em 0"


class Report(DocumentView):
    """The report of a run. Each property reads the run's current state.

    Attributes:
        run: The run to report on.
    """

    def __init__(self, run: RunView) -> None:
        self.run = run

    def document(self) -> Section:
        """Return the current state of the run: the outcome, the curves, and tables behind folds."""
        run = self.run
        seen = RunWatcher(run).snapshot(steady_time.now())
        folds = [
            self._fold(rank_tables.ended_ranks(seen.ranks)),
            self._fold(rank_tables.device_table(seen.ranks)),
            self._fold(metric_table(run)),
            self._sharding(),
            self._fold(rank_tables.step_time_table(rank_tables.step_times(seen.ranks))),
            self._fold(trace_table(internals(run).store)),
            self._fold(attempt_table(run)),
            *(self._fold(table, is_setup=True) for table in setup(run)),
        ]
        nodes: tuple[Node, ...] = (
            _head(run),
            Drawing(html=errors_html(run)),
            Text(lines=tuple(findings(run, seen)), tone="list"),
            Drawing(html=_curves_html(run)),
            *folds,
            Drawing(text=_error_text(run)),
        )
        return Section(key="report", nodes=nodes)

    def _fold(self, table: Table, *, is_setup: bool = False) -> Section:
        """Return a table behind a fold.

        While the run is running, most folds are open, because each update would close those that the user has opened.
        """
        is_open = self.run.ended is None and not is_setup
        return Section(key=table.key, title=table.caption, nodes=(replace(table, caption=""),), open=is_open)

    def _sharding(self) -> Section:
        reports = mesh_diagram.latest_reports(self.run)
        title = f"{mesh_diagram.CAPTION}: {mesh_diagram.summary(reports)}"
        nodes = mesh_diagram.sharding(reports, inline=True) if reports else ()
        return Section(key="sharding", title=title, nodes=nodes, open=self.run.ended is None)

    def error_lines(self, error: WorkerError) -> list[str]:
        """Return the lines that a failed cell shows: the failures with their tracebacks, then the error's first line.

        Args:
            error: The error that the run ended with.
        """
        lines = failures.failure_lines(self.run.failures)
        text = f"{type(error).__name__}: {error}"
        return [*lines, "", text.partition("\n")[0]] if lines else [text]


def _head(run: RunView) -> Drawing:
    plan = run.plan.sentence() if run.plan is not None else ""
    first = f"run {run.id} · {run.function_name} · {run.status} · {run.elapsed:.1f} s"
    style = _STATE.format(_STATE_COLOURS.get(run.status, _OTHER_STATES))
    state = element("span", run.status.capitalize(), style=style)
    name = element("strong", f" {run.function_name} · run {run.id} · {run.elapsed:.1f} s")
    parts = [_PRINT_STYLE, element("p", state, name), *([element("p", plan)] if plan else [])]
    return Drawing(html=join(parts), text=" · ".join(filter(None, (first, plan))))


def _error_text(run: RunView) -> str:
    """Return the failures, or else the error. They come last in the text, next to the prompt."""
    if run.failures:
        return "\n".join(failures.failure_lines(run.failures))
    return str(run.error) if run.error is not None else ""


def _curves_html(run: RunView) -> Markup:
    """Return images of the curves of the logged metrics, or of the automatic metrics if nothing was logged."""
    failed = [failure.rank for failure in run.failures]
    source = Source(internals(run).store, run.started, chosen=failed, automatic=run.config.automatic_metrics)
    more = len(shown_names([source])) - svg_curves.MAX_IMAGES
    note = [element("p", f"{more} more metrics are in the table below.")] if more > 0 else []
    return join([svg_curves.metric_images([source]), *note])


# ---- tables


def metric_table(run: RunView) -> Table:
    """Return a table of the metrics: number of points, first and last value, and range."""
    rows = [["metric", "points", "first", "last", "min", "max", "curve"]]
    for name, series in run.metrics.items():
        values = series.values
        if not len(values):
            continue
        numbers = [values[0], values[-1], values.min(), values.max()]
        curve = sparkline(series.rank(int(series.ranks.min())).values)
        rows.append([name, str(len(values)), *(f"{number:.4g}" for number in numbers), curve])
    table = table_of("metrics", rows, caption="Metrics")
    if len(rows) > svg_curves.MAX_IMAGES + 1:
        return table
    *columns, curve_column = table.columns
    # HTML shows images of the curves instead.
    return replace(table, columns=(*columns, replace(curve_column, text_only=True)))


def attempt_table(run: RunView) -> Table:
    """Return a table of a run's attempts, which is empty if there was only one."""
    rows = [["attempt", "started", "seconds", "outcome"]]
    for attempt in run.attempts if len(run.attempts) > 1 else ():
        started = datetime.fromtimestamp(attempt.started).strftime("%H:%M:%S")
        seconds = f"{(attempt.ended or attempt.started) - attempt.started:.1f}"
        rows.append([str(attempt.number + 1), started, seconds, attempt.outcome])
    return table_of("attempts", rows, caption="Attempts")


def trace_table(store: Store) -> Table:
    """Return a table with the rank, path and size of each profiler trace."""
    rows = [[str(rank), path, size_text(size)] for rank, path, size in store.traces()[:MAX_TRACES]]
    return table_of("traces", [["rank", "trace", "size"], *rows], caption="Profiler traces (Chrome trace format)")


def setup(run: RunView) -> tuple[Table, ...]:
    """Return tables of the function's arguments, the launch, the configuration and the environment of a run."""
    arguments = [[name, str(value)] for name, value in internals(run).journal.state.arguments.items()]
    caption = f"Arguments of {run.function_name}"
    return (
        table_of("arguments", [["argument", "value"], *arguments], caption=caption, pairs=True),
        table_of("launch", launch_rows(run), caption="Launch", pairs=True),
        table_of("configuration", config_rows(run), caption="Configuration", pairs=True),
        table_of("environment", environment_rows(run), caption="Environment", pairs=True),
    )


def launch_rows(run: RunView) -> Rows:
    """Return rows with the launch plan of a run, and the notes about the launch."""
    rows = [["launch", "value"]]
    if (plan := run.plan) is not None:
        is_part = plan.node or plan.world_size != plan.num_processes
        ranks = str(plan.num_processes)
        rows.append(["ranks", f"{ranks} of {plan.world_size}" if is_part else ranks])
        rows.append(["device", plan.where or plan.accelerator])
        rows.append(["start method", f"{plan.start_method}: {plan.reason}" if plan.reason else plan.start_method])
        rows += [["backend", plan.backend]] if plan.backend else []
        rows += [["CPU threads per rank", str(plan.threads)]] if plan.threads is not None else []
    return [*rows, *(["remark", note] for note in run.notes)]


def config_rows(run: RunView) -> Rows:
    """Return rows with the settings of a run, under the labels of the form in lower case.

    Of ``env`` and ``rdzv_conf``, only names are shown, to hide secrets.
    """
    labels = labels_of(type(run.config))
    rows = [["setting", "value"]]
    for name, value in run.config.non_default().items():
        shown = ", ".join(value) if name in ("env", "rdzv_conf") else value_in_words(shown_value(name, value))
        label = labels[name]
        rows.append([label if label[1:2].isupper() else label[:1].lower() + label[1:], shown])
    return rows


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions of packages. They are cached, because reading the metadata takes 6 ms."""
    return {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}


def environment() -> dict[str, str]:
    """Return the versions and the machine of this process, under the names that the report uses."""
    found = {"python": f"{platform.python_version()} on {platform.platform()}", **_versions()}
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch, "version", None) is not None and torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
    return {**found, "processors": str(os.cpu_count())}


def environment_rows(run: RunView) -> Rows:
    """Return rows with the versions and the machine of a run."""
    rows = [["environment", "version"], *map(list, (internals(run).environment or environment()).items())]
    started = datetime.fromtimestamp(run.started).astimezone()
    rows.append(["started", started.strftime("%Y-%m-%d %H:%M:%S %Z")])
    return rows


def errors_html(run: RunView) -> Markup:
    """Return why a run did not succeed, with a link to the documentation of its error, or "" if there is no error."""
    error = run.error
    if error is None:
        return Markup("")
    text = failures_html(run.failures) if run.failures else element("p", str(error))
    if run.status == "stopped":
        return text
    link = element("a", f"What {type(error).__name__} means", href=error.page, target="_blank", rel="noopener")
    return join([text, element("p", link)])


def failures_html(found: Sequence[RankFailure]) -> Markup:
    """Return the failures as HTML, with a fold for each group of ranks that failed alike. The first one is open."""
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
    """Draw a curve with at most 24 characters. Each character shows the mean of a section of the finite values.

    Args:
        values: The points of the curve, float64, shape (n,).
    """
    import numpy as np

    found = np.asarray(values, dtype=float)
    finite = found[np.isfinite(found)] / 64  # Scale values down, so that no sum or difference overflows.
    if not len(finite):
        return ""
    width = min(_SPARK_WIDTH, len(finite))
    cuts = np.round(np.arange(width + 1) * len(finite) / width).astype(int)
    # Divide before summing. Otherwise, the sum of many numbers near the largest float64 would overflow.
    counts = np.diff(cuts)
    means = np.add.reduceat(finite / np.repeat(counts, counts), cuts[:-1])
    low, high = means.min(), means.max()
    # Halve both numbers. Otherwise, the difference of numbers near the largest float64 would overflow.
    scale = (len(_SPARK) - 1) / (high / 2 - low / 2) if high > low else 0.0
    return "".join(_SPARK[round(float((mean / 2 - low / 2) * scale))] for mean in means)
