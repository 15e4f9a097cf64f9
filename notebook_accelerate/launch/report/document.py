"""Documents: what reports and panels show, in few kinds of nodes.

A view is a pure function of the state of a run and returns a `Section`. `rendering.html` draws it, in a saved notebook
or in a panel, and `rendering.text` for terminals; a live table is sent the cells that have changed.
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
    """A button.

    Attributes:
        id: What a click sends.
        label: The text of the button.
        hint: What a click does.
        tone: "bad" or "first" for another colour; "": the usual one.
        enabled: Whether it can be clicked.
        interrupts: Whether a click interrupts the cell that blocks the kernel, through the notebook's server. Where
            the browser does not reach that, the button is disabled.
    """

    id: str
    label: str
    hint: str
    tone: str = ""
    enabled: bool = True
    interrupts: bool = False


# ---- tables


@dataclass(kw_only=True)  # not frozen: updates create thousands, and creation would take four times as long
class Cell:
    """A cell that is more than a text.

    Attributes:
        text: The text.
        badge: A remark after the text, such as "straggler".
        state: The state that the text names: panels mark it with its shape and colour; "": none.
        part: The index of the part of a step whose colour is shown; -1: none.
        colour: The index of the curve whose colour is shown; -1: none.
        meter: A share from 0 to 1 that is also drawn as a bar; None: no bar.
        title: The whole text of a cell that may be cut.
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
    """A column.

    Attributes:
        title: The text of its head.
        numeric: Whether it is aligned to the right.
        kind: What live tables sort it by, and its width: "run", "state", "text" or "number"; "code": lines of code;
            "": a plain column.
        muted: Whether its texts are of less importance.
        text_only: Whether only the text form has it.
    """

    title: str
    numeric: bool = False
    kind: str = ""
    muted: bool = False
    text_only: bool = False


@dataclass(kw_only=True)  # not frozen: updates create thousands, and creation would take four times as long
class Row:
    """A row, named by its first cell.

    Attributes:
        key: Identifies the row in later documents.
        cells: One for each column.
        tone: "late", "dead", "node", "sum" or "opened", or several of them; "": the usual one.
        order: What live tables sort the cells by; (): the texts.
        actions: Buttons at the end of the row.
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
        title: The heading; "": none.
        rows: The rows; None: those of the document before.
        folded: Whether a live table hides them until the heading is clicked.
    """

    key: str = ""
    title: str = ""
    rows: tuple[Row, ...] | None = ()
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        key: Identifies the table in its document.
        columns: The columns.
        groups: The rows.
        caption: A text above the table; "": none.
        label: Its name for screen readers, if no caption or heading names it.
        pairs: Whether it has names and values only: below a caption it then has no head, and long values are wrapped.
        sortable: Whether in a live table heads sort, and a box filters the rows.
        empty: What is shown instead of a table without rows.
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
    """Return a table of texts. Columns of numbers, except the names of the rows, are aligned to the right.

    Args:
        key: Identifies the table in its document.
        rows: The titles of the columns, then the cells of each row.
        caption: See `Table`.
        pairs: See `Table`.
        code: Whether the last column has lines of code.
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
    """Sentences.

    Attributes:
        lines: Paragraphs, or the items of a list.
        tone: "verdict", "warned", "status" (a verdict that screen readers announce), "warning", "problem" (an
            alert to screen readers), "note", "empty", "code", "log" or "list"; "": the usual one.
        label: The name of a log for screen readers.
    """

    lines: tuple[str, ...]
    tone: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What is drawn in HTML and written in text, each in its own way.

    Attributes:
        html: The picture; "": only the text form shows something.
        text: The text form; "": only HTML shows something.
    """

    html: Markup = field(default_factory=Markup)
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Nodes with a common heading; without nodes that show something, nothing.

    Attributes:
        key: Identifies the section in its document.
        nodes: What it shows.
        title: The heading, which the text form leaves out; "": none.
        open: Whether the fold below the heading is open; None: there is no fold.
    """

    key: str
    nodes: tuple[Node, ...]
    title: str = ""
    open: bool | None = None


Node: TypeAlias = Section | Table | Text | Drawing
