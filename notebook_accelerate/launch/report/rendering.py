"""Render documents as HTML and as text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from typing import cast

from notebook_accelerate.launch.report.document import Cell, Column, Drawing, Group, Node, Section, Table, Text
from notebook_accelerate.launch.report.markup import Markup, element, join, start_tag
from notebook_accelerate.launch.report.svg_curves import COLOURS


class DocumentView(ABC):
    """An object that a notebook displays as a document."""

    @abstractmethod
    def document(self) -> Section:
        """Return the document to display."""

    @property
    def html(self) -> Markup:
        """The document as HTML, without scripts or external references."""
        return self._page(self.document())

    @property
    def text(self) -> str:
        """The document as plain text."""
        return text(self.document())

    @property
    def bundle(self) -> dict[str, str]:
        """The document as a MIME bundle, with HTML and text that show the same state."""
        document = self.document()
        return {"text/html": self._page(document), "text/plain": text(document)}

    def _page(self, document: Section) -> Markup:
        return element("div", html(document), class_=f"notebook-accelerate-{document.key}")

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def html(node: Node, *, inline: bool = True) -> Markup:
    """Return a document, or a part of one, as HTML.

    Args:
        node: The document, or the part of it to render.
        inline: Whether to put styles into attributes, for saved notebooks. Panels have a style sheet instead.
    """
    return _Html(inline).node(node)


def text(node: Node) -> str:
    """Return a document, or a part of one, as plain text with aligned columns.

    Args:
        node: The document, or the part of it to render.
    """
    match node:
        case Section():
            return "\n\n".join(filter(None, map(text, node.nodes)))
        case Table():
            return _text_table(node) if node.rows else node.empty
        case Text():
            return "\n".join(node.lines)
        case Drawing():
            return node.text


def _text_table(table: Table) -> str:
    titles = tuple(column.title for column in table.columns)
    columns = zip(titles, *(row.cells for row in table.rows), strict=True)
    widths = [max(map(len, map(str, column))) for column in columns]
    line = "  ".join(f"%-{width}s" for width in widths)
    lines = [line % titles, line % tuple("─" * width for width in widths)]
    for group in table.groups:
        lines += [group.title] if group.title and group.rows else []
        lines += [line % row.cells for row in group.rows or ()]
    return "\n".join(map(str.rstrip, lines))


# ---- HTML

Attributes = Mapping[str, object]
_ALIGNED = {
    "l": "text-align:left",
    "r": "text-align:right",
    "c": "text-align:left;white-space:nowrap;font-family:monospace",
}
"""The styles of columns of text, of numbers and of code. By default, front ends align all cells to the right."""
_LEFT: Attributes = {"style": _ALIGNED["l"]}
MANY_ROWS = 100
"""The number of rows above which a table in a saved notebook has a style sheet, and cells without end tags.

This reduces the size of the table to a third. In smaller tables, each cell has a style, because some front ends remove
style sheets; JupyterLab does so until the user trusts the notebook.
"""
_PRE = "font-family:monospace;white-space:pre-wrap;margin:0.3em 0"


class _Html:
    """Renders nodes as HTML.

    Args:
        inline: See `html`.
    """

    def __init__(self, inline: bool) -> None:
        self._inline = inline

    def node(self, node: Node) -> Markup:
        match node:
            case Section():
                return self._section(node)
            case Table():
                return self._table(node)
            case Text():
                return _sentences(node)
            case Drawing():
                return node.html

    def _section(self, section: Section) -> Markup:
        content = join(map(self.node, section.nodes))
        if not content or not section.title:
            return content
        if section.open is None:
            return join([element("p", section.title, class_="na-sub"), content])
        name = self._class(section.key)
        return element("details", element("summary", section.title), content, class_=name, open=section.open)

    def _table(self, table: Table) -> Markup:
        if not table.rows:
            return element("p", table.empty, class_="na-empty") if table.empty else Markup()
        shown = [index for index, column in enumerate(table.columns) if not column.text_only]
        columns = [table.columns[index] for index in shown]
        is_large = self._inline and len(table.rows) > MANY_ROWS
        given = [{} if is_large else self._column_attributes(column) for column in columns]
        caption = [element("caption", table.caption, **(_LEFT if self._inline else {}))] if table.caption else []
        titles = [element("th", column.title, scope="col", **each) for column, each in zip(columns, given, strict=True)]
        head = [] if table.pairs and table.caption else [element("thead", element("tr", *titles))]
        end = "" if is_large else "</td>"
        cells = [f"{start_tag('th', scope='row', **given[0])}%s</th>"]
        cells += [f"{start_tag('td', **each)}%s{end}" for each in given[1:]]
        groups = (self._group(group, shown, "".join(cells)) for group in table.groups if group.rows)
        parts = [*caption, *head, *groups]
        if is_large:
            return _aligned_table(parts, "".join(map(_alignment, columns)))
        if self._inline:
            return element("table", *parts)
        kind = f"na-table na-{table.key}{' na-wrap' if table.pairs else ''}"
        drawn = element("table", *parts, class_=kind, aria_label=table.label or None)
        return drawn if table.pairs else element("div", drawn, class_="na-scroll")

    def _column_attributes(self, column: Column) -> Attributes:
        if self._inline:
            return {"style": _ALIGNED[_alignment(column)]}
        names = {"na-num": column.numeric, "na-source": column.kind == "code", "na-muted": column.muted}
        return {"class_": " ".join(name for name, is_set in names.items() if is_set) or None}

    def _group(self, group: Group, shown: Sequence[int], template: str) -> Markup:
        """Return the rows of a group.

        Args:
            group: The group to render.
            shown: The indices of the columns that are shown.
            template: The tags of a row's cells, with %s in place of each cell's content.
        """
        given = group.rows or ()
        columns = list(zip(*(row.cells for row in given), strict=True))
        contents = zip(*(self._contents(columns[index]) for index in shown), strict=True)
        tones = {row.tone for row in given}
        templates = {tone: f"{start_tag('tr', class_=self._class(tone))}{template}</tr>" for tone in tones}
        rows = [Markup(templates[row.tone] % cells) for row, cells in zip(given, contents, strict=True)]
        if group.title:
            title = element("th", group.title, scope="rowgroup", colspan=len(shown), **(_LEFT if self._inline else {}))
            rows.insert(0, element("tr", title, class_=self._class("section")))
        return element("tbody", *rows)

    def _contents(self, cells: Sequence[str | Cell]) -> list[str]:
        """Return the contents of a column's cells as markup."""
        if set(map(type, cells)) == {str}:
            return _escaped(cast("Sequence[str]", cells))
        return _escaped([cell if isinstance(cell, str) else self._cell(cell) for cell in cells])

    def _class(self, name: str) -> str | None:
        return " ".join(f"na-{word}" for word in name.split()) if name and not self._inline else None

    def _cell(self, cell: Cell) -> str:
        content = _plain_cell(cell) if self._inline else _marked_cell(cell)
        return element("span", content, title=cell.title) if cell.title else content


def _alignment(column: Column) -> str:
    """Return the key in `_ALIGNED` of a column's style."""
    return "r" if column.numeric else "c" if column.kind == "code" else "l"


def _aligned_table(parts: Sequence[Markup], alignments: str) -> Markup:
    """Return a table together with a style sheet that aligns the columns.

    Args:
        parts: The contents of the table.
        alignments: The key in `_ALIGNED` for each column.
    """
    name = f"na-columns-{alignments}"  # Tables with the same name have equal style sheets.
    rules = []
    for key in dict.fromkeys(alignments):
        places = ",".join(f":nth-child({place})" for place, each in enumerate(alignments, 1) if each == key)
        rules.append(f"table.{name} tr>:is({places}){{{_ALIGNED[key]}}}")
    return join([Markup(f"<style>{''.join(rules)}</style>"), element("table", *parts, class_=name)])


def _escaped(contents: Sequence[str]) -> list[str]:
    """Return contents as markup. Strings are escaped, and markup is left unchanged."""
    if set(map(type, contents)) == {str}:
        # Escape thousands of strings with one call, which is much faster. The separator is not allowed in HTML, so
        # strings rarely contain it.
        found = escape("\0".join(contents)).split("\0")
        if len(found) == len(contents):
            return found
    return [content if isinstance(content, Markup) else escape(content) for content in contents]


def _sentences(node: Text) -> Markup:
    match node.tone:
        case "list":
            return element("ul", *(element("li", line) for line in node.lines)) if node.lines else Markup()
        case "code":
            return element("pre", "\n".join(node.lines), style=_PRE)
        case "warned":
            given: Attributes = {"class_": "na-verdict na-warned"}
        case "problem":
            given = {"class_": "na-problem", "role": "alert"}
        case "warning":
            given = {"class_": "na-problem"}
        case "status":
            given = {"class_": "na-verdict", "role": "status"}
        case "log":
            entries = [element("pre", line, class_="na-entry", style=_PRE) for line in node.lines]
            return element("div", *entries, role="log", aria_label=node.label or None) if entries else Markup()
        case tone:
            given = {"class_": f"na-{tone}" if tone else None}
    return join([element("p", line, **given) for line in node.lines])


def _plain_cell(cell: Cell) -> str:
    if cell.meter is not None:
        share = f"{min(100.0, 100 * cell.meter):.0f}%"
        bar = f"linear-gradient(to right, rgba(106, 155, 214, .35) {share}, transparent {share})"
        return element("span", cell.text, style=f"display:inline-block;min-width:5em;background:{bar}")
    if cell.colour < 0:
        return str(cell)
    # Later runs reuse the colours with dashed curves, so mark these runs with a hollow dot.
    dot = "● " if cell.colour < len(COLOURS) else "○ "
    return join([element("span", dot, style=f"color:{COLOURS[cell.colour % len(COLOURS)]}"), str(cell)])


def _marked_cell(cell: Cell) -> str:
    if cell.state:
        return join([state(cell.state), badge(cell.badge)])
    if cell.meter is not None:
        return _meter(cell, cell.meter)
    return join([swatch(cell.part) if cell.part >= 0 else "", cell.text, badge(cell.badge)])


def _meter(cell: Cell, share: float) -> Markup:
    fill = "var(--na-muted-ink)" if cell.part < 0 else f"var(--na-part-{cell.part})"
    bar = element("i", style=f"width:{min(100.0, 100 * share):.1f}%;background:{fill}")
    return element("span", element("span", bar, class_="na-meter"), element("span", cell.text), class_="na-share")


# ---- marks of the panels


def state(status: str) -> Markup:
    """Return the name of a state, marked with a distinctive shape and colour."""
    return element("span", status.capitalize(), class_=f"na-state na-state-{status.replace(' ', '-')}")


def badge(remark: str) -> Markup:
    """Return a badge that shows a remark next to a name, or "" if there is no remark."""
    return element("span", remark, class_="na-badge") if remark else Markup()


def swatch(part: int) -> Markup:
    """Return a patch for legends, in the colour of a part of a step."""
    return element("span", class_="na-swatch", style=f"background:var(--na-part-{part})")
