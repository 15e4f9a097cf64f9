"""How a run can be stopped now: with a click in the panel, or with the notebook's stop button.

Clicks reach the kernel through its shell channel. While a cell blocks, they wait there, unless the front end has opened
a subshell for them (ipykernel 7.0 to 7.3 with JupyterLab 4.4 and later; 7.4 sends such messages to the main shell
again). While a cell awaits, ipykernel 7 handles them and ipykernel 6 does not.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.rank_lines import running_kernel

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run

SUBSHELLS = ((7, 0), (7, 4))
"""The first ipykernel version that handles clicks on a subshell, and the first that no longer does."""


@dataclass(frozen=True)
class KernelState:
    """What the kernel is executing.

    Attributes:
        version: ipykernel's major and minor version.
        busy: Whether a cell is running.
        blocked: Whether that cell blocks the main thread; otherwise it awaits.
        subshell: Whether a front end has opened a subshell.
    """

    version: tuple[int, int]
    busy: bool
    blocked: bool
    subshell: bool

    @property
    def handles_clicks(self) -> bool:
        """Whether a click takes effect now."""
        if not self.busy:
            return True
        if self.blocked:
            return self.subshell and SUBSHELLS[0] <= self.version < SUBSHELLS[1]
        return self.version >= (7, 0)


def kernel_state() -> KernelState | None:
    """Return the state of the kernel; None outside a kernel."""
    kernel = running_kernel()
    if kernel is None:
        return None
    from ipykernel import _version

    major, minor = _version.__version__.split(".")[:2]
    return KernelState((int(major), int(minor)), _busy(kernel.shell), _blocked(), _has_subshell(kernel))


def _busy(shell: Any) -> bool:
    # IPython stores a cell's input at its start and its result at its end. (The counter is incremented at the end in
    # IPython 7 and 8, at the start in 9.)
    if _blocked():
        return True
    inputs = getattr(getattr(shell, "history_manager", None), "input_hist_parsed", ("",))
    last = getattr(shell, "last_execution_result", None)
    ended = getattr(last, "execution_count", None) if last is not None else 0
    return ended is not None and ended < len(inputs) - 1


def _blocked() -> bool:
    """Return whether the main thread is inside a cell's code; an awaiting cell is not on the stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_code" and "interactiveshell" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _has_subshell(kernel: Any) -> bool:
    try:
        return bool(kernel.shell_channel_thread.manager.list_subshell())
    except Exception:  # noqa: BLE001 - ipykernel 6 has no subshells, and this attribute of 7 is private
        return False


def hint(run: Run, kernel: KernelState | None) -> str:
    """Return a sentence about how the run can be stopped now; "" after its end."""
    if run.ended is not None or kernel is None:
        return ""
    if run.status == "stopping":
        return "Stopping: ranks may finish saving. Kill ends them immediately."
    if run.plan is not None and run.plan.start_method == "inline":
        return "The run executes in this kernel: stop it with the notebook's own stop button (■)."
    if not kernel.busy:
        return "The Stop button works now. The notebook's own stop button does not stop a run in the background."
    if kernel.handles_clicks:
        return "The Stop button works now, and so does the notebook's own stop button (■)."
    if run.config.block or not kernel.blocked:
        return "The cell waits for the run: use the notebook's own stop button (■). A click takes effect when it ends."
    return "Another cell is running: a click takes effect when it ends."
