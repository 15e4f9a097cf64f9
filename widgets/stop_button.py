"""How a run can be stopped now: with a click in the panel, or with the notebook's stop button (■).

Clicks reach the kernel through its shell channel. While a cell blocks, they wait there, unless the front end has opened
a subshell for them (ipykernel 7.0 to 7.3 with JupyterLab 4.4 and later; 7.4 sends such messages to the main shell
again). While a cell awaits, ipykernel 7 handles them and ipykernel 6 does not. Where they wait for the cell that waits
for the run, a click interrupts that cell through the notebook's server instead.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.rank_lines import running_kernel
from notebook_accelerate.telemetry.tracebacks import callers, main_frame
from notebook_accelerate.widgets.panel_elements import Action

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
        id: The kernel's id on the notebook's server; "": not known.
    """

    version: tuple[int, int]
    busy: bool
    blocked: bool
    subshell: bool
    id: str = ""

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
    return KernelState((int(major), int(minor)), _busy(kernel.shell), _blocked(), _has_subshell(kernel), _kernel_id())


@cache
def _kernel_id() -> str:
    """Return the id of this kernel on its server, which is in the name of its connection file; "" if it is not."""
    with suppress(Exception):  # a kernel that was started otherwise
        from ipykernel.connect import get_connection_file

        found = re.fullmatch(r"kernel-(.+)\.json", PurePath(get_connection_file()).name)
        return found[1] if found is not None else ""
    return ""


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
    codes = (frame.f_code for frame in callers(main_frame()))
    return any(code.co_name == "run_code" and "interactiveshell" in code.co_filename for code in codes)


def _has_subshell(kernel: Any) -> bool:
    try:
        return bool(kernel.shell_channel_thread.manager.list_subshell())
    except Exception:  # noqa: BLE001 - ipykernel 6 has no subshells, and this attribute of 7 is private
        return False


@dataclass(frozen=True)
class Stopping:
    """How a run can be stopped now.

    Attributes:
        action: The button.
        note: A sentence about it; "" after the end.
        unreachable: The sentence where the action interrupts and the browser cannot; "": ``note``.
    """

    action: Action
    note: str = ""
    unreachable: str = ""


def stopping(run: Run, kernel: KernelState | None) -> Stopping:
    """Return how a run can be stopped now.

    Args:
        run: The run.
        kernel: The state of the kernel; None outside a kernel.
    """
    kills = run.status == "stopping"
    interrupts = kernel is not None and _interrupts(run, kernel)
    if kills:
        action = Action(id="stop", label="Kill", hint="End every rank immediately", tone="kill", interrupts=interrupts)
        note = "Stopping: ranks may finish saving. Click Kill to end them at once"
        without = "Stopping: ranks may finish saving. Press ■ again to end them at once"
        return Stopping(action, note, without if interrupts else "")
    if run.ended is None and (refusal := run.commands.refusal):
        return Stopping(Action(id="stop", label="Stop", hint=refusal, tone="stop", enabled=False), refusal)
    action = Action(id="stop", label="Stop", hint="Ask every rank to stop", tone="stop", interrupts=interrupts)
    if run.ended is not None or kernel is None:
        return Stopping(action)
    if not kernel.busy:
        return Stopping(action, "Click Stop to end this run (■ does not affect background runs)")
    if interrupts or kernel.handles_clicks:
        note = "Click Stop, or ■ in the toolbar, to end this run"
        return Stopping(action, note, "Press ■ in the toolbar to end this run" if interrupts else "")
    return Stopping(action, "Another cell is running: clicks take effect when it ends")


def _interrupts(run: Run, kernel: KernelState) -> bool:
    """Return whether an interrupt of the running cell stops the run, and a click would have to wait for that cell."""
    if _is_inline(run):
        return kernel.busy
    return kernel.busy and not kernel.handles_clicks and (run.config.block or not kernel.blocked)


def _is_inline(run: Run) -> bool:
    return run.plan is not None and run.plan.start_method == "inline"
