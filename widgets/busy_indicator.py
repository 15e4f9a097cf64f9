"""Keeps the notebook's busy indicator true while a cell blocks.

ipykernel 7 handles the messages of widgets on subshells, and reports "idle" after each, which front ends show for the
whole kernel: while a cell blocks, the indicator of a notebook with a live view would say that it is idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.rank_lines import running_kernel
from notebook_accelerate.widgets.stop_button import kernel_state

if TYPE_CHECKING:
    from notebook_accelerate.widgets.stop_button import KernelState


def restore() -> None:
    """Report "busy" again if a cell blocks the kernel and a front end has opened a subshell."""
    kernel, state = running_kernel(), kernel_state()
    if kernel is None or not _is_misreported(state):
        return
    cell = kernel.get_parent()
    _report(kernel, "busy", cell)
    if not _is_misreported(kernel_state()):  # it has just ended: its own "idle" may have come first
        _report(kernel, "idle", cell)


def _is_misreported(state: KernelState | None) -> bool:
    return state is not None and state.blocked and state.subshell


def _report(kernel: Any, state: str, cell: Any) -> None:
    content = {"execution_state": state}
    kernel.session.send(kernel.iopub_socket, "status", content, parent=cell, ident=b"kernel.status")
