"""Outputs under a cell that any thread may replace later, also after the cell has ended."""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from notebook_accelerate.launch.output.rank_output import parent_message, running_kernel

NOTHING: dict[str, Any] = {"text/plain": ""}
"""An output that shows nothing: outputs cannot be taken back."""


class _Output:
    """One output: the first bundle displays it, the others replace what it shows."""

    def __init__(self) -> None:
        self._transient = {"display_id": f"notebook-accelerate-{uuid.uuid4().hex}"}
        self.shown = False

    def send(self, kernel: Any, parent: Any, data: dict[str, Any]) -> None:
        # Straight to the session: display() would file it under the cell that runs when it is called.
        kind = "update_display_data" if self.shown else "display_data"
        content = {"data": data, "metadata": {}, "transient": self._transient}
        # Front ends find what is replaced by its display id; clients that execute without a front end only read what
        # belongs to the cell that runs now.
        about = _running_cell(kernel, parent) if self.shown else parent
        self.shown = True
        kernel.session.send(kernel.iopub_socket, kind, content, parent=about, ident=f"display.{kind}".encode())


def _running_cell(kernel: Any, otherwise: Any) -> Any:
    """Return the message of the cell that runs now or ran last."""
    latest = kernel.get_parent() or {}
    return latest if (latest.get("header") or {}).get("msg_type") == "execute_request" else otherwise


class CellOutput:
    """An output under the cell that runs now, and one beside it for what is left without a kernel.

    Args:
        kernel: The ipykernel this process is.

    Attributes:
        parent: The message of that cell.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.parent = parent_message(kernel)
        self._output, self._left = _Output(), _Output()

    @property
    def cell(self) -> str:
        """The id of the request that the outputs belong to."""
        return str(((self.parent or {}).get("header") or {}).get("msg_id", ""))

    @property
    def notebook_cell(self) -> str:
        """The id of the notebook's cell, where the front end tells it; "" otherwise."""
        return str(((self.parent or {}).get("metadata") or {}).get("cellId", ""))

    def show(self, data: dict[str, Any]) -> None:
        """Show a MIME bundle, in place of what was shown here before."""
        self._output.send(self._kernel, self.parent, data)

    def leave(self, data: dict[str, Any]) -> None:
        """Put a bundle beside the live one: a notebook whose kernel was killed is left with it."""
        self._left.send(self._kernel, self.parent, data)

    def end(self, data: dict[str, Any]) -> None:
        """Show a bundle for good, and nothing beside it."""
        if self._left.shown:  # first: who sees the last form sees it alone
            self.leave(NOTHING)
        self.show(data)


_at_exit: dict[CellOutput, Callable[[], dict[str, Any]]] = {}


def leave_at_exit(place: CellOutput, static: Callable[[], dict[str, Any]]) -> None:
    """See that ``place`` shows ``static()`` when the kernel ends: a live view without a kernel is an error message."""
    if not _at_exit:
        atexit.register(_leave)
    _at_exit[place] = static


def forget(place: CellOutput) -> None:
    """Undo ``leave_at_exit``."""
    _at_exit.pop(place, None)


def _leave() -> None:
    for place, static in list(_at_exit.items()):
        with suppress(Exception):  # the kernel is going: there is nobody to tell
            place.end(static())


def here() -> CellOutput | None:
    """Return an output under the cell that runs now; None where there is no notebook."""
    kernel = running_kernel()
    return CellOutput(kernel) if kernel is not None else None


__all__ = ["NOTHING", "CellOutput", "forget", "here", "leave_at_exit"]
