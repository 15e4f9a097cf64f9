"""The base classes of panels: how a view is shown in cells, updated, and replaced by its static form at the end.

`HtmlPanel` is the panel of a run for front ends without live widgets.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.replaceable_outputs import Output, current_output
from notebook_accelerate.launch.report.rendering import DocumentView
from notebook_accelerate.launch.run import add_ending_callback, without_results
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets.panel_elements import problem, widget_bundle
from notebook_accelerate.widgets.panel_output import PanelOutput
from notebook_accelerate.widgets.render_schedule import RenderSchedule, ticker

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.document import Section
    from notebook_accelerate.telemetry import Store


class Panel(DocumentView):
    """A view that is displayed in cells. Outside a notebook, its document is displayed instead.

    Each cell that displays the panel shows the same widget, which is updated while its content changes. After
    that, the panel rests, and renders only what the user asks for. A closed panel is replaced by its static form in
    every cell.

    Args:
        stores: The stores whose changes are rendered.
        clock: Returns the time in seconds since the epoch. Tests pass a fake clock.
        reason: Why there is no widget, or "" if there is one.

    Attributes:
        widget: The live view, or None if there is only the document.
        closed: Whether the panel is no longer updated.
    """

    def __init__(
        self, stores: Iterable[Store] = (), clock: Callable[[], float] = steady_time.now, reason: str = ""
    ) -> None:
        self._clock, self._reason = clock, reason
        self._closing = threading.RLock()
        self._shown = PanelOutput(lambda: self.bundle, self._title, self._name, clock, self._status)
        self._shown_at = float("-inf")
        self._problem: Any = None
        self.closed = False
        self.widget: Any = self._build()
        self.schedule = RenderSchedule(stores, self._tick, self._failed, clock)

    # ---- implemented by each panel

    def _build(self) -> Any:
        """Create the widget. A panel whose updates can fail also sets ``_problem``, the HTML widget for the error."""

    def _render(self, now: float) -> None:
        """Update the widget."""

    def _changes(self) -> bool:
        """Return whether the view changes by itself, and must therefore be rendered at every tick."""
        return False

    def _can_rest(self) -> bool:
        """Return whether the view no longer changes by itself and stays live."""
        return not self._changes()

    @abstractmethod
    def _title(self) -> str:
        """Return the title above the static form."""

    def _name(self) -> str:
        """Return the name of the view, which does not change while it is shown."""
        return self._title()

    def _status(self) -> str:
        """Return the status in the title, or "" if the title has none."""
        return ""

    # ---- being displayed

    @property
    def shown(self) -> bool:
        """Whether an output of a cell shows the view."""
        return bool(self._shown)

    @property
    def is_live(self) -> bool:
        """Whether a notebook's front end shows the widget, as far as is known."""
        return not self.closed and self._shown.stays_live

    def show(self, output: Output | None = None) -> Output | None:
        """Show the view.

        Args:
            output: An output of a cell. If None, an output of the running cell is used.

        Returns:
            The output, or None outside a notebook.
        """
        target = output or current_output()
        if target is not None:
            self._show_in(target)
        return target

    def _show_in(self, output: Output) -> None:
        """Show the view in the output of a cell."""
        # Ask before rendering, so that a later tick shows what changes during it.
        changes = self._changes()
        self.schedule.touch()
        self.schedule.tick()
        close_retired()
        with self._closing:
            if self.closed:
                output.end(self.bundle)
                return
            self._shown.add(output, self.widget, self._reason)
            self._shown_at = time.monotonic()
        if changes:
            ticker.add(self.schedule)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle if self.widget is None or self.closed else widget_bundle(self.widget, self.bundle)

    def _ipython_display_(self) -> None:
        if self.show() is None:
            print(self.text)  # noqa: T201 - the display in a terminal

    # ---- updates

    def _tick(self, now: float) -> None:
        rests = self._can_rest()  # Ask before rendering, because a change during it has not been rendered yet.
        self._render(now)
        if rests:
            self._rest()
        else:
            self._shown.update(now)

    def _render_soon(self, *_: Any) -> None:
        """Render at the next tick, or now if the view no longer changes and therefore no longer gets ticks."""
        self.schedule.touch()
        if not self._changes():
            self.schedule.tick(due=True)

    def _rest(self) -> None:
        """Stop ticks. From now on, only what the user asks for is rendered."""
        self._shown.leave()
        ticker.suspend(self.schedule)

    def _show_problem(self, text: str) -> None:
        """Show a problem, or remove it if the text is ""."""
        if self._problem is not None:
            self._problem.value = problem(text)

    def _failed(self, error: Exception) -> None:
        self._show_problem(f"This panel stopped updating ({type(error).__name__}: {error}).")

    # ---- the end

    def close(self) -> None:
        """Stop updating. Each cell that displays the panel keeps its static form."""
        with self._closing:
            if self.closed:
                return
            self.closed = True
            ticker.remove(self.schedule)
            self._end_outputs()
            self._release()
            if self.widget is not None:
                with _retiring:
                    _retired.append((self._shown_at + DRAWING_SECONDS, self.widget))
            close_retired()

    def _release(self) -> None:
        """Release what a closed panel does not need, except its widgets, which are deleted later."""

    def _end_outputs(self) -> None:
        """Show the static form. A front end that may still be drawing the live view first shows its last state."""
        left = self._shown_at + SETTLE_SECONDS - time.monotonic()
        if self.widget is None or left <= 0 or not self._shown.in_notebook:
            self._shown.end()
            return
        with suppress(Exception):  # Even if this fails, the static form is shown below.
            self._render(self._clock())
        self._shown.leave()
        timer = threading.Timer(left, self._shown.end)
        timer.name, timer.daemon = "notebook-accelerate-panel-end", True
        timer.start()


class LivePanel(Panel):
    """A view of a single run.

    A panel that ``stays`` remains live until its kernel exits, even after the run has ended. Its static form is kept in
    a hidden output, for the saved notebook and for readers without the kernel. For other panels, only the static form
    stays in the cell.

    Args:
        run: The run to watch.
        clock: Returns the time in seconds since the epoch. Tests pass a fake clock.
        reason: Why there is no widget, or "" if there is one.
    """

    stays = False

    def __init__(self, run: Run, clock: Callable[[], float] = steady_time.now, reason: str = "") -> None:
        self.run = run
        self._lives = run.ended is None
        self._rests = False
        self._request: threading.Thread | None = None
        super().__init__([internals(run).store], clock, reason)
        self.schedule.tick()
        add_ending_callback(run, self._ended)

    def document(self) -> Section:
        """Return the report of the run."""
        return self.run.report().document()

    def _changes(self) -> bool:
        return self.run.ended is None

    def _can_rest(self) -> bool:
        return self.stays and self.shown and self.run.ended is not None and not self.run.held

    def _title(self) -> str:
        return f"{self._name()}, {self._status()}"

    def _name(self) -> str:
        return f"Run {self.run.id} ({self.run.function_name})"

    def _status(self) -> str:
        return self.run.status

    def _show_in(self, output: Output) -> None:
        super()._show_in(output)
        if self._lives and self.run.ended is not None:  # The run ended while the panel was being shown.
            self.settle()

    # ---- requests to the ranks, on a thread, because a rank replies only at its next step, which may take seconds

    def _start_request(self, request: Callable[[], object]) -> bool:
        """Send a request to the ranks, or return False if another request is running."""
        if self._request is not None and self._request.is_alive():
            self._show_problem("The previous request is still running; wait for its reply.")
            return False
        self._show_problem("")
        self._request = self._start_thread(lambda: self._send_request(request))
        return True

    def _send_request(self, request: Callable[[], object]) -> None:
        try:
            request()
        except Exception as error:  # noqa: BLE001 - an error is the reply to the request
            self._show_problem(str(error) or type(error).__name__)
        self._render_soon()

    def _start_thread(self, work: Callable[[], object]) -> threading.Thread:
        name = f"notebook-accelerate-panel-request-{self.run.id}"
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    # ---- the end

    def _ended(self, _: Run) -> None:
        """Settle the panel at the end of its run. Errors must not reach the supervisor's thread, which calls this."""
        with suppress(Exception):
            if self._shown:
                self.settle()

    def _refer_to(self, run: Run) -> None:
        """Replace the run with ``run``, the same run without the objects that the panel must not keep alive."""
        self.run = run

    def _failed(self, error: Exception) -> None:
        text = f"This panel stopped updating ({type(error).__name__}: {error}). The run continues: print(run.report())"
        self._show_problem(text)

    def settle(self) -> bool:
        """Show how the run ended, live or in the static form. Return whether any output of the panel shows it."""
        if not (self.stays and self._shown.stays_live):
            shown = self.shown
            self.close()
            return shown
        self.schedule.tick(due=True)  # The panel of an ended run rests, even though held ranks can still be asked.
        with suppress(Exception):
            self._shown.leave()
        if self._rests:
            ticker.rest(self.schedule)
        return True

    def _rest(self) -> None:
        if self._rests:
            return
        self._rests = True
        self._refer_to(without_results(self.run))
        super()._rest()
        _resting.add(self)

    def _release(self) -> None:
        if self.run.ended is not None and not self.run.held:
            self._refer_to(without_results(self.run))


class HtmlPanel(LivePanel):
    """An HTML display of a run's report, which is updated while the run lasts; see `RunPanel`.

    Args:
        run: The run to watch.
        reason: Why there is no live panel.
        clock: Returns the time in seconds since the epoch. Tests pass a fake clock.
    """

    def __init__(self, run: Run, reason: str, clock: Callable[[], float] = steady_time.now) -> None:
        super().__init__(run, clock, reason)
        self.closed = not self._lives

    def settle(self) -> bool:
        # If the run ended while this panel was being shown, closing the panel has already shown the end.
        was_closed = self.closed
        return super().settle() or was_closed

    def _display_(self) -> Any:
        """Show the panel in the running cell of marimo, which asks for an object to show instead."""
        return self.text if self.show() is None else None


class NewestPanels:
    """Panels that stay live even though nothing updates them. If there are more than ``limit``, the oldest are closed.

    Args:
        limit: The maximum number of such panels.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._panels: list[Panel] = []

    def add(self, panel: Panel) -> None:
        """Add a panel, as the newest."""
        with self._lock:
            self._panels = [*(other for other in self._panels if other is not panel and not other.closed), panel]

    def close_older(self) -> None:
        """Close the panels beyond the limit, and those that no output shows."""
        with self._lock:
            before, self._panels = self._panels, [panel for panel in self._panels if panel.shown][-self._limit :]
            over = [panel for panel in before if panel not in self._panels]
        for panel in over:
            with suppress(Exception):  # The panel's widgets may have been deleted already.
                panel.close()


SETTLE_SECONDS = 3.0
"""Seconds for which a live view stays after it was shown, because ipywidgets reports errors for boxes that are removed
before their children are drawn. If the run ends earlier, the static form next to the view already shows the end."""
DRAWING_SECONDS = 120.0
"""How long a front end may still be drawing a view, in seconds. Until then, the view's models must not be deleted."""
_retired: list[tuple[float, Any]] = []
_retiring = threading.Lock()
_resting = NewestPanels(10)
"""The panels of ended runs that stay live. The cells of older panels keep the static form."""


def close_retired(now: float | None = None) -> None:
    """Close panels that do not have to stay live, and delete widgets that no front end can still be drawing.

    Args:
        now: The time in seconds on the monotonic clock. If None, the current time is used.
    """
    moment = time.monotonic() if now is None else now
    _resting.close_older()
    with _retiring:
        due = [widget for until, widget in _retired if until <= moment]
        _retired[:] = [entry for entry in _retired if entry[0] > moment]
    for widget in due:
        close_all(widget)


def close_all(widget: Any) -> None:
    """Delete a widget and its descendants, with their layouts and styles, in the kernel and in the browser."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
        if part is not None and hasattr(part, "close"):
            part.close()


def close_hidden(box: Any, *parts: Any) -> None:
    """Delete the widgets that a box does not show now. Closing a panel deletes only the widgets in its tree.

    Args:
        box: The box that shows some of the widgets.
        parts: The widgets that the box can show. None is ignored.
    """
    for part in parts:
        if part is not None and part not in box.children:
            close_all(part)
