"""The display methods of ``Run``; the panels of a higher package are named here, and loaded on first use."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.rank_lines import parent_message, running_kernel
from notebook_accelerate.launch.output.replaceable_outputs import CellOutput, here

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.report.run_report import Report

VIEWS = {
    "panel": "notebook_accelerate.widgets.run_panel:RunPanel",
    "debug": "notebook_accelerate.widgets.debug_panel:DebugPanel",
}
"""The views of a run, by name: module and class, called with the run."""

LIVE_AFTER_SECONDS = 0.3
"""Seconds before a blocking run shows its live panel, which takes 40 ms to create; a shorter run shows its report."""


class RunDisplay:
    """The display half of ``Run``."""

    config: LaunchConfig
    _view: Any = None
    _debug_view: Any = None
    _place: CellOutput | None = None
    _launched_under: str = ""

    @property
    def ended(self) -> float | None:
        """When the run ended, in seconds since the epoch; None while it runs."""
        raise NotImplementedError

    @property
    def held(self) -> bool:
        """Whether ranks are kept for inspection although the run has failed."""
        raise NotImplementedError

    def without_results(self) -> RunDisplay:
        """Return an ended run without its results."""
        raise NotImplementedError

    def report(self) -> Report:
        """Return a report of the run as static HTML and as text."""
        raise NotImplementedError

    def panel(self) -> Any:
        """Return the run's live panel; as the last line of a cell it is displayed, in any number of cells.

        When the run ends, every output that shows the panel keeps the static report; a later call opens the panel on
        the recorded data.

        Raises:
            ImportError: ipywidgets or anywidget is not installed.
        """
        if self._view is None or self._view.closed:
            self._view = load("panel")(self._shown())
        return self._view

    def debug_panel(self) -> Any:
        """Return a panel for debugging the ranks: locations, stacks, expressions; the last line of a cell displays it.

        Raises:
            ImportError: ipywidgets is not installed.
        """
        if self._debug_view is None or self._debug_view.closed:
            self._debug_view = load("debug")(self._shown())
        return self._debug_view

    def _shown(self) -> RunDisplay:
        """Return the run for a view, which lives longer than the user refers to the run and keeps no results."""
        return self if self.ended is None or self.held else self.without_results()

    # ---- called by the launch

    def reserve_output(self) -> None:
        """Reserve an output for the panel under the launching cell; nothing is shown yet."""
        if self.config.panel is not False:
            self._place = here()

    def take_output(self) -> None:
        """Take that output, so that the ranks' output is below the panel; safe from any thread."""
        if self._place is not None:
            self._place.show({"text/plain": ""})

    def show_live(self) -> None:
        """Show the panel in its output; a panel that fails never interrupts the run."""
        place = self._place
        if place is None:
            return
        if self.ended is None and not _try(lambda: self.panel().show(place)):
            return
        if self.ended is not None:  # the run ended before its panel was shown
            if self._view is not None:
                self._view.close()
            place.end(self._static())
        self._launched_under = place.cell

    # ---- called by IPython

    def _repr_html_(self) -> str | None:
        if _cell() and _cell() == self._launched_under:  # its panel is already shown above
            return None
        return str(self.report().html)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self)} if self._repr_html_() is None else self._static()

    def _static(self) -> dict[str, str]:
        return self.report().bundle

    def _ipython_display_(self) -> None:
        """Show the live panel while the run is live; otherwise IPython shows the static form."""
        live = self.ended is None and _cell() != self._launched_under
        if not live or running_kernel() is None or not _try(lambda: self.panel().show()):
            raise NotImplementedError  # IPython then asks for the MIME bundle


def load(name: str) -> Any:
    """Return the class of a view."""
    module, _, attribute = VIEWS[name].partition(":")
    return getattr(import_module(module), attribute)


def _try(action: Any) -> bool:
    try:
        return action() is not None
    except Exception as error:  # noqa: BLE001 - an error of the panel must not affect the run
        text = f"the panel cannot be shown: {type(error).__name__}: {error}; print(run.report()) tells of the run"
        warnings.warn(text, stacklevel=3)
        return False


def _cell() -> str:
    """Return the id of the request that is being executed; "" outside a kernel."""
    kernel = running_kernel()
    header = (parent_message(kernel) or {}).get("header") if kernel is not None else None
    return str((header or {}).get("msg_id", ""))


__all__ = ["VIEWS", "RunDisplay", "load"]
