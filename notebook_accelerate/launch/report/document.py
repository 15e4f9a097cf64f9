"""Documents: the content of reports and panels, built from a few kinds of nodes.

A view is a pure function from the state of a run to a `Section`. `rendering.html` renders the section for saved
notebooks and panels, and `rendering.text` renders it for terminals. A live table receives only the cells that have
changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from notebook_accelerate.launch.report.markup import Markup

Rows = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Action:
    """A button, and the action that a click starts.

    Attributes:
        id: Identifies the action in the message that a click sends.
        label: The text of the button.
        hint: Explains what a click does.
        tone: "bad" or "first" for another colour, or "" for the usual one.
        enabled: Whether the button can be clicked.
        interrupts: Whether a click interrupts the cell that blocks the kernel, through the notebook's server. The
            button is disabled if the browser cannot reach the server.
        question: A question that the first click shows instead of the label, so that only a second click acts, or "".
    """

    id: str
    label: str
    hint: str
    tone: str = ""
    enabled: bool = True
    interrupts: bool = False
    question: str = ""


# ---- tables


@dataclass(kw_only=True)  # Not frozen, because creating thousands of frozen cells would take four times as long.
class Cell:
    """A cell with more than plain text.

    Attributes:
        text: The text of the cell.
        badge: A remark after the text, such as "straggler".
        state: The state that the text names, or "" if it names none. Panels mark states with a shape and a colour.
        part: The index of the part of a step whose colour to show, or -1 for none.
        colour: The index of the curve whose colour to show, or -1 for none.
        meter: A share from 0 to 1 to draw as a bar, or None for no bar.
        title: The full text if the cell may be cut off, or "".
    """

    text: str
    badge: str = ""
    state: str = ""
    part: int = -1
    colour: int = -1
    meter: float | None = None
    title: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.badge})" if self.badge else self.text


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        title: The heading of the column.
        numeric: Whether to align the column to the right.
        kind: The kind of content, which determines the width and how live tables sort the column: "run", "state",
            "text" or "number". "code" is for lines of code, and "" for a plain column.
        muted: Whether to show the cells as less important.
        text_only: Whether the column appears only in the text form.
    """

    title: str
    numeric: bool = False
    kind: str = ""
    muted: bool = False
    text_only: bool = False


@dataclass(kw_only=True)  # Not frozen, because creating thousands of frozen rows would take four times as long.
class Row:
    """A row of a table. The first cell is the row's heading.

    Attributes:
        key: Identifies the row in later documents.
        cells: A cell for each column.
        tone: "late", "dead", "node", "sum" or "opened", or several of these separated by spaces, or "".
        order: The sort keys of the cells in live tables, or () to sort cells by their text.
        actions: The buttons at the end of the row.
    """

    key: str = ""
    cells: tuple[str | Cell, ...]
    tone: str = ""
    order: tuple[float | str | None, ...] = ()
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of a table under a heading.

    Attributes:
        key: Identifies the group in later documents.
        title: The heading, or "" for none.
        rows: The rows, or None to keep those of the previous document.
        folded: Whether a live table hides the rows until the heading is clicked.
    """

    key: str = ""
    title: str = ""
    rows: tuple[Row, ...] | None = ()
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose rows are in groups.

    Attributes:
        key: Identifies the table in its document.
        columns: The columns, from left to right.
        groups: The rows, in groups.
        caption: Text above the table, or "" for none.
        label: The table's name for screen readers, if no caption or heading names the table.
        pairs: Whether the table has only names and values. Such a table wraps long values, and has no header row if it
            has a caption.
        sortable: Whether users can sort the live table by its headings and filter its rows.
        empty: The text to show if there are no rows.
    """

    key: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    caption: str = ""
    label: str = ""
    pairs: bool = False
    sortable: bool = False
    empty: str = ""

    @property
    def rows(self) -> list[Row]:
        """The rows of all groups."""
        return [row for group in self.groups for row in group.rows or ()]


_NUMBER = re.compile(r"-?(?!0\d)[\d.,]+(e[+-]?\d+)?( ?(%|B|ms|[kKMGT]i?B))?|-?inf|nan")
_UNKNOWN = ("", "–")


def table_of(
    key: str, rows: Sequence[Sequence[str]], *, caption: str = "", pairs: bool = False, code: bool = False
) -> Table:
    """Return a table of strings. Columns of numbers are aligned to the right, except for the first column.

    Args:
        key: Identifies the table in its document.
        rows: The titles of the columns, then the cells of each row.
        caption: See `Table`.
        pairs: See `Table`.
        code: Whether the last column contains lines of code.
    """
    head, *body = rows
    columns = [Column(title=head[0])]
    for index, title in enumerate(head[1:], 1):
        known = [row[index] for row in body if row[index] not in _UNKNOWN]
        columns.append(Column(title=title, numeric=bool(known) and not pairs and all(map(_NUMBER.fullmatch, known))))
    if code:
        columns[-1] = Column(title=head[-1], kind="code")
    group = Group(rows=tuple(Row(cells=tuple(row)) for row in body))
    return Table(key=key, columns=tuple(columns), groups=(group,), caption=caption, pairs=pairs)


# ---- other nodes


@dataclass(frozen=True, kw_only=True)
class Text:
    """Paragraphs, a list, a log or code.

    Attributes:
        lines: The paragraphs, the items of the list, or the lines of the log or code.
        tone: "verdict", "warned", "status" (a verdict that screen readers announce), "warning", "problem" (an alert for
            screen readers), "note", "empty", "code", "log" or "list", or "" for plain paragraphs.
        label: The name of a log for screen readers.
    """

    lines: tuple[str, ...]
    tone: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A node with separate forms for HTML and for text.

    Attributes:
        html: The HTML form, or "" to show nothing in HTML.
        text: The text form, or "" to show nothing in text.
    """

    html: Markup = field(default_factory=Markup)
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Nodes with a common heading. A section whose nodes are all empty is not shown.

    Attributes:
        key: Identifies the section in its document.
        nodes: The content of the section.
        title: The heading, or "" for none. The text form leaves it out.
        open: Whether the fold below the heading is open, or None if the section cannot be folded.
    """

    key: str
    nodes: tuple[Node, ...]
    title: str = ""
    open: bool | None = None


Node: TypeAlias = Section | Table | Text | Drawing
