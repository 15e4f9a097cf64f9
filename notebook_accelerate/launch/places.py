"""An output under a cell that any thread may replace later, also after the cell has ended."""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from notebook_accelerate.launch.output import parent_message, running_kernel


class Place:
    """An output under the cell that runs now.

    Args:
        kernel: The ipykernel this process is.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._parent = parent_message(kernel)
        self._transient = {"display_id": f"notebook-accelerate-{uuid.uuid4().hex}"}
        self._shown = False

    @property
    def cell(self) -> str:
        """The id of the request that the output belongs to."""
        return str(((self._parent or {}).get("header") or {}).get("msg_id", ""))

    def show(self, data: dict[str, Any]) -> None:
        """Show a MIME bundle, in place of what was shown here before."""
        # Straight to the session: display() would file it under the cell that runs when it is called.
        kind = "update_display_data" if self._shown else "display_data"
        self._shown = True
        content = {"data": data, "metadata": {}, "transient": self._transient}
        self._kernel.session.send(
            self._kernel.iopub_socket, kind, content, parent=self._parent, ident=f"display.{kind}".encode()
        )


_at_exit: dict[Place, Callable[[], dict[str, Any]]] = {}


def leave_at_exit(place: Place, static: Callable[[], dict[str, Any]]) -> None:
    """See that ``place`` shows ``static()`` when the kernel ends: a live view without a kernel is an error message."""
    if not _at_exit:
        atexit.register(_leave)
    _at_exit[place] = static


def forget(place: Place) -> None:
    """Undo ``leave_at_exit``."""
    _at_exit.pop(place, None)


def _leave() -> None:
    for place, static in list(_at_exit.items()):
        with suppress(Exception):  # the kernel is going: there is nobody to tell
            place.show(static())


def here() -> Place | None:
    """Return an output under the cell that runs now; None where there is no notebook."""
    kernel = running_kernel()
    return Place(kernel) if kernel is not None else None


__all__ = ["Place", "forget", "here", "leave_at_exit"]
