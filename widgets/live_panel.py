"""The base class of panels, which render while a run lasts and leave their static form in the notebook.

`HtmlPanel` is the panel for front ends without live widgets.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.replaceable_outputs import Output
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets.panel_elements import problem
from notebook_accelerate.widgets.panel_output import CellView, PanelOutput
from notebook_accelerate.widgets.render_schedule import RenderSchedule, ticker

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.document import Section


class PanelOfRun(CellView):
    """A view of one run.

    Args:
        run: The run to watch.
        clock: Seconds since the epoch; a fake one in tests.
        status: Returns the status in the title of the static form; "" for none.
    """

    def __init__(self, run: Run, clock: Callable[[], float], status: Callable[[], str] = lambda: "") -> None:
        self.run = run
        self._clock = clock
        self._shown = PanelOutput(lambda: self.bundle, self._title, clock, status)
        self.closed = False
        self._lives = run.ended is None

    def document(self) -> Section:
        """Return the report of the run."""
        return self.run.report().document()

    @property
    def shown(self) -> bool:
        """Whether an output of a cell shows the view."""
        return bool(self._shown)

    @abstractmethod
    def settle(self) -> bool:
        """Show the end of the run; return whether an output shows it."""

    def _ended(self, _: Run) -> None:
        """Settle. Runs on the supervisor's thread, which must not see any error."""
        with suppress(Exception):
            if self._shown:
                self.settle()

    def _title(self) -> str:
        return f"Run {self.run.id} ({self.run.function_name}), {self.run.status}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of run {self.run.id}: {self.run.status}>"


class LivePanel(PanelOfRun):
    """A live view of a run.

    While the run lasts, each cell that displays the panel shows the same widget. When the run ends, a panel that
    ``stays`` is live as long as its kernel, with its static form hidden beside it, for the saved notebook and for
    readers without the kernel; each cell of another panel keeps the static form only.

    Args:
        run: The run to watch.
        clock: Seconds since the epoch; a fake one in tests.
    """

    stays = False

    def __init__(self, run: Run, clock: Callable[[], float] = steady_time.now) -> None:
        import ipywidgets  # here, because this module also has the panel for front ends without it

        super().__init__(run, clock, lambda: self.run.status)
        self._lock = threading.RLock()
        self._rests = False
        self._shown_at = float("-inf")
        self._request: threading.Thread | None = None
        self._problem = ipywidgets.HTML()
        self.widget: Any = self._build()
        self.schedule = RenderSchedule([run.store], self._tick, self._failed, clock)
        self.schedule.tick()
        run.add_ending_callback(self._ended)

    # ---- implemented by each panel

    @abstractmethod
    def _build(self) -> Any:
        """Create the widget."""

    @abstractmethod
    def _render(self, now: float) -> None:
        """Update the widget."""

    def _show_problem(self, text: str) -> None:
        """Show a problem in ``_problem``, which `_build` puts into the widget; "" removes it."""
        self._problem.value = problem(text)

    def _tick(self, now: float) -> None:
        over = self.run.ended is not None and not self.run.held  # asked first: what comes meanwhile is not rendered yet
        self._render(now)
        if not self._rests:
            self._shown.update(now)
            if self.stays and over and self._shown:
                self._rest()

    # ---- requests to the ranks, on a thread: a rank replies within seconds, at its next step

    def _start_request(self, request: Callable[[], object]) -> bool:
        """Send a request to the ranks; return False if another one is running."""
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

    # ---- being displayed

    def _show_in(self, output: Output) -> None:
        self.schedule.touch()
        self.schedule.tick()
        close_retired()
        with self._lock:
            if self.closed:
                output.show(self.bundle)
            else:
                self._shown.add(output, self.widget)
                self._shown_at = time.monotonic()
        if not self.closed and self.run.ended is None:
            ticker.add(self.schedule)
        if self._lives and self.run.ended is not None:  # it ended while the panel was being shown
            self.settle()

    def _render_soon(self, *_: Any) -> None:
        """Render at the next tick; after the end of the run, when nothing ticks, at once."""
        self.schedule.touch()
        if self.run.ended is not None:
            self.schedule.tick(due=True)

    # ---- the end

    def _refer_to(self, run: Run) -> None:
        """Show ``run`` from now on: the same run, without what the panel must not keep."""
        self.run = run

    def _failed(self, error: Exception) -> None:
        text = f"This panel stopped updating ({type(error).__name__}: {error}). The run continues: print(run.report())"
        self._show_problem(text)

    def settle(self) -> bool:
        """Show the end of the run, live or as the static form; return whether an output of the panel shows it."""
        if not (self.stays and self._shown.stays_live):
            shown = bool(self._shown)
            self.close()
            return shown
        self.schedule.tick(due=True)  # of a run that has ended it rests; held ranks can still be asked
        with suppress(Exception):
            self._shown.leave()
        if self._rests:
            ticker.rest(self.schedule)
        return True

    def _rest(self) -> None:
        """Render only what the user asks for from now on; the oldest of many such panels is closed."""
        self._rests = True
        self._refer_to(self.run.without_results())
        ticker.suspend(self.schedule)
        self._shown.leave()
        with _retiring:
            _resting[:] = [other for other in _resting if not other.closed and other is not self]
            _resting.append(self)

    def close(self) -> None:
        """Stop updating; each cell that displays the panel keeps its static form."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            ticker.remove(self.schedule)
            self._end_outputs()
            if self.run.ended is not None and not self.run.held:
                self._refer_to(self.run.without_results())  # the widgets are deleted later
            with _retiring:
                _retired.append((self._shown_at + DRAWING_SECONDS, self.widget))
            close_retired()

    def _end_outputs(self) -> None:
        """Show the static form; a front end that may still be drawing the live one first shows its last state."""
        left = self._shown_at + SETTLE_SECONDS - time.monotonic()
        if left <= 0 or not self._shown.in_notebook:
            self._shown.end()
            return
        with suppress(Exception):  # the static form is shown in any case
            self._render(self._clock())
        self._shown.leave()
        timer = threading.Timer(left, self._shown.end)
        timer.name, timer.daemon = "notebook-accelerate-panel-end", True
        timer.start()


SETTLE_SECONDS = 3.0
"""A live view stays for this long after it was shown: ipywidgets reports errors for boxes that are removed before their
children are drawn. Until then its static form beside it is that of the end."""
DRAWING_SECONDS = 120.0
"""A front end may still be drawing a view that was shown more recently, and would miss deleted models."""
MAX_RESTING = 10
"""Panels of ended runs that stay live; the cells of older ones keep the static form."""
_retired: list[tuple[float, Any]] = []
_resting: list[LivePanel] = []
_retiring = threading.Lock()


def close_retired(now: float | None = None) -> None:
    """Close the panels that need not stay live, and delete the widgets that no front end can still be drawing.

    Args:
        now: Seconds on the monotonic clock; None: now.
    """
    moment = time.monotonic() if now is None else now
    with _retiring:
        over = [panel for panel in _resting if not panel.shown]
        over += [panel for panel in _resting if panel.shown][:-MAX_RESTING]
        _resting[:] = [panel for panel in _resting if panel not in over]
    for panel in over:
        with suppress(Exception):
            panel.close()
    with _retiring:
        due = [widget for until, widget in _retired if until <= moment]
        _retired[:] = [entry for entry in _retired if entry[0] > moment]
    for widget in due:
        close_all(widget)


def close_all(widget: Any) -> None:
    """Delete a widget and its descendants, in the kernel and in the browser; layouts and styles are models too."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
        if part is not None and hasattr(part, "close"):
            part.close()


def close_hidden(box: Any, *parts: Any) -> None:
    """Delete what a box does not show now: such widgets are not in the tree of a panel, which deletes the others.

    Args:
        box: The box that shows some of the widgets.
        parts: The widgets; None is ignored.
    """
    for part in parts:
        if part is not None and part not in box.children:
            close_all(part)


class HtmlPanel(PanelOfRun):
    """An HTML display of a run's report, which is updated while the run lasts; see `RunPanel`.

    Args:
        run: The run to watch.
        reason: Why there is no live panel.
        clock: Seconds since the epoch; a fake one in tests.
    """

    def __init__(self, run: Run, reason: str, clock: Callable[[], float] = steady_time.now) -> None:
        super().__init__(run, clock)
        self._reason = reason
        self.schedule = RenderSchedule([run.store], self._shown.update, lambda _: None, clock)
        run.add_ending_callback(self._ended)

    def _show_in(self, output: Output) -> None:
        if self.closed or not self._lives:
            output.end(self.bundle)
            return
        self._shown.add(output, None, self._reason)
        ticker.add(self.schedule)
        if self.run.ended is not None:  # it ended while the panel was being shown
            self.close()

    def close(self) -> None:
        """Stop updating; each cell that displays the panel keeps the report."""
        if not self.closed:
            self.closed = True
            ticker.remove(self.schedule)
            self._shown.end()

    def settle(self) -> bool:
        """Show the report of the end; return whether an output shows it."""
        shown = bool(self._shown) or self.closed
        self.close()
        return shown

    def _display_(self) -> Any:
        """Show the panel in the running cell of marimo, which asks for an object to show instead."""
        return self.text if self.show() is None else None
