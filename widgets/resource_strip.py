"""The resource strip: CPU, memory and accelerator of every rank, on machines with and without GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.launch.report.document import Drawing, Section
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.report.rank_rows import MANY, by_node, node_title
from notebook_accelerate.launch.report.rank_tables import COLUMNS, has_gpu, rank_table
from notebook_accelerate.launch.report.run_snapshot import RunWatcher
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets.live_panel import LivePanel
from notebook_accelerate.widgets.panel_elements import PANEL_STYLES, style_widget, with_classes

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.run_snapshot import RankSnapshot, RunSnapshot

MAX_SHOWN = 64
MAX_CARDS = 8
"""The maximum number of ranks with a card each. If there are more, each rank is shown with two figures."""


class ResourceStrip(LivePanel):
    """The resources that each rank uses: percent of one core, memory, and its GPU if any.

    Memory is measured as PSS, so that the ranks' values can be added.

    Args:
        run: The run to watch.
        clock: Returns the time in seconds since the epoch. Tests pass a fake clock.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = steady_time.now) -> None:
        self._watcher = RunWatcher(run)
        super().__init__(run, clock)

    def _build(self) -> Any:
        self._content = self._problem = ipywidgets.HTML()
        return with_classes(ipywidgets.VBox([style_widget(*PANEL_STYLES), self._content]), "na-run")

    def _render(self, now: float) -> None:
        self._content.value = strip(self._watcher.snapshot(now), self._watcher).html

    def document(self) -> Section:
        """Return the strip as a table."""
        ranks = self._watcher.snapshot(self._clock()).ranks
        table = rank_table(ranks, ("cpu", "memory", "peak", "gpu", "gpu memory"), caption="Resources")
        return Section(key="resources", nodes=(table,))


def strip(now: RunSnapshot, watcher: RunWatcher) -> Drawing:
    """Return a small card for each rank or, if there are many ranks, two figures for each rank or node."""
    if len(now.ranks) > MANY and len({rank.node for rank in now.ranks}) > 1:
        return Drawing(html=_node_meters(now.ranks))
    if len(now.ranks) > MAX_CARDS:
        return Drawing(html=_rank_meters(now.ranks))
    cards = [_card(rank, list(watcher.processor.get(rank.rank, ()))) for rank in now.ranks]
    return Drawing(html=element("ul", *cards, class_="na-strip", aria_label="Resources by rank") if cards else Markup())


def _rank_meters(ranks: Sequence[RankSnapshot]) -> Markup:
    gpu = has_gpu(ranks)
    title = "GPU use and GPU memory by rank" if gpu else "Processor use and memory by rank"
    meters = [_meter(str(rank.rank), f"rank {rank.rank}", [rank], gpu=gpu) for rank in ranks[:MAX_SHOWN]]
    more = f" (the first {MAX_SHOWN} of {len(ranks):,})" if len(ranks) > MAX_SHOWN else ""
    return _titled(title, meters, "na-strip na-dense", more)


def _node_meters(ranks: Sequence[RankSnapshot]) -> Markup:
    """Return a meter per node: the mean use of its ranks, and their total memory."""
    gpu, groups = has_gpu(ranks), by_node(ranks)
    tiny, meters = len(groups) > MANY, []
    for node, members in list(groups.items())[:MAX_SHOWN]:
        who = f"{node_title(members, several=True)}, {rank_names([rank.rank for rank in members])}"
        meters.append(_meter(str(node), who, members, gpu=gpu, tiny=tiny))
    kind, total = ("GPU ", COLUMNS["gpu memory"]) if gpu else ("", COLUMNS["memory"])
    title = f"{kind or 'Processor '}use by node, mean of its ranks"
    title += f" · {total.cell(ranks)} of {kind}memory in total" if tiny else f"; {kind}memory"
    title += f" (the first {MAX_SHOWN} of {len(groups):,} nodes)" if len(groups) > MAX_SHOWN else ""
    return _titled(title, meters, "na-strip na-dense na-tiny" if tiny else "na-strip na-dense")


def _titled(title: str, meters: Sequence[Markup], kind: str, more: str = "") -> Markup:
    heading = element("p", f"{title}{more}", class_="na-strip-title")
    return join([heading, element("ul", *meters, class_=kind, aria_label=title)])


def _meter(name: str, who: str, ranks: Sequence[RankSnapshot], *, gpu: bool, tiny: bool = False) -> Markup:
    figures = _figures(ranks)
    used, memory = (figures.get(title, "–") for title in (("GPU", "GPU memory") if gpu else ("CPU", "memory")))
    share = min(100.0, max(0.0, float(used.split(maxsplit=1)[0]))) if used[0].isdigit() else 0.0
    bar = element("span", element("i", style=f"width:{share:.0f}%"), class_="na-meter")
    parts = [element("span", name, class_="na-who"), bar, element("b", used)]
    title = f"{who}: {', '.join(f'{name} {value}' for name, value in figures.items())}"
    return element("li", *parts, Markup() if tiny else element("span", memory), title=title)


def _figures(ranks: Sequence[RankSnapshot]) -> dict[str, str]:
    """Return the combined use of ranks as text, by column title."""
    names = ("cpu", "memory", "gpu", "gpu memory") if has_gpu(ranks) else ("cpu", "memory")
    return {COLUMNS[name].title: str(COLUMNS[name].cell(ranks)) for name in names}


def _card(rank: RankSnapshot, history: Sequence[float]) -> Markup:
    figures = [element("span", f"{name} ", element("b", value)) for name, value in _figures([rank]).items()]
    title = element("div", element("span", f"rank {rank.rank}"), _curve(history), class_="na-who")
    return element("li", title, element("div", *figures, class_="na-used"))


def _curve(history: Sequence[float]) -> Markup:
    """Return the last minute of CPU use as a curve, which is hidden from screen readers (they read the figures)."""
    if len(history) < 2:
        return Markup()
    top = max(100.0, *history)
    last = len(history) - 1
    points = " ".join(f"{64 * i / last:.1f},{15 - 14 * value / top:.1f}" for i, value in enumerate(history))
    line = element("polyline", fill="none", stroke="currentColor", stroke_width="1.3", points=points)
    return element("svg", line, viewBox="0 0 64 16", aria_hidden="true")
