"""The display methods of ``Run``; the panels of a higher package are named here, and loaded on first use."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.rank_lines import parent_message, running_kernel
from notebook_accelerate.launch.output.replaceable_outputs import Output, here

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.report.run_report import Report

VIEWS = {
    "panel": "notebook_accelerate.widgets.run_panel:RunPanel",
    "html": "notebook_accelerate.widgets.live_panel:HtmlPanel",
    "debug": "notebook_accelerate.widgets.debug_panel:DebugPanel",
    "runs": "notebook_accelerate.widgets.runs_table:RunsTable",
}
"""The views of a run, by name: module and class, called with the run. "html" is the panel without live widgets, and
"runs" is called with several runs, or with None for all."""
NO_WIDGETS = "notebook_accelerate.widgets.front_end:no_widgets"
"""Returns why the front end of an output shows no live widgets."""

LIVE_AFTER_SECONDS = 0.3
"""Seconds before a blocking run shows its live panel, which takes 40 ms to create; a shorter run shows its report."""


class RunDisplay:
    """The display half of ``Run``."""

    config: LaunchConfig
    _view: Any = None
    _debug_view: Any = None
    _place: Output | None = None
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

        In JupyterLab and Notebook the panel stays live after the end of the run, as long as its kernel; the saved
        notebook, and a reader without the kernel, have the static report. In other front ends the report replaces the
        panel. Where live widgets are not available, the panel is the report, updated while the run lasts.
        """
        if self._view is None or self._view.closed:
            self._view = self._new_panel(self._place if self._place is not None else here())
        return self._view

    def _new_panel(self, output: Output | None) -> Any:
        """Return a live panel, or one without widgets where they are not available."""
        reason = str(_attribute(NO_WIDGETS)(output))
        if not reason:
            try:
                return load("panel")(self._shown())
            except Exception as error:  # noqa: BLE001 - widgets are missing, or broken
                reason = f"Widgets cannot be created ({type(error).__name__}: {error})"
        return load("html")(self._shown(), reason)

    def debug_panel(self) -> Any:
        """Return a panel for debugging the ranks: locations, stacks, expressions; the last line of a cell displays it.

        Raises:
            ImportError: ipywidgets is not installed.
        """
        if self._debug_view is None or self._debug_view.closed:
            self._debug_view = load("debug")(self._shown())
        return self._debug_view

    @property
    def launching_cell(self) -> str:
        """The id of the notebook's cell that launched the run; "" if the front end does not send it."""
        return self._place.notebook_cell if self._place is not None else ""

    def _shown(self) -> RunDisplay:
        """Return the run for a view, which lives longer than the user refers to the run and keeps no results."""
        return self if self.ended is None or self.held else self.without_results()

    # ---- called by the launch

    @property
    def displayed(self) -> bool:
        """Whether the launch shows a header: ``panel`` says so, or "auto" and the launch is in a notebook's cell."""
        return self._place is not None if self.config.panel == "auto" else bool(self.config.panel)

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
        # The run may have ended before its panel was shown.
        if self.ended is not None and (self._view is None or not self._view.settle()):
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
    return _attribute(VIEWS[name])


def _attribute(path: str) -> Any:
    """Return what ``module:name`` names, in a higher package."""
    module, _, attribute = path.partition(":")
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
