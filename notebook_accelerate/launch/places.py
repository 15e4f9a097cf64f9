"""An output under a cell that any thread may replace later, also after the cell has ended."""

from __future__ import annotations

import uuid
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


def here() -> Place | None:
    """Return an output under the cell that runs now; None where there is no notebook."""
    kernel = running_kernel()
    return Place(kernel) if kernel is not None else None


__all__ = ["Place", "here"]
