"""Display a run. The panels belong to a higher package, so they are only named here, and loaded when first used."""

from __future__ import annotations

import warnings
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.replaceable_outputs import Output, current_output
from notebook_accelerate.launch.output.running_cell import parent_message, running_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accelerate.config.launch_config import LaunchConfig

VIEWS = {
    "panel": "notebook_accelerate.widgets.run_panel:RunPanel",
    "html": "notebook_accelerate.widgets.live_panel:HtmlPanel",
    "debug": "notebook_accelerate.widgets.debug_panel:DebugPanel",
    "runs": "notebook_accelerate.widgets.runs_table:RunsTable",
}
"""The module and class of each view of a run, by name.

A view is called with the run, except for "runs", which is called with a list of runs, or with None for all runs. "html"
is the panel without live widgets.
"""
NO_WIDGETS = "notebook_accelerate.widgets.front_end:no_widgets"
"""The function that returns why the front end of an output does not show live widgets."""

IMPORT_AFTER_SECONDS, LIVE_AFTER_SECONDS = 0.03, 0.1
"""Seconds until a blocking run imports the modules of its live panel, which takes 70 ms in the first launch of a
kernel, and until it shows the panel, which takes 20 ms to create. Shorter runs show only a report."""


class LaunchOutput:
    """The panels of a run, and the output under the launching cell that is reserved for a panel.

    Attributes:
        launched_under: The id of the request whose cell shows the panel, or "" if no panel is shown.
    """

    def __init__(self) -> None:
        self._view: Any = None
        self._debug_view: Any = None
        self._place: Output | None = None
        self.launched_under = ""

    @property
    def cell(self) -> str:
        """The id of the notebook cell that launched the run, or "" if the front end does not send it."""
        return self._place.notebook_cell if self._place is not None else ""

    @property
    def is_live(self) -> bool:
        """Whether a live panel shows the run."""
        return self._view is not None and self._view.is_live

    def is_announced(self, config: LaunchConfig) -> bool:
        """Return whether the launch shows a header, which it does if ``panel`` is True, or "auto" in a notebook."""
        return self._place is not None if config.panel == "auto" else bool(config.panel)

    def reserve(self, config: LaunchConfig) -> None:
        """Reserve an output for the panel under the launching cell, without showing it yet."""
        if config.panel is not False:
            self._place = current_output()

    def create(self) -> None:
        """Create the reserved output, so that the ranks' output appears below the panel.

        Safe to call from any thread.
        """
        if self._place is not None:
            self._place.show({"text/plain": ""})

    def import_panel(self) -> None:
        """Import the modules of the panel, if the front end may show one."""
        if self._place is not None:
            with suppress(Exception):  # `new_panel` handles the error.
                if not _attribute(NO_WIDGETS)(self._place):
                    load("panel")

    def show_panel(self, run: Any) -> None:
        """Show the run's panel in the reserved output. Errors in the panel never interrupt the run."""
        place = self._place
        if place is None:
            return
        if run.ended is None and not try_to_show(lambda: run.panel().show(place)):
            return
        # The run may have ended before its panel was shown.
        if run.ended is not None and (self._view is None or not self._view.settle()):
            place.end(run.report().bundle)
        self.launched_under = place.cell

    def panel(self, run: object) -> Any:
        """Return the run's live panel. Calls return the same object until the panel is closed."""
        if self._view is None or self._view.closed:
            self._view = new_panel(run, self._place if self._place is not None else current_output())
        return self._view

    def debug_panel(self, run: object) -> Any:
        """Return the run's debugging panel. Calls return the same object until the panel is closed."""
        if self._debug_view is None or self._debug_view.closed:
            self._debug_view = load("debug")(run)
        return self._debug_view


def new_panel(run: object, output: Output | None) -> Any:
    """Create a live panel of ``run``, or a panel without widgets if ``output`` cannot show them."""
    reason = str(_attribute(NO_WIDGETS)(output))
    if not reason:
        try:
            return load("panel")(run)
        except Exception as error:  # noqa: BLE001 - widgets are missing, or broken
            reason = f"Widgets cannot be created ({type(error).__name__}: {error})"
    return load("html")(run, reason)


def load(name: str) -> Any:
    """Return the class of the view with this name."""
    return _attribute(VIEWS[name])


def _attribute(path: str) -> Any:
    """Return the object named by ``module:name`` in a higher package."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def try_to_show(action: Callable[[], object]) -> bool:
    """Call ``action``, and return whether it showed a panel. Its errors become warnings and never affect the run."""
    try:
        return action() is not None
    except Exception as error:  # noqa: BLE001 - any error becomes a warning
        text = f"the panel cannot be shown: {type(error).__name__}: {error}; use print(run.report()) instead"
        warnings.warn(text, stacklevel=3)
        return False


def current_cell() -> str:
    """Return the id of the request that is being executed, or "" outside a kernel."""
    kernel = running_kernel()
    header = (parent_message(kernel) or {}).get("header") if kernel is not None else None
    return str((header or {}).get("msg_id", ""))
