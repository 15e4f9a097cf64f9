"""Cell outputs that any thread can replace later, even after the cell has finished."""

from __future__ import annotations

import atexit
import queue
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from notebook_accelerate.launch.output.running_cell import parent_message, running_kernel

# ---- outputs of marimo cells. They have no display ids, so a marimo thread replaces the whole output of the cell

_PAUSE = 0.5
"""Seconds between two checks of whether the cell has been executed again."""


class MarimoOutput:
    """The output of a marimo cell; see `CellOutput`.

    Args:
        marimo: The imported ``marimo`` module.
    """

    parent: Any = None
    interactive = True
    cell = notebook_cell = ""

    def __init__(self, marimo: Any) -> None:
        self._marimo = marimo
        self._bundles: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # Create the thread now, while the cell is running, because a marimo thread belongs to the cell that creates it.
        self._thread = marimo.Thread(target=self._replace, name="notebook-accelerate-marimo", daemon=True)
        self._started = False

    def show(self, data: dict[str, Any]) -> None:
        """Show the HTML of a MIME bundle in place of the previous one. Safe to call from any thread."""
        if "text/html" not in data:
            return
        if not self._started:
            self._started = True
            self._thread.start()
        if self._thread.is_alive():  # The thread ends when the cell is executed again.
            self._bundles.put(data)

    def show_static(self, data: dict[str, Any]) -> None:
        """Do nothing, because marimo has no live view that would need a static form."""

    def end(self, data: dict[str, Any]) -> None:
        """Show a final bundle, and wait until marimo has received it, so that the cell does not end before that."""
        self.show(data)
        self._bundles.put(None)
        if self._started:
            self._thread.join(timeout=5.0)

    def _replace(self) -> None:
        while not self._thread.should_exit:  # The flag is set when the cell is executed again.
            try:
                data = self._bundles.get(timeout=_PAUSE)
            except queue.Empty:
                continue
            if data is None:
                return
            self._marimo.output.replace(self._marimo.Html(str(data["text/html"])))


def marimo_output() -> MarimoOutput | None:
    """Return the output of the running marimo cell, or None outside marimo. This does not import marimo."""
    marimo = sys.modules.get("marimo")
    return MarimoOutput(marimo) if marimo is not None and marimo.running_in_notebook() else None


NOTHING: dict[str, Any] = {"text/plain": ""}
"""An empty bundle that replaces an output, because outputs cannot be removed."""


class _Output:
    """An output of a cell. The first bundle displays it, and later bundles replace the content."""

    def __init__(self) -> None:
        self._transient = {"display_id": f"notebook-accelerate-{uuid.uuid4().hex}"}
        self.shown = False

    def send(self, kernel: Any, parent: Any, data: dict[str, Any]) -> None:
        # Send the message through the session, because display() would add the output to the cell that is running now.
        kind = "update_display_data" if self.shown else "display_data"
        content = {"data": data, "metadata": {}, "transient": self._transient}
        # Front ends find the output to replace by its display id. Clients without a front end, such as nbclient, read
        # only the messages of the running cell.
        message = _running_cell(kernel, parent) if self.shown else parent
        self.shown = True
        session = kernel.session
        frames = session.serialize(session.msg(kind, content, parent=message), ident=f"display.{kind}".encode())
        # Copy the data. session.send sends large messages without a copy, which fails partway through a message once
        # pyzmq's exit handler has run, so that the next message would be read as the rest of this one.
        kernel.iopub_socket.send_multipart(frames, copy=True)


def _running_cell(kernel: Any, default: Any) -> Any:
    """Return the execute request of the running or last cell, or ``default`` if there is none."""
    latest = kernel.get_parent() or {}
    return latest if (latest.get("header") or {}).get("msg_type") == "execute_request" else default


class CellOutput:
    """An output of the running cell, and a second output for a static form, which works without a kernel.

    Args:
        kernel: The ipykernel that runs in this process.

    Attributes:
        parent: The execute request of the cell that the outputs belong to.
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
        """The id of the notebook cell, or "" if the front end does not send it."""
        return str(((self.parent or {}).get("metadata") or {}).get("cellId", ""))

    @property
    def interactive(self) -> bool:
        """Whether the client that executes the cell accepts input. Front ends do; nbclient and papermill do not."""
        return bool(((self.parent or {}).get("content") or {}).get("allow_stdin", True))

    def show(self, data: dict[str, Any]) -> None:
        """Show a MIME bundle in place of the previous one."""
        self._output.send(self._kernel, self.parent, data)

    def show_static(self, data: dict[str, Any]) -> None:
        """Show a static bundle next to the live one. The notebook keeps the static one even if the kernel is killed."""
        self._beside.send(self._kernel, self.parent, data)

    def end(self, data: dict[str, Any]) -> None:
        """Show a final bundle, and clear the static one."""
        if self._beside.shown:  # Clear the static bundle first, so that it is never shown next to the final one.
            self.show_static(NOTHING)
        self.show(data)


Output = CellOutput | MarimoOutput

_at_exit: dict[Output, Callable[[], dict[str, Any]]] = {}


def show_static_at_exit(output: Output, static: Callable[[], dict[str, Any]]) -> None:
    """Show ``static()`` in ``output`` when the kernel exits, because a live view without a kernel shows an error."""
    if not _at_exit:
        atexit.register(_show_static_forms)
    _at_exit[output] = static


def forget(output: Output) -> None:
    """Cancel ``show_static_at_exit`` for an output."""
    _at_exit.pop(output, None)


def _show_static_forms() -> None:
    for output, static in list(_at_exit.items()):
        with suppress(Exception):  # The kernel is exiting, so an error could not be shown.
            output.end(static())


def current_output() -> Output | None:
    """Return an output of the running cell, or None outside a notebook."""
    kernel = running_kernel()
    return CellOutput(kernel) if kernel is not None else marimo_output()
