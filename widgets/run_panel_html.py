"""The parts of a run's panel as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report import mesh_diagram, rank_rows, rendering, run_report
from notebook_accelerate.launch.report.markup import Markup, duration, element, join
from notebook_accelerate.launch.report.rank_rows import MANY, by_node, node_title
from notebook_accelerate.launch.report.rendering import badge, state, swatch
from notebook_accelerate.launch.report.run_report import errors_html, trace_table
from notebook_accelerate.telemetry.step_time import PARTS
from notebook_accelerate.widgets import rank_table
from notebook_accelerate.widgets.run_summary import HELD

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.mesh_diagram import ShardReports
    from notebook_accelerate.widgets.run_summary import Progress, RankSnapshot, RunSnapshot


SLOWEST_RANKS, SLOWEST_NODES = 8, 8
"""Of many ranks, the number of bars with step times, besides the mean."""
NUMBER = {"class_": "na-num"}


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
        parts.append(element("b", f"{rank_table.rate(done.rate)} {unit}"))
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
    caption = "Devices: allocated, reserved and peak count the rank's own memory; use and in use count all processes"
    table = rank_rows.device_table(now.ranks, {rank.rank: rank.devices for rank in now.ranks}, caption)
    return rendering.html(table, inline=False)


def step_times(now: RunSnapshot) -> Markup:
    """Return a stacked bar per rank with the parts of its latest steps."""
    measured = [rank for rank in now.ranks if rank.step_seconds]
    if not measured:
        text = "No step times yet: the steps of prepared optimizers are timed."
        return element("p", text, class_="na-empty")
    bars = _bars(measured)
    longest = max(bar.seconds for bar in bars)
    legend = [element("li", swatch(index), part) for index, part in enumerate(PARTS)]
    note = "Own work leaves out collectives and backward, where a rank may wait for other ranks."
    return join([
        element("ul", *legend, class_="na-legend"),
        element("div", *(_stack(bar, longest) for bar in bars), class_="na-stacks"),
        element("p", note, class_="na-note"),
    ])  # fmt: skip


def traces(run: Run) -> Markup:
    """Return the list of profiler traces that ranks have written; "" without any."""
    return rendering.html(trace_table(run.store), inline=False)


@dataclass(frozen=True)
class _Bar:
    """The parts of a rank's step time as shares, or the mean of several ranks."""

    name: str
    parts: Mapping[str, float]
    seconds: float
    own: float
    late: bool = False


def _bars(measured: Sequence[RankSnapshot]) -> list[_Bar]:
    """Return a bar per rank; of many ranks their mean, the slowest ranks and the means of the slowest nodes."""
    if len(measured) <= MANY:
        return [_rank_bar(rank) for rank in measured]
    groups = by_node(measured)
    nodes = [_mean_bar(node_title(ranks, several=True), ranks) for ranks in groups.values()] if len(groups) > 1 else []
    slowest = sorted(measured, key=lambda rank: -(rank.own_seconds or 0.0))[:SLOWEST_RANKS]
    nodes = sorted(nodes, key=lambda bar: -bar.own)[:SLOWEST_NODES]
    return [_mean_bar(f"mean of {len(measured):,} ranks", measured), *map(_rank_bar, slowest), *nodes]


def _rank_bar(rank: RankSnapshot) -> _Bar:
    return _mean_bar(f"rank {rank.rank}", [rank], late=rank.late)


def _mean_bar(name: str, ranks: Sequence[RankSnapshot], *, late: bool = False) -> _Bar:
    total = sum(sum(rank.parts.values()) for rank in ranks) or 1.0
    shares = {part: sum(rank.parts.get(part, 0.0) for rank in ranks) / total for part in PARTS}
    seconds, own = ([getattr(rank, field) or 0.0 for rank in ranks] for field in ("step_seconds", "own_seconds"))
    return _Bar(name, shares, sum(seconds) / len(ranks), sum(own) / len(ranks), late)


def _stack(bar: _Bar, longest: float) -> Markup:
    pieces = []
    for index, part in enumerate(PARTS):
        width = 100 * bar.parts[part] * bar.seconds / longest
        label = f"{100 * bar.parts[part]:.0f} %" if width > 7 else ""
        title = f"{part}: {1000 * bar.parts[part] * bar.seconds:.1f} ms"
        style = f"width:{width:.2f}%;background:var(--na-part-{index})"
        pieces.append(element("span", label, style=style, title=title))
    shares = ", ".join(f"{part} {100 * bar.parts[part]:.0f} %" for part in PARTS)
    own = [" · ", element("b", f"{1000 * bar.own:,.1f} ms"), " own work"] if bar.own else []
    return join([
        element("span", bar.name, badge("straggler" if bar.late else "")),
        element("div", *pieces, class_="na-stack", role="img", aria_label=f"{bar.name}: {shares}"),
        element("span", f"{1000 * bar.seconds:,.1f} ms/step", *own),
    ])  # fmt: skip


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
