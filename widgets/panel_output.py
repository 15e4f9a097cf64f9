"""The outputs of a live view in the notebook.

A saved notebook contains no widgets. Without its kernel, a live view is shown as an error message, whatever else its
bundle contains. A live view therefore has a second output next to it with its static form, which ``static/left.css``
hides while the view is live and which is updated regularly. When the view is closed, the static form replaces both.

In a front end without live widgets, only the static form is shown, and it is updated more often.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from notebook_accelerate.hardware.detection import host
from notebook_accelerate.launch.output.replaceable_outputs import Output, forget, show_static_at_exit
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.state.run_state import ENDED
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets.front_end import front_end, no_widgets
from notebook_accelerate.widgets.panel_elements import notice, style_sheet, widget_bundle

if TYPE_CHECKING:
    Bundle = dict[str, Any]

LEAVE_AGES = (2.0, 5.0, 15.0, 30.0)
LEAVE_SECONDS = 60.0
"""The static form next to a live view is updated at these ages of the view, and then every LEAVE_SECONDS seconds."""
HTML_AGES = tuple(float(age) for age in range(2, 61, 2))
HTML_SECONDS = 10.0
"""The interval after HTML_AGES, for a static form that is shown instead of a live view. Its size may be 100 KB."""


class PanelOutput:
    """The outputs that show one live view.

    Args:
        static: Returns the static form, a bundle with text/html and text/plain.
        title: Returns the title above the static form.
        name: Returns the name of the view, which, unlike the title, does not change.
        clock: Returns the time in seconds since the epoch.
        status: Returns the status of the run that is shown, or "" for other views.
    """

    def __init__(
        self,
        static: Callable[[], Bundle],
        title: Callable[[], str],
        name: Callable[[], str],
        clock: Callable[[], float] = steady_time.now,
        status: Callable[[], str] = lambda: "",
    ) -> None:
        self._static, self._title, self._name = static, title, name
        self._clock, self._status = clock, status
        self._lock = threading.RLock()
        self._outputs: list[Output] = []
        self._html: set[Output] = set()  # These outputs have no live view.
        self._note = ""
        self._times = RepeatTimes(LEAVE_AGES, LEAVE_SECONDS)
        self._instead = False  # Whether the static form is shown instead of the live view.
        _all.add(self)

    def __bool__(self) -> bool:
        return bool(self._outputs)

    @property
    def in_notebook(self) -> bool:
        """Whether a notebook's front end shows an output. The requests of other clients do not name a cell."""
        return any(output.notebook_cell for output in self._outputs)

    @property
    def stays_live(self) -> bool:
        """Whether a live view may stay after its run has ended, because its front end hides the form next to it."""
        is_live = any(output not in self._html for output in self._outputs) and not self._instead
        return is_live and self.in_notebook and host() == "jupyter"

    def add(self, output: Output, widget: Any, reason: str = "") -> None:
        """Show the live widget in ``output``.

        Args:
            output: The output of a cell.
            widget: The widget. If None, only the static form is shown and updated.
            reason: Why there is no widget.
        """
        if widget is not None:
            widget.add_class("na-live")
        for other in list(_all):  # Don't hold the lock here, because another thread may run this for another view.
            other._forget_replaced(output)
        reason = reason or no_widgets(output)
        with self._lock:
            self._outputs.append(output)
            if widget is None or reason:
                self._html.add(output)
                self._use_html(front_end.note(reason), watched=output.interactive)
                output.show(self._updated())
            else:
                text = f"{self._name()}: live view in the original notebook"
                output.show(widget_bundle(widget, {"text/plain": text}))
                output.show_static(self._beside())
            show_static_at_exit(output, self._static)
            self._times.start(self._clock())

    def _use_html(self, note: str, *, watched: bool = True) -> None:
        """Update the static form more often if a user watches it in place of a live view."""
        self._instead = True
        self._note = note or self._note
        self._times = RepeatTimes(HTML_AGES, HTML_SECONDS) if watched else RepeatTimes(LEAVE_AGES, LEAVE_SECONDS)
        self._times.start(self._clock())

    def _forget_replaced(self, newer: Output) -> None:
        """Forget the outputs of a cell that was executed again, because the front end has deleted them."""
        with self._lock:
            same = [one for one in self._outputs if one.notebook_cell and one.notebook_cell == newer.notebook_cell]
            for output in same:
                if output.cell != newer.cell:
                    self._outputs.remove(output)
                    self._html.discard(output)
                    forget(output)

    def update(self, now: float) -> None:
        """Update the static form if an update is due."""
        if not self._outputs:
            return
        if front_end.silent and not self._instead:
            with self._lock:
                self._use_html(front_end.note("This front end has drawn no live panel"))
            self.leave()
        elif self._times.due(now):
            self.leave()

    def leave(self) -> None:
        """Update the static form now."""
        with self._lock:
            html, live = self._html, [output for output in self._outputs if output not in self._html]
            for outputs, form, method in ((html, self._updated, "show"), (live, self._beside, "show_static")):
                bundle = form() if outputs else {}
                for output in outputs:
                    getattr(output, method)(bundle)

    def end(self) -> None:
        """Show the static form in every output, and forget the outputs."""
        with self._lock:
            outputs, self._outputs = self._outputs, []
            self._html.clear()
            static = self._static() if outputs else {}
            for output in outputs:
                with suppress(Exception):  # If this fails, the other outputs are still updated.
                    output.end(static)
                forget(output)

    def _updated(self) -> Bundle:
        """Return the static form for outputs that show it instead of a live view."""
        static = self._static()
        if not self._note:
            return static
        html = join([element("p", notice(self._note)), Markup(static["text/html"])])
        return {**static, "text/html": html, "text/plain": f"{self._note}\n\n{static['text/plain']}"}

    def _beside(self) -> Bundle:
        """Return the static form for outputs that are shown with a live view."""
        static = self._updated()
        if self._status() in ENDED:  # The report itself names the run, so it needs no title.
            body = element("div", Markup(static["text/html"]), class_="na-left")
            return {**static, "text/html": join([style_sheet("left.css"), body])}
        moment = datetime.fromtimestamp(self._clock()).strftime("%H:%M:%S")
        title = f"{self._title()}, as of {moment}"
        summary = element("summary", title)
        if self._status():
            gone = element(
                "span", f"Kernel gone. {self._title()} at {moment}", class_="na-left-gone", style="display:none"
            )
            summary = element("summary", gone, element("span", title))
        # Close the fold in front ends that ignore the style sheet, where it is visible below the live view.
        body = Markup(static["text/html"])
        is_open = host() == "jupyter" or front_end.silent
        details = element("details", summary, body, class_="na-left", open=is_open)
        html = join([style_sheet("left.css"), details])
        return {"text/html": html, "text/plain": f"{title}\n\n{static['text/plain']}"}


_all: weakref.WeakSet[PanelOutput] = weakref.WeakSet()


class RepeatTimes:
    """The times of a repeated action: first at some ages, and then once per period.

    Args:
        ages: The first times, in seconds after the start.
        period: Seconds between the later ones.
    """

    def __init__(self, ages: Sequence[float], period: float = math.inf) -> None:
        self._ages, self._period = ages, period
        self._start: float | None = None
        self._next = math.inf

    def start(self, now: float) -> None:
        """Start at ``now``, in seconds on any clock."""
        self._start = now
        self.plan(now)

    def plan(self, now: float) -> None:
        """Schedule the next repetition after the one at ``now``."""
        assert self._start is not None, "call start() first"
        later = (self._start + age for age in self._ages if self._start + age > now)
        self._next = next(later, now + self._period)

    def due(self, now: float) -> bool:
        """Return whether a repetition is due, and plan the next one. The first call is the start."""
        if self._start is None:
            self.start(now)
        if now < self._next:
            return False
        self.plan(now)
        return True
