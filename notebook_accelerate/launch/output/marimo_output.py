"""Outputs of marimo's cells, which have no display ids: a thread of marimo's replaces the output of its cell."""

from __future__ import annotations

import queue
import sys
from typing import Any

_PAUSE = 0.5
"""Seconds between two looks at whether the cell was executed again."""


class MarimoOutput:
    """The output of a marimo cell; see `CellOutput`.

    Args:
        marimo: The module.
    """

    parent: Any = None
    interactive = True
    cell = notebook_cell = ""

    def __init__(self, marimo: Any) -> None:
        self._marimo = marimo
        self._bundles: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # Here, on the thread of the cell: a thread of marimo's belongs to the cell that has created it.
        self._thread = marimo.Thread(target=self._replace, name="notebook-accelerate-marimo", daemon=True)
        self._started = False

    def show(self, data: dict[str, Any]) -> None:
        """Show the HTML of a MIME bundle in place of the previous one; safe from any thread."""
        if "text/html" not in data:
            return
        if not self._started:
            self._started = True
            self._thread.start()
        if self._thread.is_alive():  # it ends when the cell is executed again
            self._bundles.put(data)

    def leave(self, data: dict[str, Any]) -> None:
        """Do nothing: there is no live view that would need a form beside it."""

    def end(self, data: dict[str, Any]) -> None:
        """Show a final bundle; returns when marimo has it, so that it precedes the end of the cell."""
        self.show(data)
        self._bundles.put(None)
        if self._started:
            self._thread.join(timeout=5.0)

    def _replace(self) -> None:
        while not self._thread.should_exit:  # set when the cell is executed again
            try:
                data = self._bundles.get(timeout=_PAUSE)
            except queue.Empty:
                continue
            if data is None:
                return
            self._marimo.output.replace(self._marimo.Html(str(data["text/html"])))


def marimo_output() -> MarimoOutput | None:
    """Return the output of the running cell of marimo; None elsewhere. Does not import marimo."""
    marimo = sys.modules.get("marimo")
    return MarimoOutput(marimo) if marimo is not None and marimo.running_in_notebook() else None


__all__ = ["MarimoOutput", "marimo_output"]
