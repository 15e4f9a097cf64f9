"""Which way of stopping a run works at this moment: a click, or the notebook's own stop button.

Clicks come to the kernel through its shell channel. While a cell blocks they wait there, except where the front end has
opened a subshell for them (ipykernel 7.0 to 7.3 with JupyterLab 4.4 and later; 7.4 sends such messages to the main
shell again). While a cell awaits, ipykernel 7 serves them and ipykernel 6 does not.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.rank_output import running_kernel

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run

SUBSHELLS = ((7, 0), (7, 4))
"""The ipykernel versions, from and before, that serve clicks on a subshell."""


@dataclass(frozen=True)
class KernelNow:
    """What the kernel is doing.

    Attributes:
        version: ipykernel's major and minor version.
        busy: Whether a cell has begun and not ended.
        blocked: Whether that cell holds the main thread, rather than awaiting something.
        subshell: Whether a front end has opened a subshell.
    """

    version: tuple[int, int]
    busy: bool
    blocked: bool
    subshell: bool

    @property
    def serves_clicks(self) -> bool:
        """Whether a click is answered now."""
        if not self.busy:
            return True
        if self.blocked:
            return self.subshell and SUBSHELLS[0] <= self.version < SUBSHELLS[1]
        return self.version >= (7, 0)


def look_at_kernel() -> KernelNow | None:
    """Return what the kernel is doing; None outside one."""
    kernel = running_kernel()
    if kernel is None:
        return None
    from ipykernel import _version

    major, minor = _version.__version__.split(".")[:2]
    return KernelNow((int(major), int(minor)), _busy(kernel.shell), _blocked(), _has_subshell(kernel))


def _busy(shell: Any) -> bool:
    # A cell's input is stored when it begins, its result when it ends. (The counter goes up at the end in IPython 7 and
    # 8, at the beginning in 9.)
    if _blocked():
        return True
    inputs = getattr(getattr(shell, "history_manager", None), "input_hist_parsed", ("",))
    last = getattr(shell, "last_execution_result", None)
    ended = getattr(last, "execution_count", None) if last is not None else 0
    return ended is not None and ended < len(inputs) - 1


def _blocked() -> bool:
    """Whether the main thread is inside a cell's code: an awaiting cell has left the stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "run_code" and "interactiveshell" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _has_subshell(kernel: Any) -> bool:
    try:
        return bool(kernel.shell_channel_thread.manager.list_subshell())
    except Exception:  # noqa: BLE001 - ipykernel 6 has none, and the inside of 7 is not public
        return False


def hint(run: Run, kernel: KernelNow | None) -> str:
    """Return how the run can be stopped now, as a sentence."""
    if run.ended is not None or kernel is None:
        return ""
    if run.status == "stopping":
        return "Stopping: ranks may finish what they save. Kill ends them at once."
    inline = run.plan is not None and run.plan.start_method == "inline"
    if inline:
        return "The run is this kernel itself: stop it with the notebook's own stop button (■)."
    if not kernel.busy:
        return "Stop works by a click now. The notebook's own stop button does not reach a run in the background."
    if kernel.serves_clicks:
        return "Stop works by a click now, and so does the notebook's own stop button (■)."
    if run.config.block or not kernel.blocked:
        return (
            "The cell waits for the run: use the notebook's own stop button (■). A click is served when the cell ends."
        )
    return "Another cell is running: a click is served when it ends."


__all__ = ["KernelNow", "hint", "look_at_kernel"]
