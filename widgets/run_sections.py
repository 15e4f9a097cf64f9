"""The sections of a run's panel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report import mesh_diagram, rank_tables
from notebook_accelerate.launch.report.document import Drawing, Node, Section, Text
from notebook_accelerate.launch.report.markup import Markup, duration, element, join
from notebook_accelerate.launch.report.rendering import state
from notebook_accelerate.launch.report.run_report import errors_html, trace_table
from notebook_accelerate.launch.report.run_snapshot import HELD
from notebook_accelerate.launch.run import given_name
from notebook_accelerate.launch.state.run_view import internals

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.mesh_diagram import ShardReports
    from notebook_accelerate.launch.report.run_snapshot import Progress, RunSnapshot


def head(run: Run, now: RunSnapshot) -> Drawing:
    """Return the header in one line: state, name and time of the run."""
    attempt = f" · attempt {len(run.attempts)}" if len(run.attempts) > 1 else ""
    given = given_name(run)
    name = f" · {given}" if given else ""
    parts = [
        state(now.status),
        element("strong", run.function_name),
        element("span", f"run {run.id}{name}{attempt}", class_="na-muted"),
        element("span", duration(now.elapsed), class_="na-time"),
        *([element("span", f"{now.dropped:,} messages dropped")] if now.dropped else []),
    ]
    return Drawing(html=element("div", *parts, class_="na-head"))


def progress(now: RunSnapshot) -> Drawing:
    """Return the figures of the progress, and one bar for all ranks if the total is known."""
    figures = _figures(now.progress, moves=now.status not in HELD)
    above = element("div", *figures, class_="na-figures") if figures else Markup()
    return Drawing(html=join([above, _bar(now.progress)]))


def _bar(done: Progress) -> Markup:
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
    """Return rate, epoch, step, share and remaining time, as far as they are known. A held run has no rate."""
    parts: list[tuple[str, str]] = []  # Each text, and the widest text that usually takes its place.
    if done.rate is not None and moves:
        unit = "steps/s" if done.label == "step" else "per second"
        parts.append((f"{rank_tables.rate(done.rate)} {unit}", f"9,999 {unit}"))
    if done.epoch is not None and not done.label.lower().startswith("epoch"):
        parts.append((f"epoch {done.epoch:,}", "epoch 99"))
    if done.step is not None:
        total = f" of {done.total:,}" if done.total else ""
        parts.append((f"{done.label} {done.step:,}{total}", f"{done.label} {done.total or 99_999:,}{total}"))
    if done.share is not None:
        parts.append((f"{100 * done.share:.0f} %", "100 %"))
    if done.left is not None and moves:
        parts.append((_left(done), _left(replace(done, left=600.0))))
    return [
        element("span", element("b", text), class_="na-fact", style=f"min-width:{len(widest)}ch")
        for text, widest in parts
    ]


def _left(done: Progress) -> str:
    return f"{duration(done.left or 0.0)} left{' in this epoch' if done.of_epoch else ''}"


def verdict(now: RunSnapshot) -> Text:
    """Return a sentence about the ranks that the others wait for."""
    return Text(lines=(now.verdict,) if now.verdict else (), tone="warned" if now.warned else "verdict")


def step_times(now: RunSnapshot, run: Run) -> Section:
    """Return a stacked bar per rank with the parts of its latest steps, and the profiler traces that ranks wrote."""
    times = rank_tables.step_times(now.ranks)
    empty = Text(lines=("This run measured no steps.",), tone="empty")
    bars = rank_tables.step_time_bars(times) if times or run.ended is None else empty
    return Section(key="times", nodes=(bars, trace_table(internals(run).store)))


def sharding(reports: ShardReports, *, ended: bool = False) -> Section:
    """Return how the model is sharded across the ranks.

    Args:
        reports: The latest report of each rank.
        ended: Whether the run is over, and no further reports arrive.
    """
    if not reports:
        empty = "This run prepared no model." if ended else _NO_SHARDS
        return Section(key="sharding", nodes=(Text(lines=(empty,), tone="empty"),))
    summary = Text(lines=(mesh_diagram.summary(reports),), tone="verdict")
    return Section(key="sharding", nodes=(summary, *mesh_diagram.sharding(reports, inline=False)))


_NO_SHARDS = (
    "Nothing prepared yet: accelerator.prepare(model, optimizer) shows here the parameters, gradients and optimizer "
    "state of each rank."
)


def errors(run: Run) -> Node:
    """Return the failures with their lines in cells, grouped by rank."""
    found = errors_html(run)
    return Drawing(html=found) if found else Text(lines=("No rank has failed.",), tone="empty")
