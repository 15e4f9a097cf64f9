"""Find out what the front end of this kernel shows, and whether the kernel handles clicks now.

Some front ends have no widgets (marimo), a notebook that nbclient executes has no front end, and VS Code may have its
renderer switched off. In these cases, panels show an HTML display, which is updated while the run lasts.

Clicks reach the kernel through its shell channel. While a cell blocks, they wait there, unless the front end has opened
a subshell for them (ipykernel 7.0 to 7.3 with JupyterLab 4.4 and later; 7.4 sends such messages to the main shell
again). While a cell awaits, ipykernel 7 handles them, but ipykernel 6 does not. If a click would have to wait for the
cell that waits for the run, it instead interrupts that cell through the notebook's server.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.replaceable_outputs import MarimoOutput
from notebook_accelerate.launch.output.running_cell import running_kernel
from notebook_accelerate.telemetry.tracebacks import callers, main_frame

if TYPE_CHECKING:
    from notebook_accelerate.launch.output.replaceable_outputs import Output

ANSWER_SECONDS = 10.0
"""Seconds to wait for a front end's report that it has drawn a view. Time counts only while the kernel can handle the
report. A front end that takes longer shows no live widgets. VS Code may have to load a renderer first."""

SUBSHELLS = ((7, 0), (7, 4))
"""The first ipykernel version that handles clicks on a subshell, and the first that no longer does."""


class FrontEnd:
    """Facts about the front end, learned from its messages.

    Attributes:
        drawn: Whether the front end has drawn a live view.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._waited = 0.0
        self._last = float("inf")
        self._noted = False

    @property
    def silent(self) -> bool:
        """Whether the front end had enough time to draw a live view, but did not."""
        return not self.drawn and self._waited >= ANSWER_SECONDS

    def observe(self, now: float, *, handles_messages: bool) -> None:
        """Count the time during which a live view is shown and the kernel handles messages.

        Args:
            now: The time in seconds, on any clock.
            handles_messages: Whether a message from the browser is handled now, not after the running cell.
        """
        if handles_messages and not self.drawn:
            self._waited += min(max(0.0, now - self._last), 1.0)
        self._last = now

    def note(self, reason: str) -> str:
        """Return why panels are HTML displays, so that the first one can show it, or "" for later panels."""
        if self._noted:
            return ""
        self._noted = True
        return f"{reason}: panels are HTML displays here, which are updated while the run lasts."


front_end = FrontEnd()
"""The front end of this kernel."""


def no_widgets(output: Output | None) -> str:
    """Return why a front end shows no live widgets, or "" if it shows them or may do so.

    Args:
        output: An output of the running cell, or None outside a notebook.
    """
    if isinstance(output, MarimoOutput):
        return "marimo shows no ipywidgets"
    if output is not None and not output.interactive:
        return "No front end shows this notebook (its client takes no input, as nbclient)"
    return ""


# ---- the kernel


@dataclass(frozen=True)
class KernelState:
    """The state of the kernel that determines whether it handles clicks.

    Attributes:
        version: ipykernel's major and minor version.
        busy: Whether a cell is running.
        blocked: Whether the running cell blocks the main thread, instead of awaiting something.
        subshell: Whether a front end has opened a subshell.
        id: The kernel's ID on the notebook's server, or "" if it is unknown.
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
    """Return the state of the kernel, or None outside a kernel."""
    kernel = running_kernel()
    if kernel is None:
        return None
    from ipykernel import _version

    major, minor = _version.__version__.split(".")[:2]
    return KernelState((int(major), int(minor)), _busy(kernel.shell), _blocked(), _has_subshell(kernel), _kernel_id())


@cache
def _kernel_id() -> str:
    """Return this kernel's ID on its server, from the name of its connection file, or "" if the name lacks it."""
    with suppress(Exception):  # The kernel may have been started without a connection file.
        from ipykernel.connect import get_connection_file

        found = re.fullmatch(r"kernel-(.+)\.json", PurePath(get_connection_file()).name)
        return found[1] if found is not None else ""
    return ""


def _busy(shell: Any) -> bool:
    # IPython stores a cell's input at its start, and its result at its end. Don't use the counter, which is incremented
    # at the end of a cell in IPython 7 and 8, and at its start in IPython 9.
    if _blocked():
        return True
    inputs = getattr(getattr(shell, "history_manager", None), "input_hist_parsed", ("",))
    last = getattr(shell, "last_execution_result", None)
    ended = getattr(last, "execution_count", None) if last is not None else 0
    return ended is not None and ended < len(inputs) - 1


def _blocked() -> bool:
    """Return whether the main thread is inside a cell's code. A cell that awaits is not on the stack."""
    codes = (frame.f_code for frame in callers(main_frame()))
    return any(code.co_name == "run_code" and "interactiveshell" in code.co_filename for code in codes)


def _has_subshell(kernel: Any) -> bool:
    try:
        return bool(kernel.shell_channel_thread.manager.list_subshell())
    except Exception:  # noqa: BLE001 - ipykernel 6 has no subshells, and this attribute of 7 is private
        return False
