"""The parts of a run's panel as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.report.node_summary import MANY, by_node, node_name
from notebook_accelerate.launch.report.number_format import byte_size
from notebook_accelerate.launch.report.run_report import config_rows, environment_rows, failures_html
from notebook_accelerate.launch.report.tables import html_table
from notebook_accelerate.telemetry.step_time import PARTS
from notebook_accelerate.widgets import grouped_ranks
from notebook_accelerate.widgets.run_summary import duration

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.widgets.grouped_ranks import TableRow
    from notebook_accelerate.widgets.run_summary import Progress, RankSnapshot, RunSnapshot

MAX_TRACES = 256
"""Profiler traces that are listed."""
SLOWEST_RANKS, SLOWEST_NODES = 8, 8
"""Of many ranks, the number of bars with step times, besides the mean."""
NUMBER = {"class_": "na-num"}


def head(run: Run, now: RunSnapshot, hint: str) -> Markup:
    """Return the run's name, state, time and plan, and how it can be stopped."""
    attempt = f" · attempt {len(run.attempts)}" if len(run.attempts) > 1 else ""
    title = element(
        "div",
        state(now.status),
        element("strong", run.function_name),
        element("span", f"run {run.id}{attempt}", class_="na-muted"),
        element("span", duration(now.elapsed), class_="na-time"),
        class_="na-head",
    )
    lines = [run.plan.sentence()] if run.plan is not None else []
    below = [element("p", line, class_="na-sub") for line in (*lines, *run.notes)]
    return join([title, *below, element("p", hint, class_="na-hint") if hint else Markup()])


def state(status: str) -> Markup:
    """Return a state as a word with a mark of its own shape and colour."""
    return element("span", status.capitalize(), class_=f"na-state na-state-{status}")


def progress(now: RunSnapshot) -> Markup:
    """Return one progress bar for all ranks, and the figures below it."""
    done, bar = now.progress, Markup()
    if done.share is not None:
        percent = 100 * done.share
        left = f", {duration(done.left)} left" if done.left is not None else ""
        bar = element(
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
    figures = _figures(done)
    if now.dropped:
        figures.append(element("span", f"{now.dropped:,} messages dropped"))
    if not figures:
        return Markup()
    return element("div", bar, element("div", *figures, class_="na-figures"), class_="na-progress")


def _figures(done: Progress) -> list[Markup]:
    parts = []
    if done.share is not None:
        parts.append(element("span", element("b", f"{100 * done.share:.0f} %")))
    if done.step is not None:
        total = f" of {done.total:,}" if done.total else ""
        parts.append(element("span", f"{done.label} ", element("b", f"{done.step:,}"), total))
    if done.rate is not None:
        unit = "per second" if done.label != "step" else "steps/s"
        parts.append(element("span", element("b", grouped_ranks.rate(done.rate)), f" {unit}"))
    if done.left is not None:
        parts.append(element("span", element("b", duration(done.left)), " left"))
    return parts


def verdict(now: RunSnapshot) -> Markup:
    """Return the sentence about stragglers."""
    warned = " na-warned" if now.warned else ""
    return element("p", now.verdict, class_=f"na-verdict{warned}") if now.verdict else Markup()


def ranks(now: RunSnapshot, loss: str) -> Markup:
    """Return the table of few ranks, grouped by node if there are several nodes; stragglers are marked."""
    gpu, groups = grouped_ranks.has_gpu(now.ranks), by_node(now.ranks)
    titles = ["rank", "state", *grouped_ranks.head(loss, gpu=gpu)]
    rows = []
    for members in groups.values():
        rows += [grouped_ranks.node_row(members, gpu=gpu, several=True)] if len(groups) > 1 else []
        rows += [grouped_ranks.rank_row(rank, gpu=gpu) for rank in members]
    table = html_table(
        titles,
        [_cells(row) for row in rows],
        caption=element("caption", "Ranks", class_="na-hidden"),
        columns=[{}, {}, *[NUMBER] * (len(titles) - 2)],
        row_classes=["na-node" if _is_node(row) else _CLASSES[row.kind] for row in rows],
        class_="na-table",
    )
    return join([verdict(now), element("div", table, class_="na-scroll")])


_CLASSES = {"late": "na-late", "dead": "na-dead", "": ""}


def _is_node(row: TableRow) -> bool:
    return row.key.startswith("n")


def _cells(row: TableRow) -> list[str]:
    name = join([row.name, badge(row.badge)])
    return [name, row.state if _is_node(row) else state(row.state), *row.cells]


def badge(text: str) -> Markup:
    """Return a mark beside a name; "" for no text."""
    return element("span", text, class_="na-badge") if text else Markup()


def swatch(part: int) -> Markup:
    """Return the colour of a part in a legend."""
    return element("span", class_="na-swatch", style=f"background:var(--na-part-{part})")


def step_times(now: RunSnapshot) -> Markup:
    """Return a stacked bar per rank with the parts of its latest steps."""
    measured = [rank for rank in now.ranks if rank.step_seconds]
    if not measured:
        text = "No step times yet: they are measured for optimizers that accelerator.prepare has returned."
        return element("p", text, class_="na-empty")
    bars = _bars(measured)
    longest = max(bar.seconds for bar in bars)
    legend = [element("li", swatch(index), part) for index, part in enumerate(PARTS)]
    note = (
        "A rank's own work is the time in which it cannot have waited for other ranks: everything but collectives and "
        "backward, where gradients are exchanged."
    )
    return join([
        element("ul", *legend, class_="na-legend"),
        element("div", *(_stack(bar, longest) for bar in bars), class_="na-stacks"),
        element("p", note, class_="na-note"),
    ])  # fmt: skip


def traces(run: Run) -> Markup:
    """Return the list of profiler traces that ranks have written; "" without any."""
    items = [
        element("li", f"rank {rank}: ", element("code", path), f" ({byte_size(count)})")
        for rank, path, count in run.store.traces()[:MAX_TRACES]
    ]
    title = element("p", "Profiler traces (Chrome trace format)", class_="na-sub")
    return join([title, element("ul", *items)]) if items else Markup()


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
    nodes = [_mean_bar(node_name(ranks, several=True), ranks) for ranks in groups.values()] if len(groups) > 1 else []
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
    own = [", ", element("b", f"{1000 * bar.own:,.1f}"), " of its own work"] if bar.own else []
    return join([
        element("span", bar.name, badge("straggler" if bar.late else "")),
        element("div", *pieces, class_="na-stack", role="img", aria_label=f"{bar.name}: {shares}"),
        element("span", f"{1000 * bar.seconds:,.1f} ms per step", *own),
    ])  # fmt: skip


def errors(run: Run) -> Markup:
    """Return the failures, grouped by rank, at their cell lines."""
    if run.failures:
        return failures_html(run.failures)
    return element("p", "No rank has failed." if run.error is None else str(run.error), class_="na-empty")


def setup(run: Run) -> Markup:
    """Return configuration and environment."""
    tables = (("Configuration", config_rows(run)), ("Environment", environment_rows(run)))
    return join([
        html_table((), rows[1:], caption=caption, class_="na-table na-wrap")
        for caption, rows in tables
        if len(rows) > 1
    ])  # fmt: skip
