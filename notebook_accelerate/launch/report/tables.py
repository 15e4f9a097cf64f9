"""Rows of cells as an HTML table and as aligned text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from notebook_accelerate.launch.report.markup import Markup, element

Rows = list[list[str]]
Attributes = Mapping[str, object]
LEFT: Attributes = {"style": "text-align:left"}
"""Front ends align the cells of a table to the right."""


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    columns: Sequence[Attributes] = (),
    row_classes: Sequence[str] = (),
    **attributes: object,
) -> Markup:
    """Return a table whose first column names its rows.

    Args:
        head: The titles of the columns; empty: no header row.
        rows: The cells, at least one row: texts, which are escaped, or `Markup`.
        caption: A text, or a ``caption`` element; "": none.
        columns: Attributes of the cells of each column; empty: none.
        row_classes: The class of each row; empty: none.
        attributes: Attributes of the table, see `element`.
    """
    columns = columns or [{}] * len(head or rows[0])
    titles = (
        [element("th", cell, scope="col", **given) for cell, given in zip(head, columns, strict=True)] if head else []
    )
    parts = [caption if isinstance(caption, Markup) else element("caption", caption)] if caption else []
    parts += [element("thead", element("tr", *titles))] if titles else []
    classes = row_classes or [""] * len(rows)
    body = [_row(row, columns, name) for row, name in zip(rows, classes, strict=True)]
    return element("table", *parts, element("tbody", *body), **attributes)


def _row(row: Sequence[str], columns: Sequence[Attributes], name: str) -> Markup:
    cells = [
        element("td" if column else "th", cell, scope=None if column else "row", **given)
        for column, (cell, given) in enumerate(zip(row, columns, strict=True))
    ]
    return element("tr", *cells, class_=name or None)


def text_table(rows: Sequence[Sequence[str]], *, rule: bool = False) -> str:
    """Return rows as lines of aligned columns.

    Args:
        rows: The cells; the first row is the head.
        rule: Whether a line is drawn below the head.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if rule:
        lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)
