"""The sharding page of a run's panel: the mesh of ranks as a drawing, and the table of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate.launch.report import mesh_diagram
from notebook_accelerate.launch.report.markup import Markup, element, html_table, join, percent
from notebook_accelerate.widgets.run_panel_html import NUMBER, swatch

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.mesh_diagram import ShardingRow, ShardReports

_EMPTY = (
    "Nothing prepared yet: accelerator.prepare(model, optimizer) shows here the parameters, gradients and optimizer "
    "state of each rank."
)
_NOTE = (
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
        self._html = page({})

    def html(self) -> Markup:
        """Return the page."""
        latest = mesh_diagram.latest_reports(self.run)
        if latest != self._shown:
            self._shown, self._html = latest, page(latest)
        return self._html


def page(reports: ShardReports) -> Markup:
    """Return summary, drawing and table.

    Args:
        reports: By rank.
    """
    if not reports:
        return element("p", _EMPTY, class_="na-empty")
    rows = mesh_diagram.sharding_rows(reports)
    table = html_table(
        mesh_diagram.HEAD,
        [_cells(row) for row in rows],
        caption=element("caption", mesh_diagram.CAPTION, class_="na-hidden"),
        columns=[{}, {}, NUMBER, NUMBER, {}, {}],
        row_classes=["" if row.kind in _COLOURS else "na-sum" for row in rows],
        class_="na-table na-shards",
    )
    return join([
        element("p", mesh_diagram.summary(reports), class_="na-verdict"),
        element("div", mesh_diagram.svg(reports), class_="na-scroll na-mesh"),
        element("p", _NOTE, class_="na-note"),
        element("div", table, class_="na-scroll"),
    ])  # fmt: skip


_COLOURS = {"parameters": 1, "gradients": 0, "optimizer state": 3}


def _cells(row: ShardingRow) -> list[str]:
    part = _COLOURS.get(row.kind)
    kind = row.kind if part is None else join([swatch(part), row.kind])
    meter = Markup()
    if row.share is not None:
        fill = "var(--na-muted-ink)" if part is None else f"var(--na-part-{part})"
        style = f"width:{min(100.0, 100 * row.share):.1f}%;background:{fill}"
        meter = element("span", element("i", style=style), class_="na-meter")
    share = element("span", meter, element("span", percent(row.share)), class_="na-share")
    return [row.ranks, kind, row.total, row.per_rank, share, element("span", row.layout, class_="na-muted")]
