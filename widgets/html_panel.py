"""The panel of a run in a front end without live widgets: its report as HTML, updated while the run lasts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.replaceable_outputs import Output, here
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets.panel_output import PanelOutput
from notebook_accelerate.widgets.render_schedule import RenderSchedule, ticker

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run


class HtmlPanel:
    """An HTML display of a run's report, which is updated while the run lasts; see `RunPanel`.

    Args:
        run: The run to watch.
        reason: Why there is no live panel.
        clock: Seconds since the epoch; a fake one in tests.
    """

    def __init__(self, run: Run, reason: str, clock: Callable[[], float] = steady_time.now) -> None:
        self.run = run
        self.closed = False
        self._lives = run.ended is None
        self._shown = PanelOutput(self._static, self._title, clock)
        self._reason = reason
        self.binding = RenderSchedule([run.store], self._shown.update, lambda _: None, clock)
        run.add_ending_callback(self._ended)

    def show(self, output: Output | None = None) -> Output | None:
        """Show the panel; see `LivePanel.show`."""
        target = output or here()
        if target is None:
            return None
        if self.closed or not self._lives:
            target.end(self._static())
            return target
        self._shown.add(target, None, self._reason)
        ticker.add(self.binding)
        if self.run.ended is not None:  # it ended while the panel was being shown
            self.close()
        return target

    def close(self) -> None:
        """Stop updating; each cell that displays the panel keeps the report."""
        if not self.closed:
            self.closed = True
            ticker.remove(self.binding)
            self._shown.end()

    def settle(self) -> bool:
        """Show the report of the end; return whether an output shows it."""
        shown = bool(self._shown) or self.closed
        self.close()
        return shown

    def _ended(self, _: Run) -> None:
        with suppress(Exception):  # the supervisor's thread must not see any error
            self.close()

    def _title(self) -> str:
        return f"Run {self.run.id} ({self.run.function_name}), {self.run.status}"

    def _static(self) -> dict[str, Any]:
        return dict(self.run.report().bundle)

    def _ipython_display_(self) -> None:
        if self.show() is None:
            print(self._static()["text/plain"])  # noqa: T201 - in a terminal's IPython printing displays

    def _display_(self) -> Any:
        """Show the panel in the running cell of marimo, which asks for an object to show instead."""
        if self.show() is None:
            return self._static()["text/plain"]
        return None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self._static()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of run {self.run.id}: {self.run.status}>"
