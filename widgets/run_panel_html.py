"""The parts of a run's panel as HTML; every word that came from elsewhere is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.node_summary import MANY, by_node, node_name
from notebook_accelerate.launch.report.run_report import Report, environment_rows, failures_html, file_size
from notebook_accelerate.telemetry.step_time import PARTS
from notebook_accelerate.widgets import grouped_ranks
from notebook_accelerate.widgets.run_summary import duration

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.widgets.grouped_ranks import Row
    from notebook_accelerate.widgets.run_summary import Progress, RankNow, RunSnapshot

MAX_TRACES = 256
"""Profiler traces that are listed."""
SLOWEST_RANKS, SLOWEST_NODES = 8, 8
"""Of many ranks, so many bars show where time goes, besides the mean."""


def head(run: Run, now: RunSnapshot, hint: str) -> str:
    """Return name, state, time, plan and how the run can be stopped."""
    plan = f'<p class="na-sub">{escape(run.plan.sentence())}</p>' if run.plan is not None else ""
    tried = f" · attempt {len(run.attempts)}" if len(run.attempts) > 1 else ""
    notes = "".join(f'<p class="na-sub">{escape(note)}</p>' for note in run.notes)
    said = f'<p class="na-hint">{escape(hint)}</p>' if hint else ""
    return (
        f'<div class="na-head">{state(now.status)}<strong>{escape(run.function_name)}</strong>'
        f'<span class="na-muted">run {run.id}{tried}</span><span class="na-time">{duration(now.elapsed)}</span></div>'
        f"{plan}{notes}{said}"
    )


def state(status: str) -> str:
    """Return a state as a word with a mark of its own form and colour."""
    return f'<span class="na-state na-state-{escape(status)}">{escape(status.capitalize())}</span>'


def progress(now: RunSnapshot) -> str:
    """Return one bar for all ranks, and the figures below it."""
    done = now.progress
    bar = ""
    if done.share is not None:
        percent = 100 * done.share
        text = _figures_text(done)
        bar = (
            f'<div class="na-track" role="progressbar" aria-label="Progress of all ranks" aria-valuemin="0" '
            f'aria-valuemax="100" aria-valuenow="{percent:.0f}" aria-valuetext="{escape(text)}">'
            f'<div class="na-fill" style="width:{percent:.2f}%"></div></div>'
        )
    figures = _figures(done)
    if now.dropped:
        figures.append(f"<span>{now.dropped:,} messages dropped</span>")
    return f'<div class="na-progress">{bar}<div class="na-figures">{"".join(figures)}</div></div>' if figures else ""


def _figures(done: Progress) -> list[str]:
    parts = []
    if done.share is not None:
        parts.append(f"<span><b>{100 * done.share:.0f} %</b></span>")
    if done.step is not None:
        of = f" of {done.total:,}" if done.total else ""
        parts.append(f"<span>{escape(done.label)} <b>{done.step:,}</b>{of}</span>")
    if done.rate is not None:
        unit = "per second" if done.label != "step" else "steps/s"
        parts.append(f"<span><b>{grouped_ranks.rate(done.rate)}</b> {unit}</span>")
    if done.left is not None:
        parts.append(f"<span><b>{duration(done.left)}</b> left</span>")
    return parts


def _figures_text(done: Progress) -> str:
    left = f", {duration(done.left)} left" if done.left is not None else ""
    return f"{done.label} {done.step} of {done.total}{left}"


def verdict(now: RunSnapshot) -> str:
    """Return who keeps the others waiting, as a sentence."""
    warned = " na-warned" if now.warned else ""
    return f'<p class="na-verdict{warned}">{escape(now.verdict)}</p>' if now.verdict else ""


def ranks(now: RunSnapshot, loss: str) -> str:
    """Return the table of few ranks, under their nodes where there are several; a straggler stands out."""
    gpu, groups = grouped_ranks.has_gpu(now.ranks), by_node(now.ranks)
    titles = "".join(
        f'<th scope="col" class="na-num">{escape(title)}</th>' for title in grouped_ranks.head(loss, gpu=gpu)
    )
    rows = []
    for members in groups.values():
        rows += [_row(grouped_ranks.node_row(members, gpu=gpu, several=True))] if len(groups) > 1 else []
        rows += [_row(grouped_ranks.rank_row(rank, gpu=gpu)) for rank in members]
    return (
        f'{verdict(now)}<div class="na-scroll"><table class="na-table"><caption class="na-hidden">Ranks</caption>'
        f'<thead><tr><th scope="col">rank</th><th scope="col">state</th>{titles}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


_KINDS = {"late": "na-late", "dead": "na-dead", "": ""}


def _row(row: Row) -> str:
    node = row.key.startswith("n")
    badge = f'<span class="na-badge">{escape(row.badge)}</span>' if row.badge else ""
    kind = "na-node" if node else _KINDS[row.kind]
    cells = "".join(f'<td class="na-num">{escape(text)}</td>' for text in row.cells)
    said = escape(row.state) if node else state(row.state)
    return f'<tr class="{kind}"><th scope="row">{escape(row.name)}{badge}</th><td>{said}</td>{cells}</tr>'


def step_times(now: RunSnapshot) -> str:
    """Return a stacked bar per rank: where the time of its latest steps went."""
    measured = [rank for rank in now.ranks if rank.step_seconds]
    if not measured:
        return (
            '<p class="na-empty">Nothing measured yet: an optimizer that went through accelerator.prepare tells where '
            "the time of each step goes.</p>"
        )
    bars = _bars(measured)
    longest = max(bar.seconds for bar in bars)
    legend = "".join(
        f'<li><span class="na-swatch" style="background:var(--na-part-{index})"></span>{part}</li>'
        for index, part in enumerate(PARTS)
    )
    drawn = "".join(_stack(bar, longest) for bar in bars)
    note = (
        '<p class="na-note">A rank&#39;s own time is what it cannot have spent waiting for others: all but backward, '
        "where gradients are exchanged, and collectives.</p>"
    )
    return f'<ul class="na-legend">{legend}</ul><div class="na-stacks">{drawn}</div>{note}'


def traces(run: Run) -> str:
    """Return the profilers' traces that ranks have written, as a list; "" where there is none."""
    items = "".join(
        f"<li>rank {rank}: <code>{escape(path)}</code> ({file_size(count)})</li>"
        for rank, path, count in run.store.traces()[:MAX_TRACES]
    )
    return f'<p class="na-sub">Profiler traces, for a viewer of Chrome traces</p><ul>{items}</ul>' if items else ""


@dataclass(frozen=True)
class _Bar:
    """Where the time of a rank's step goes, or the mean of several ranks'."""

    name: str
    parts: Mapping[str, float]
    seconds: float
    own: float
    late: bool = False


def _bars(measured: Sequence[RankNow]) -> list[_Bar]:
    """Return a bar per rank; of many ranks those that work longest, and the means of the nodes that do."""
    if len(measured) <= MANY:
        return [_bar(rank) for rank in measured]
    groups = by_node(measured)
    means = [_mean_bar(node_name(ranks, several=True), ranks) for ranks in groups.values()] if len(groups) > 1 else []
    slowest = sorted(measured, key=lambda rank: -(rank.own_seconds or 0.0))[:SLOWEST_RANKS]
    nodes = sorted(means, key=lambda bar: -bar.own)[:SLOWEST_NODES]
    return [_mean_bar(f"mean of {len(measured):,} ranks", measured), *[_bar(rank) for rank in slowest], *nodes]


def _bar(rank: RankNow) -> _Bar:
    total = sum(rank.parts.values()) or 1.0
    shares = {part: rank.parts.get(part, 0.0) / total for part in PARTS}
    return _Bar(f"rank {rank.rank}", shares, rank.step_seconds or 0.0, rank.own_seconds or 0.0, rank.late)


def _mean_bar(name: str, ranks: Sequence[RankNow]) -> _Bar:
    total = sum(sum(rank.parts.values()) for rank in ranks) or 1.0
    shares = {part: sum(rank.parts.get(part, 0.0) for rank in ranks) / total for part in PARTS}
    seconds, own = ([getattr(rank, field) or 0.0 for rank in ranks] for field in ("step_seconds", "own_seconds"))
    return _Bar(name, shares, sum(seconds) / len(ranks), sum(own) / len(ranks))


def _stack(bar: _Bar, longest: float) -> str:
    pieces, words = [], []
    for index, part in enumerate(PARTS):
        share = bar.parts[part]
        words.append(f"{part} {100 * share:.0f} %")
        label = f"{100 * share:.0f} %" if share * bar.seconds / longest > 0.07 else ""
        width = 100 * share * bar.seconds / longest
        title = f"{part}: {1000 * share * bar.seconds:.1f} ms"
        pieces.append(
            f'<span style="width:{width:.2f}%;background:var(--na-part-{index})" title="{title}">{label}</span>'
        )
    badge = '<span class="na-badge">straggler</span>' if bar.late else ""
    own = f", <b>{1000 * bar.own:,.1f}</b> of its own" if bar.own else ""
    name = escape(bar.name)
    return (
        f"<span>{name}{badge}</span>"
        f'<div class="na-stack" role="img" aria-label="{name}: {", ".join(words)}">{"".join(pieces)}</div>'
        f"<span>{1000 * bar.seconds:,.1f} ms per step{own}</span>"
    )


def errors(run: Run) -> str:
    """Return what went wrong, in groups of ranks, at cell lines."""
    if run.failures:
        return failures_html(run.failures)
    if run.error is not None:
        return f'<p class="na-empty">{escape(str(run.error))}</p>'
    return '<p class="na-empty">No rank has failed.</p>'


def setup(run: Run) -> str:
    """Return configuration and environment."""
    tables = (("Configuration", Report(run)._config_rows()), ("Environment", environment_rows(run)))
    return "".join(table(caption, rows) for caption, rows in tables if len(rows) > 1)


def table(caption: str, rows: list[list[str]]) -> str:
    """Return rows as a table whose first column names them; the first row is not shown."""
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[1:]
    )
    return f'<table class="na-table na-wrap"><caption>{escape(caption)}</caption><tbody>{body}</tbody></table>'


__all__ = ["errors", "head", "progress", "ranks", "setup", "state", "step_times", "table", "traces", "verdict"]
