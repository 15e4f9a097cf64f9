"""Documents and tables whose updates, while they are shown, send only what has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import traitlets

from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.document import Cell, Group, Node, Row, Section, Table
from notebook_accelerate.widgets.feed import Feed
from notebook_accelerate.widgets.panel_elements import asset, html_widgets, script

OPEN_SECONDS, FOLDED_SECONDS = 1.0, 5.0
"""The shortest times between two updates of the throttled rows: while their fold is open, and while it is closed."""


class LiveDocument:
    """The widgets of a document, one for each of its nodes. An update sends the nodes and the cells that have changed.

    Args:
        nodes: The names of the nodes, in order.
        tables: The names of the nodes that are tables.

    Attributes:
        widgets: The widgets by name.
    """

    def __init__(self, *nodes: str, tables: Sequence[str] = ()) -> None:
        texts = iter(html_widgets(len(nodes) - len(tables)))
        self.widgets: dict[str, Any] = {name: TableView() if name in tables else next(texts) for name in nodes}
        self._shown: dict[str, object] = {}

    def update(self, now: float, document: Section, *, complete: bool = False) -> None:
        """Show a document in place of the previous one.

        Args:
            now: The time in seconds, on any clock that does not go back.
            document: The document to show, which must always have the same number of nodes.
            complete: Whether this may be the last update; see `TableView.update`.
        """
        for name, node in zip(self.widgets, document.nodes, strict=True):
            self._update_node(now, name, node, complete)

    def _update_node(self, now: float, name: str, node: Node, complete: bool) -> None:
        if isinstance(node, Table):
            self.widgets[name].update(now, lambda _: node, complete=complete)
        else:
            self.show(name, node, lambda: node)

    def show(self, name: str, content: object, view: Callable[[], Node]) -> None:
        """Show a node, which is built only if its content has changed.

        Args:
            name: The name of the node.
            content: The state that the node depends on. If it is unchanged, nothing is rendered.
            view: Returns the node.
        """
        if name not in self._shown or self._shown[name] != content:
            self._shown[name] = content
            self.widgets[name].value = rendering.html(view(), inline=False)


class TableView(Feed):
    """A live table; see ``static/table.js``.

    Folds are opened in the browser, which a busy kernel does not notice. Closed groups are therefore updated too, but
    less often.

    Args:
        on_action: Called with the key of a row and the id of its action that was clicked, on any thread.
        throttled: The key of a folded group with too many rows to build them for each update, or "" if there is none.
    """

    _esm = script("feed.js", "looks.js", "table.js")
    _css = asset("table.css")
    unfolded: Any = traitlets.List([]).tag(sync=True)
    filtered: Any = traitlets.Any(None).tag(sync=True)
    """The keys of the rows that the user's filter lets through, or None without a filter."""

    def __init__(self, on_action: Callable[[str, str], None] = lambda *_: None, throttled: str = "") -> None:
        super().__init__()
        self.table: Table | None = None
        self._on_action, self._throttled = on_action, throttled
        self._throttled_due = 0.0

    def update(self, now: float, build: Callable[[bool], Table], *, complete: bool = False) -> None:
        """Send what has changed, or everything if a view asked for it or may have missed a message.

        Args:
            now: The time in seconds, on any clock that does not go back.
            build: Returns the table with (True) or without (False) the rows of the throttled group. Without them, the
                group keeps its rows.
            complete: Whether to send all rows, and everything instead of a delta, because this may be the last update.
        """
        whole = self._full_due(now)
        table = build(whole or complete or self._is_throttled_due(now))
        if self.table is None or _head(table) != _head(self.table):
            whole, table = True, build(True)
        known = {} if self.table is None else {group.key: group.rows for group in self.table.groups}
        filled = [group if group.rows is not None else replace(group, rows=known[group.key]) for group in table.groups]
        before, self.table = self.table, replace(table, groups=tuple(filled))
        change = {} if whole or before is None else _changes(before, self.table)
        if whole or (change and complete):
            self._send_message("full", {**_head(table), "groups": [_complete(group) for group in filled]})
        elif change:
            self._send_message("delta", change)

    def _is_throttled_due(self, now: float) -> bool:
        """Return whether it is time to build the throttled rows again, and plan the next time."""
        if now < self._throttled_due:
            return False
        self._throttled_due = now + 0.95 * (OPEN_SECONDS if self._throttled in self.unfolded else FOLDED_SECONDS)
        return True

    def _on_message(self, widget: Any, content: Any, buffers: Any) -> None:
        super()._on_message(widget, content, buffers)
        if isinstance(content, dict) and content.get("kind") == "action":
            self._on_action(str(content.get("key")), str(content.get("action")))


# ---- messages


def _head(table: Table) -> dict[str, Any]:
    """Return all of a table except its rows."""
    return {
        "key": table.key,
        "label": table.label,
        "columns": [[column.title, "number" if column.numeric else column.kind] for column in table.columns],
        "sortable": table.sortable,
        "actions": any(row.actions for group in table.groups for row in group.rows or ()),
        "empty": table.empty,
    }


def _complete(group: Group) -> dict[str, Any]:
    return {
        "key": group.key,
        "title": group.title,
        "folded": group.folded,
        "all": [_row(row) for row in group.rows or ()],
    }


def _row(row: Row) -> list[Any]:
    more = {name: value for name, value in _more(row) if value}
    return [row.key, [_cell(cell) for cell in row.cells], *([more] if more else [])]


def _more(row: Row) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a row that are not cells."""
    yield "tone", row.tone
    yield "order", list(row.order)
    yield "actions", [asdict(action) for action in row.actions]


def _cell(cell: str | Cell) -> Any:
    if isinstance(cell, str):
        return cell
    shown = {each.name: value for each in fields(Cell) if (value := getattr(cell, each.name)) != each.default}
    return [cell.state] if shown == {"text": cell.state, "state": cell.state} else shown


def _changes(old: Table, new: Table) -> dict[str, Any]:
    """Return the message that turns one table into another, or {} if they are equal."""
    before = {group.key: group for group in old.groups}
    groups = [change for group in new.groups if len(change := _group_changes(before.get(group.key), group)) > 1]
    keys = [group.key for group in new.groups]
    order = {} if keys == list(before) else {"order": keys}
    return {"groups": groups, **order} if groups or order else {}


def _group_changes(old: Group | None, new: Group) -> dict[str, Any]:
    """Return the key of a group, and the changes in the group."""
    if old is None:
        return _complete(new)
    found: dict[str, Any] = {"key": new.key}
    if new.title != old.title:
        found["title"] = new.title
    if new.rows is old.rows:
        return found
    before, rows = ({row.key: row for row in group.rows or ()} for group in (old, new))
    if list(rows) != list(before):
        found["order"] = list(rows)
    if added := [_row(row) for key, row in rows.items() if key not in before]:
        found["rows"] = added
    pairs = ((key, list(_differences(before[key], row))) for key, row in rows.items() if key in before)
    if changes := [[key, *changed] for key, changed in pairs if changed]:
        found["changes"] = changes
    return found


def _differences(old: Row, new: Row) -> Iterator[Any]:
    """Yield the place and the value of each part of a row that has changed, alternating; see ``static/table.js``."""
    for index, (before, cell) in enumerate(zip(old.cells, new.cells, strict=True)):
        if before != cell:
            yield index
            yield _cell(cell)
    for (name, before_value), (_, value) in zip(_more(old), _more(new), strict=True):
        if before_value != value:
            yield name
            yield value
