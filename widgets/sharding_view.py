"""What is sharded where: the mesh of ranks as a picture, and a table of who holds how much of what."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report import mesh_diagram, sharding_table

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.sharding_table import Ranks, Row

_NOTHING = (
    '<p class="na-empty">Nothing prepared yet: accelerator.prepare(model, optimizer) tells what each rank holds of '
    "parameters, gradients and optimizer state.</p>"
)
_NOTE = (
    '<p class="na-note">Each bar is the whole model; its filled part is what the rank holds between steps. Gradients '
    "are there from backward to step, optimizer state from the first step on.</p>"
)


class ShardingPage:
    """The page as HTML, made anew only where a rank has told something new.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._seen: Ranks = {}
        self._html = _NOTHING

    def html(self) -> str:
        """Return the page."""
        now = sharding_table.holdings_of(self.run)
        if now.keys() != self._seen.keys() or any(now[rank] is not self._seen[rank] for rank in now):
            self._seen, self._html = now, page(now)
        return self._html


def page(ranks: Ranks) -> str:
    """Return sentence, picture and table.

    Args:
        ranks: What each rank holds.
    """
    if not ranks:
        return _NOTHING
    rows = sharding_table.table(ranks)
    titles = "".join(
        f'<th scope="col"{kind}>{title}</th>'
        for title, kind in (
            ("ranks", ""), ("", ""), ("whole", _NUMBER), ("each rank", _NUMBER), ("share", ""), ("how", ""),
        )
    )  # fmt: skip
    caption = f'<caption class="na-hidden">{sharding_table.CAPTION}</caption>'
    return (
        f'<p class="na-verdict">{escape(sharding_table.sentence(ranks))}</p>'
        f'<div class="na-scroll na-mesh">{mesh_diagram.picture(ranks)}</div>{_NOTE}'
        f'<div class="na-scroll"><table class="na-table na-shards">{caption}<thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(map(_row, rows))}</tbody></table></div>"
    )


_NUMBER = ' class="na-num"'
_COLOURS = {"parameters": "1", "gradients": "0", "optimizer state": "3"}


def _row(row: Row) -> str:
    colour = _COLOURS.get(row.what)
    swatch = f'<span class="na-swatch" style="background:var(--na-part-{colour})"></span>' if colour else ""
    fill = f"background:var(--na-part-{colour})" if colour else "background:var(--na-muted-ink)"
    width = f"{min(100.0, 100 * (row.share or 0.0)):.1f}%"
    meter = f'<span class="na-meter"><i style="width:{width};{fill}"></i></span>' if row.share is not None else ""
    return (
        f'<tr class="{"" if colour else "na-sum"}"><th scope="row">{escape(row.who)}</th><td>{swatch}{row.what}</td>'
        f'<td class="na-num">{row.whole}</td><td class="na-num">{row.here}</td>'
        f'<td><span class="na-share">{meter}<span>{sharding_table.percent(row.share)}</span></span></td>'
        f'<td class="na-muted">{escape(row.how)}</td></tr>'
    )


__all__ = ["ShardingPage", "page"]
