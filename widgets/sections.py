"""The parts of a run's panel as HTML; every word that came from elsewhere is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from notebook_accelerate.launch import curves
from notebook_accelerate.launch.report import Report, environment_rows, failures_html, file_size
from notebook_accelerate.telemetry.steptime import PARTS
from notebook_accelerate.widgets.watching import duration, size

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.widgets.watching import Now, Progress, RankNow

MAX_ROWS = 256
"""Ranks that a table shows; of more, the first ones and those that stand out."""


def head(run: Run, now: Now, hint: str) -> str:
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


def progress(now: Now) -> str:
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
        parts.append(f"<span><b>{_rate(done.rate)}</b> {'per second' if done.label != 'step' else 'steps/s'}</span>")
    if done.left is not None:
        parts.append(f"<span><b>{duration(done.left)}</b> left</span>")
    return parts


def _figures_text(done: Progress) -> str:
    left = f", {duration(done.left)} left" if done.left is not None else ""
    return f"{done.label} {done.step} of {done.total}{left}"


def _rate(rate: float | None) -> str:
    if rate is None:
        return "–"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2f}"


def ranks(now: Now, loss: str) -> str:
    """Return the table of ranks; a straggler stands out by colour, badge and sentence."""
    gpu = any(rank.gpu is not None or rank.gpu_memory is not None for rank in now.ranks)
    columns = ["step", "behind", "steps/s", loss or "loss", "CPU", "memory", *(["GPU", "GPU memory"] if gpu else [])]
    titles = "".join(f'<th scope="col" class="na-num">{escape(title)}</th>' for title in columns)
    shown = now.ranks[:MAX_ROWS] + [rank for rank in now.ranks[MAX_ROWS:] if rank.late or rank.state == "failed"]
    rows = "".join(_rank_row(rank, gpu=gpu) for rank in shown)
    more = len(now.ranks) - len(shown)
    left_out = f'<p class="na-muted">{more:,} more ranks like these.</p>' if more else ""
    warned = " na-warned" if now.warned else ""
    verdict = f'<p class="na-verdict{warned}">{escape(now.verdict)}</p>' if now.verdict else ""
    return (
        f'{verdict}<div class="na-scroll"><table class="na-table"><caption class="na-hidden">Ranks</caption><thead><tr>'
        f'<th scope="col">rank</th><th scope="col">state</th>{titles}<th scope="col" class="na-num">last heard</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>{left_out}"
    )


def _rank_row(rank: RankNow, *, gpu: bool) -> str:
    badge = '<span class="na-badge">straggler</span>' if rank.late else ""
    kind = "na-dead" if rank.state == "failed" else "na-late" if rank.late else ""
    numbers = [
        "–" if rank.step is None else f"{rank.step:,}",
        f"{rank.behind:,}" if rank.behind else "0" if rank.step is not None else "–",
        _rate(rank.rate),
        "–" if rank.loss is None else curves.number(rank.loss),
        "–" if rank.cpu is None else f"{rank.cpu:.0f} %",
        size(rank.memory),
    ]
    if gpu:
        numbers += ["–" if rank.gpu is None else f"{rank.gpu:.0f} %", size(rank.gpu_memory)]
    numbers.append(rank.exit or ("–" if rank.silence is None else f"{rank.silence:.0f} s ago"))
    cells = "".join(f'<td class="na-num">{escape(text)}</td>' for text in numbers)
    return f'<tr class="{kind}"><th scope="row">{rank.rank}{badge}</th><td>{state(rank.state)}</td>{cells}</tr>'


def step_times(now: Now) -> str:
    """Return a stacked bar per rank: where the time of its latest steps went."""
    measured = [rank for rank in now.ranks if rank.step_seconds]
    if not measured:
        return (
            '<p class="na-empty">Nothing measured yet: an optimizer that went through accelerator.prepare tells where '
            "the time of each step goes.</p>"
        )
    longest = max(rank.step_seconds or 0.0 for rank in measured)
    legend = "".join(
        f'<li><span class="na-swatch" style="background:var(--na-part-{index})"></span>{part}</li>'
        for index, part in enumerate(PARTS)
    )
    bars = "".join(_stack(rank, longest) for rank in measured[:MAX_ROWS])
    note = (
        '<p class="na-note">A rank&#39;s own time is what it cannot have spent waiting for others: all but backward, '
        "where gradients are exchanged, and collectives.</p>"
    )
    return f'<ul class="na-legend">{legend}</ul><div class="na-stacks">{bars}</div>{note}'


def traces(run: Run) -> str:
    """Return the profilers' traces that ranks have written, as a list; "" where there is none."""
    items = "".join(
        f"<li>rank {rank}: <code>{escape(path)}</code> ({file_size(count)})</li>"
        for rank, path, count in run.store.traces()[:MAX_ROWS]
    )
    return f'<p class="na-sub">Profiler traces, for a viewer of Chrome traces</p><ul>{items}</ul>' if items else ""


def _stack(rank: RankNow, longest: float) -> str:
    seconds = rank.step_seconds or 0.0
    total = sum(rank.parts.values()) or 1.0
    pieces, words = [], []
    for index, part in enumerate(PARTS):
        share = rank.parts.get(part, 0.0) / total
        words.append(f"{part} {100 * share:.0f} %")
        label = f"{100 * share:.0f} %" if share * seconds / longest > 0.07 else ""
        width = 100 * share * seconds / longest
        title = f"{part}: {1000 * share * seconds:.1f} ms"
        pieces.append(
            f'<span style="width:{width:.2f}%;background:var(--na-part-{index})" title="{title}">{label}</span>'
        )
    badge = '<span class="na-badge">straggler</span>' if rank.late else ""
    own = f", <b>{1000 * rank.own_seconds:,.1f}</b> of its own" if rank.own_seconds else ""
    return (
        f"<span>rank {rank.rank}{badge}</span>"
        f'<div class="na-stack" role="img" aria-label="rank {rank.rank}: {", ".join(words)}">{"".join(pieces)}</div>'
        f"<span>{1000 * seconds:,.1f} ms per step{own}</span>"
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


__all__ = ["errors", "head", "progress", "ranks", "setup", "state", "step_times", "table"]
