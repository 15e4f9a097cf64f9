"""The resource strip: processor, memory and accelerator of every rank, on machines with and without GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.launch.report.node_summary import MANY, by_node
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets.grouped_ranks import has_gpu, head, node_row, percent
from notebook_accelerate.widgets.live_panel import LivePanel
from notebook_accelerate.widgets.run_summary import RunWatcher, size
from notebook_accelerate.widgets.styles import style_sheet

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.widgets.run_summary import RankNow, RunSnapshot

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
        self._watcher = RunWatcher(run)
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
                str(rank.rank), percent(rank.cpu), size(rank.memory), peak, percent(rank.gpu), size(rank.gpu_memory),
            ])  # fmt: skip
        return rows


def strip(now: RunSnapshot, watcher: RunWatcher) -> str:
    """Return one small card per rank; of many ranks, what matters most of each, or of each node."""
    if len(now.ranks) > MANY and len({rank.node for rank in now.ranks}) > 1:
        return _by_node(now.ranks)
    if len(now.ranks) > MAX_CARDS:
        return _dense(now.ranks)
    cards = "".join(_card(rank, list(watcher.processor.get(rank.rank, ()))) for rank in now.ranks[:MAX_SHOWN])
    return f'<ul class="na-strip" aria-label="Resources by rank">{cards}</ul>' if cards else ""


def _dense(ranks: Sequence[RankNow]) -> str:
    gpu = has_gpu(ranks)
    title = "GPU use and GPU memory by rank" if gpu else "Processor use and memory by rank"
    cells = "".join(_cell(rank, gpu=gpu) for rank in ranks[:MAX_SHOWN])
    more = f" (the first {MAX_SHOWN} of {len(ranks):,})" if len(ranks) > MAX_SHOWN else ""
    return f'<p class="na-strip-title">{title}{more}</p><ul class="na-strip na-dense" aria-label="{title}">{cells}</ul>'


def _by_node(ranks: Sequence[RankNow]) -> str:
    """Draw each node as a dense strip draws a rank: its mean use, and what its ranks hold together."""
    gpu, groups = has_gpu(ranks), by_node(ranks)
    tiny, cells = len(groups) > MANY, []
    for node, members in list(groups.items())[:MAX_SHOWN]:
        row = node_row(members, gpu=gpu, several=True)
        figures = dict(zip(head("loss", gpu=gpu), row.cells, strict=True))
        used, memory = (figures["GPU"], figures["GPU memory"]) if gpu else (figures["CPU"], figures["memory"])
        words = f"{row.name}, {rank_names([rank.rank for rank in members])}: CPU {figures['CPU']}, {figures['memory']}"
        words += f", GPU {used}, GPU memory {memory}" if gpu else ""
        cells.append(_meter(str(node), escape(words), used, "" if tiny else memory))
    whole = sum((rank.gpu_memory if gpu else rank.memory) or 0 for rank in ranks)
    title = f"{'GPU' if gpu else 'Processor'} use by node, mean of its ranks"
    title += f" · {size(whole)} of {'GPU ' if gpu else ''}memory in all" if tiny else f"; {'GPU ' if gpu else ''}memory"
    title += f" (the first {MAX_SHOWN} of {len(groups):,} nodes)" if len(groups) > MAX_SHOWN else ""
    kind = "na-strip na-dense na-tiny" if tiny else "na-strip na-dense"
    return f'<p class="na-strip-title">{title}</p><ul class="{kind}" aria-label="{title}">{"".join(cells)}</ul>'


def _cell(rank: RankNow, *, gpu: bool) -> str:
    used, memory = (rank.gpu, rank.gpu_memory) if gpu else (rank.cpu, rank.memory)
    words = f"rank {rank.rank}: " + ", ".join(f"{name} {value}" for name, value in _entries(rank))
    return _meter(str(rank.rank), words, percent(used), size(memory))


def _meter(name: str, words: str, used: str, memory: str) -> str:
    share = min(100.0, max(0.0, float(used.split(maxsplit=1)[0]))) if used[0].isdigit() else 0.0
    meter = f'<span class="na-meter"><i style="width:{share:.0f}%"></i></span>'
    held = f"<span>{memory}</span>" if memory else ""
    return f'<li title="{words}"><span class="na-who">{name}</span>{meter}<b>{used}</b>{held}</li>'


def _entries(rank: RankNow) -> list[tuple[str, str]]:
    entries = [("CPU", percent(rank.cpu)), ("memory", size(rank.memory))]
    if rank.gpu is not None or rank.gpu_memory is not None:
        entries += [("GPU", percent(rank.gpu)), ("GPU memory", size(rank.gpu_memory))]
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


__all__ = ["ResourceStrip", "strip"]
