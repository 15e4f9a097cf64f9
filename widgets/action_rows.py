"""Rows of text with buttons, and a Stop button that works while a cell blocks the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_accelerate.widgets.assets import asset

if TYPE_CHECKING:
    from notebook_accelerate.widgets.actions import ActionRow


class ActionRows(anywidget.AnyWidget):
    """Rows of text with buttons.

    Args:
        on_action: Called with the id of the action that was clicked.
        label: Name of the rows for screen readers.
    """

    _esm = asset("actions.js")
    rows: Any = traitlets.List().tag(sync=True)
    note: Any = traitlets.Dict().tag(sync=True)
    label: Any = traitlets.Unicode("").tag(sync=True)
    kernel: Any = traitlets.Unicode("").tag(sync=True)

    def __init__(self, on_action: Callable[[str], None], label: str = "") -> None:
        super().__init__(label=label)
        self._on_action = on_action
        self.on_msg(self._on_message)

    def show(self, rows: Sequence[ActionRow], kernel: str = "", note: str = "", unreachable: str = "") -> None:
        """Show these rows.

        Args:
            rows: The rows, from the top.
            kernel: Id of the kernel on the notebook's server; "": not known.
            note: A text below them.
            unreachable: The text instead of ``note`` where the browser cannot interrupt the kernel; "": ``note``.
        """
        shown = [asdict(row) for row in rows]
        for row in shown:
            row["actions"] = list(row["actions"])
        self.kernel, self.note, self.rows = kernel, {"text": note, "unreachable": unreachable}, shown

    @property
    def text(self) -> str:
        """The rows and the note as plain text, a line each."""
        lines = [" ".join([row["text"], *(f"[{each['label']}]" for each in row["actions"])]) for row in self.rows]
        return "\n".join(filter(None, [*map(str.strip, lines), self.note.get("text", "")]))

    def click(self, action: str) -> None:
        """Do what a click does."""
        self._on_action(action)

    def _on_message(self, _: object, content: object, __: object) -> None:
        if isinstance(content, dict) and content.get("kind") == "click":
            self.click(str(content.get("action")))
