"""Documents as HTML and as text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from notebook_accelerate.launch.report.document import Cell, Column, Drawing, Group, Node, Row, Section, Table, Text
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.report.svg_curves import COLOURS


class DocumentView(ABC):
    """An object that a notebook displays as a document."""

    @abstractmethod
    def document(self) -> Section:
        """Return what is displayed."""

    @property
    def html(self) -> Markup:
        """The document as HTML without scripts or external references."""
        return self._page(self.document())

    @property
    def text(self) -> str:
        """The document as plain text."""
        return text(self.document())

    @property
    def bundle(self) -> dict[str, str]:
        """The document as a MIME bundle: HTML and text of the same state."""
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
        node: The document.
        inline: Whether attributes style it, for saved notebooks, instead of the style sheet of the panels.
    """
    return _Html(inline).node(node)


def text(node: Node) -> str:
    """Return a document, or a part of one, as plain text: tables as aligned columns.

    Args:
        node: The document.
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
    head = [column.title for column in table.columns]
    groups = [(group.title, [[str(cell) for cell in row.cells] for row in group.rows or ()]) for group in table.groups]
    widths = [max(map(len, column)) for column in zip(head, *(row for _, rows in groups for row in rows), strict=True)]
    lines = [_aligned(head, widths), _aligned(["─" * width for width in widths], widths)]
    for title, rows in groups:
        lines += [title] if title and rows else []
        lines += [_aligned(row, widths) for row in rows]
    return "\n".join(lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


# ---- HTML

Attributes = Mapping[str, object]
_LEFT: Attributes = {"style": "text-align:left"}
_CODE: Attributes = {"style": "text-align:left;white-space:nowrap;font-family:monospace"}
_RIGHT: Attributes = {"style": "text-align:right"}
"""Front ends align the cells of a table to the right, those of its head too."""
_PRE = "font-family:monospace;white-space:pre-wrap;margin:0.3em 0"


class _Html:
    """Renders nodes.

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
        columns = [(index, column) for index, column in enumerate(table.columns) if not column.text_only]
        given = [(index, self._column_attributes(column)) for index, column in columns]
        caption = [element("caption", table.caption, **(_LEFT if self._inline else {}))] if table.caption else []
        titles = [
            element("th", column.title, scope="col", **each)
            for (_, column), (_, each) in zip(columns, given, strict=True)
        ]
        head = [] if table.pairs and table.caption else [element("thead", element("tr", *titles))]
        parts = [*caption, *head, *(self._group(group, given) for group in table.groups if group.rows)]
        if self._inline:
            return element("table", *parts)
        kind = f"na-table na-{table.key}{' na-wrap' if table.pairs else ''}"
        drawn = element("table", *parts, class_=kind, aria_label=table.label or None)
        return drawn if table.pairs else element("div", drawn, class_="na-scroll")

    def _column_attributes(self, column: Column) -> Attributes:
        if self._inline:
            return _RIGHT if column.numeric else _CODE if column.kind == "code" else _LEFT
        names = {"na-num": column.numeric, "na-source": column.kind == "code", "na-muted": column.muted}
        return {"class_": " ".join(name for name, is_set in names.items() if is_set) or None}

    def _group(self, group: Group, given: Sequence[tuple[int, Attributes]]) -> Markup:
        rows = [self._row(row, given) for row in group.rows or ()]
        if group.title:
            title = element("th", group.title, scope="rowgroup", colspan=len(given), **(_LEFT if self._inline else {}))
            rows.insert(0, element("tr", title, class_=self._class("section")))
        return element("tbody", *rows)

    def _row(self, row: Row, given: Sequence[tuple[int, Attributes]]) -> Markup:
        (first, attributes), *others = given
        name = element("th", self._cell(row.cells[first]), scope="row", **attributes)
        cells = [element("td", self._cell(row.cells[index]), **each) for index, each in others]
        return element("tr", name, *cells, class_=self._class(row.tone))

    def _class(self, name: str) -> str | None:
        return " ".join(f"na-{word}" for word in name.split()) if name and not self._inline else None

    def _cell(self, cell: str | Cell) -> str:
        if isinstance(cell, str):
            return cell
        content = _plain_cell(cell) if self._inline else _marked_cell(cell)
        return element("span", content, title=cell.title) if cell.title else content


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
    # The curves of later runs have the same colours, and are dashed.
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
    """Return a state as a word with a mark of its own shape and colour."""
    return element("span", status.capitalize(), class_=f"na-state na-state-{status.replace(' ', '-')}")


def badge(remark: str) -> Markup:
    """Return a remark beside a name; "" for no remark."""
    return element("span", remark, class_="na-badge") if remark else Markup()


def swatch(part: int) -> Markup:
    """Return the colour of a part of a step, for legends."""
    return element("span", class_="na-swatch", style=f"background:var(--na-part-{part})")
