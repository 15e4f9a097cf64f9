"""Cell outputs that any thread may replace later, also after the cell has ended."""

from __future__ import annotations

import atexit
import queue
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from notebook_accelerate.launch.output.running_cell import parent_message, running_kernel

# ---- outputs of marimo's cells, which have no display ids: a thread of marimo's replaces the output of its cell

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


NOTHING: dict[str, Any] = {"text/plain": ""}
"""An empty output: outputs cannot be removed."""


class _Output:
    """One output: the first bundle displays it, later ones replace its content."""

    def __init__(self) -> None:
        self._transient = {"display_id": f"notebook-accelerate-{uuid.uuid4().hex}"}
        self.shown = False

    def send(self, kernel: Any, parent: Any, data: dict[str, Any]) -> None:
        # Sent through the session: display() would add it to the cell that is running now.
        kind = "update_display_data" if self.shown else "display_data"
        content = {"data": data, "metadata": {}, "transient": self._transient}
        # Front ends find the output to replace by its display id; clients without a front end only read messages of
        # the running cell.
        message = _running_cell(kernel, parent) if self.shown else parent
        self.shown = True
        session = kernel.session
        frames = session.serialize(session.msg(kind, content, parent=message), ident=f"display.{kind}".encode())
        # A copy: session.send sends large messages without one, which fails in the middle of the message once pyzmq's
        # exit handler has run, and the rest of it would then be the begin of the next message.
        kernel.iopub_socket.send_multipart(frames, copy=True)


def _running_cell(kernel: Any, default: Any) -> Any:
    """Return the execute request of the running cell, or of the last one; ``default`` if there is none."""
    latest = kernel.get_parent() or {}
    return latest if (latest.get("header") or {}).get("msg_type") == "execute_request" else default


class CellOutput:
    """An output of the running cell, and one beside it with a form that needs no kernel.

    Args:
        kernel: The ipykernel of this process.

    Attributes:
        parent: The execute request of the cell.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.parent = parent_message(kernel)
        self._output, self._beside = _Output(), _Output()

    @property
    def cell(self) -> str:
        """The id of the execute request that the outputs belong to."""
        return str(((self.parent or {}).get("header") or {}).get("msg_id", ""))

    @property
    def notebook_cell(self) -> str:
        """The id of the notebook's cell; "" if the front end does not send it."""
        return str(((self.parent or {}).get("metadata") or {}).get("cellId", ""))

    @property
    def interactive(self) -> bool:
        """Whether the client that executes the cell takes input. Front ends do; nbclient and papermill do not."""
        return bool(((self.parent or {}).get("content") or {}).get("allow_stdin", True))

    def show(self, data: dict[str, Any]) -> None:
        """Show a MIME bundle, which replaces the previous one."""
        self._output.send(self._kernel, self.parent, data)

    def leave(self, data: dict[str, Any]) -> None:
        """Show a bundle beside the live one: a notebook whose kernel was killed keeps it."""
        self._beside.send(self._kernel, self.parent, data)

    def end(self, data: dict[str, Any]) -> None:
        """Show a final bundle, and nothing beside it."""
        if self._beside.shown:  # first, so that the two forms are never shown together
            self.leave(NOTHING)
        self.show(data)


Output = CellOutput | MarimoOutput

_at_exit: dict[Output, Callable[[], dict[str, Any]]] = {}


def leave_at_exit(output: Output, static: Callable[[], dict[str, Any]]) -> None:
    """Let ``output`` show ``static()`` when the kernel exits: a live view without a kernel is an error message."""
    if not _at_exit:
        atexit.register(_show_static_forms)
    _at_exit[output] = static


def forget(output: Output) -> None:
    """Undo ``leave_at_exit``."""
    _at_exit.pop(output, None)


def _show_static_forms() -> None:
    for output, static in list(_at_exit.items()):
        with suppress(Exception):  # the kernel exits: an error could not be shown
            output.end(static())


def here() -> Output | None:
    """Return an output of the running cell; None outside a notebook."""
    kernel = running_kernel()
    return CellOutput(kernel) if kernel is not None else marimo_output()
