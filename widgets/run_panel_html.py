"""The parts of a run's panel as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate.launch.report import mesh_diagram, rank_tables, rendering, run_report
from notebook_accelerate.launch.report.document import Section
from notebook_accelerate.launch.report.markup import Markup, duration, element, join
from notebook_accelerate.launch.report.rendering import state
from notebook_accelerate.launch.report.run_report import errors_html, trace_table
from notebook_accelerate.launch.report.run_snapshot import HELD

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.mesh_diagram import ShardReports
    from notebook_accelerate.launch.report.run_snapshot import Progress, RunSnapshot


def head(run: Run, now: RunSnapshot) -> Markup:
    """Return the header in one line: state, name, time, and how far the run is."""
    attempt = f" · attempt {len(run.attempts)}" if len(run.attempts) > 1 else ""
    name = f" · {run.given_name}" if run.given_name else ""
    return element(
        "div",
        state(now.status),
        element("strong", run.function_name),
        element("span", f"run {run.id}{name}{attempt}", class_="na-muted"),
        element("span", duration(now.elapsed), class_="na-time"),
        *_figures(now.progress, moves=now.status not in HELD),
        *([element("span", f"{now.dropped:,} messages dropped")] if now.dropped else []),
        class_="na-head",
    )


def bar(now: RunSnapshot) -> Markup:
    """Return one progress bar for all ranks; "" without a total."""
    done = now.progress
    if done.share is None:
        return Markup()
    percent = 100 * done.share
    left = f", {_left(done)}" if done.left is not None else ""
    return element(
        "div",
        element("div", class_="na-fill", style=f"width:{percent:.2f}%"),
        class_="na-track",
        role="progressbar",
        aria_label="Progress of all ranks",
        aria_valuemin=0,
        aria_valuemax=100,
        aria_valuenow=f"{percent:.0f}",
        aria_valuetext=f"{done.label} {done.step} of {done.total}{left}",
    )


def _figures(done: Progress, *, moves: bool) -> list[Markup]:
    """Return rate, epoch, step, share and time left, as far as they are known; of a run that is held no rate."""
    parts = []
    if done.rate is not None and moves:
        unit = "steps/s" if done.label == "step" else "per second"
        parts.append(element("b", f"{rank_tables.rate(done.rate)} {unit}"))
    if done.epoch is not None and not done.label.lower().startswith("epoch"):
        parts.append(element("b", f"epoch {done.epoch:,}"))
    if done.step is not None:
        total = f" of {done.total:,}" if done.total else ""
        parts.append(element("b", f"{done.label} {done.step:,}{total}"))
    if done.share is not None:
        parts.append(element("b", f"{100 * done.share:.0f} %"))
    if done.left is not None and moves:
        parts.append(element("b", _left(done)))
    return [element("span", part, class_="na-fact") for part in parts]


def _left(done: Progress) -> str:
    return f"{duration(done.left or 0.0)} left{' in this epoch' if done.of_epoch else ''}"


def verdict(now: RunSnapshot) -> Markup:
    """Return the sentence about stragglers."""
    warned = " na-warned" if now.warned else ""
    return element("p", now.verdict, class_=f"na-verdict{warned}") if now.verdict else Markup()


def devices(now: RunSnapshot) -> Markup:
    """Return the table of the ranks' devices; "" before a rank has used one."""
    return rendering.html(rank_tables.device_table(now.ranks), inline=False)


def step_times(now: RunSnapshot, run: Run) -> Markup:
    """Return a stacked bar per rank with the parts of its latest steps, and the profiler traces that ranks wrote."""
    bars = rank_tables.step_time_bars(rank_tables.step_times(now.ranks))
    return rendering.html(Section(key="times", nodes=(bars, trace_table(run.store))), inline=False)


def errors(run: Run) -> Markup:
    """Return the failures, grouped by rank, at their cell lines."""
    return errors_html(run) or element("p", "No rank has failed.", class_="na-empty")


def setup(run: Run) -> Markup:
    """Return how the run was launched, its configuration and its environment."""
    return join([rendering.html(table, inline=False) for table in run_report.setup(run)])


# ---- the sharding page

_NO_SHARDS = (
    "Nothing prepared yet: accelerator.prepare(model, optimizer) shows here the parameters, gradients and optimizer "
    "state of each rank."
)
_SHARDS_NOTE = (
    "A bar stands for the whole model, its filled part for what the rank holds between steps. Gradients exist from "
    "backward to step, optimizer state from the first step on."
)


class ShardingPage:
    """The page as HTML, made again only when a rank has sent a new report.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._shown: ShardReports = {}
        self._html = sharding_page({})

    def html(self) -> Markup:
        """Return the page."""
        latest = mesh_diagram.latest_reports(self.run)
        if latest != self._shown:
            self._shown, self._html = latest, sharding_page(latest)
        return self._html


def sharding_page(reports: ShardReports) -> Markup:
    """Return summary, drawing and table.

    Args:
        reports: By rank.
    """
    if not reports:
        return element("p", _NO_SHARDS, class_="na-empty")
    return join([
        element("p", mesh_diagram.summary(reports), class_="na-verdict"),
        element("div", mesh_diagram.svg(reports), class_="na-scroll na-mesh"),
        element("p", _SHARDS_NOTE, class_="na-note"),
        rendering.html(mesh_diagram.sharding_table(reports), inline=False),
    ])  # fmt: skip
