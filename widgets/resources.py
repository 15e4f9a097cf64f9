"""The resource strip: processor, memory and accelerator of every rank, on machines with and without GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.widgets.live import LivePanel
from notebook_accelerate.widgets.styles import style_sheet
from notebook_accelerate.widgets.watching import Watcher, size

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.widgets.watching import Now, RankNow

MAX_SHOWN = 64
MAX_CARDS = 8
"""More ranks than this stand in a dense table of two figures each."""


class ResourceStrip(LivePanel):
    """What each rank uses: percent of one core, memory (PSS, so that ranks add up), and its GPU where there is one.

    Args:
        run: The run to watch.
        clock: Seconds since the epoch; a fake one in tests.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.time) -> None:
        self._watcher = Watcher(run)
        super().__init__(run, clock)

    def _build(self) -> Any:
        self._content = ipywidgets.HTML()
        box = ipywidgets.VBox([ipywidgets.HTML(style_sheet()), self._content])
        box.add_class("na-run")
        return box

    def _render(self, now: float) -> None:
        self._content.value = strip(self._watcher.look(now), self._watcher)

    def _say(self, text: str) -> None:
        self._content.value = f'<p class="na-problem">{escape(text)}</p>'

    @property
    def html(self) -> str:
        """The strip as a table."""
        rows = self._rows()
        head = "".join(f'<th scope="col">{cell}</th>' for cell in rows[0])
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
        return f"<table><caption>Resources</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    @property
    def text(self) -> str:
        """The strip as lines, one per rank."""
        return "\n".join("  ".join(cell.ljust(10) for cell in row).rstrip() for row in self._rows())

    def _rows(self) -> list[list[str]]:
        rows = [["rank", "CPU", "memory", "peak", "GPU", "GPU memory"]]
        for rank in self._watcher.look(self._clock()).ranks:
            peak = size(self.run.store.peak_memory.get(rank.rank))
            rows.append([
                str(rank.rank), _percent(rank.cpu), size(rank.memory), peak, _percent(rank.gpu), size(rank.gpu_memory),
            ])  # fmt: skip
        return rows


def strip(now: Now, watcher: Watcher) -> str:
    """Return one small card per rank; of many ranks, what matters most of each."""
    if len(now.ranks) > MAX_CARDS:
        return _dense(now.ranks)
    cards = "".join(_card(rank, list(watcher.processor.get(rank.rank, ()))) for rank in now.ranks[:MAX_SHOWN])
    return f'<ul class="na-strip" aria-label="Resources by rank">{cards}</ul>' if cards else ""


def _dense(ranks: Sequence[RankNow]) -> str:
    gpu = any(rank.gpu is not None or rank.gpu_memory is not None for rank in ranks)
    title = "GPU use and GPU memory by rank" if gpu else "Processor use and memory by rank"
    cells = "".join(_cell(rank, gpu=gpu) for rank in ranks[:MAX_SHOWN])
    more = f" (the first {MAX_SHOWN} of {len(ranks):,})" if len(ranks) > MAX_SHOWN else ""
    return f'<p class="na-strip-title">{title}{more}</p><ul class="na-strip na-dense" aria-label="{title}">{cells}</ul>'


def _cell(rank: RankNow, *, gpu: bool) -> str:
    used, memory = (rank.gpu, rank.gpu_memory) if gpu else (rank.cpu, rank.memory)
    words = f"rank {rank.rank}: " + ", ".join(f"{name} {value}" for name, value in _entries(rank))
    meter = f'<span class="na-meter"><i style="width:{min(100.0, max(0.0, used or 0.0)):.0f}%"></i></span>'
    figures = f"<b>{_percent(used)}</b><span>{size(memory)}</span>"
    return f'<li title="{words}"><span class="na-who">{rank.rank}</span>{meter}{figures}</li>'


def _entries(rank: RankNow) -> list[tuple[str, str]]:
    entries = [("CPU", _percent(rank.cpu)), ("memory", size(rank.memory))]
    if rank.gpu is not None or rank.gpu_memory is not None:
        entries += [("GPU", _percent(rank.gpu)), ("GPU memory", size(rank.gpu_memory))]
    return entries


def _card(rank: RankNow, history: Sequence[float]) -> str:
    pairs = "".join(f"<span>{name} <b>{value}</b></span>" for name, value in _entries(rank))
    used = f'<div class="na-used">{pairs}</div>'
    return f'<li><div class="na-who"><span>rank {rank.rank}</span>{_curve(history)}</div>{used}</li>'


def _curve(history: Sequence[float]) -> str:
    """Draw the last minute of processor use; the numbers beside it say the same to those who do not see it."""
    if len(history) < 2:
        return ""
    top = max(100.0, *history)
    last = len(history) - 1
    points = " ".join(f"{64 * i / last:.1f},{15 - 14 * value / top:.1f}" for i, value in enumerate(history))
    return (
        '<svg viewBox="0 0 64 16" aria-hidden="true"><polyline fill="none" stroke="currentColor" stroke-width="1.3" '
        f'points="{points}"/></svg>'
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


__all__ = ["ResourceStrip", "strip"]
