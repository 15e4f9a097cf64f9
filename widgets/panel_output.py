"""The outputs of a live view in the notebook.

A saved notebook holds no widgets: without its kernel a live view is an error message, whatever else its bundle holds.
A live view therefore has a second output beside it with its static form, which ``static/left.css`` hides while the view
is live and which is updated regularly. When the view ends, the static form replaces both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from notebook_accelerate.hardware.detection import host
from notebook_accelerate.launch.output.replaceable_outputs import CellOutput, forget, leave_at_exit
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets.feed import RepeatTimes
from notebook_accelerate.widgets.panel_elements import style_sheet, widget_bundle

if TYPE_CHECKING:
    Bundle = dict[str, Any]

LEAVE_AGES = (2.0, 5.0, 15.0, 30.0)
LEAVE_SECONDS = 60.0
"""The static form beside a live view is updated at these ages of the view, and then once per LEAVE_SECONDS."""


class PanelOutput:
    """The outputs that show one live view.

    Args:
        static: Returns the static form, a bundle with text/html and text/plain.
        title: Returns the title above the static form.
        clock: Seconds since the epoch.
    """

    def __init__(
        self, static: Callable[[], Bundle], title: Callable[[], str], clock: Callable[[], float] = steady_time.now
    ) -> None:
        self._static, self._title, self._clock = static, title, clock
        self._lock = threading.RLock()
        self._outputs: list[CellOutput] = []
        self._times = RepeatTimes(LEAVE_AGES, LEAVE_SECONDS)
        _all.add(self)

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def add(self, output: CellOutput, widget: Any) -> None:
        """Show the live widget in ``output``."""
        widget.add_class("na-live")
        for other in list(_all):  # without the lock: another thread may be adding an output to another view
            other._forget_replaced(output)
        with self._lock:
            text = f"{self._title()}: live in the notebook of its kernel"
            output.show(widget_bundle(widget, {"text/plain": text}))
            output.leave(self._beside())
            leave_at_exit(output, self._static)
            self._outputs.append(output)
            self._times.start(self._clock())

    def _forget_replaced(self, newer: CellOutput) -> None:
        """Forget the outputs of a cell that was executed again: they are deleted."""
        with self._lock:
            same = [one for one in self._outputs if one.notebook_cell and one.notebook_cell == newer.notebook_cell]
            for output in same:
                if output.cell != newer.cell:
                    self._outputs.remove(output)
                    forget(output)

    def update(self, now: float) -> None:
        """Update the static form beside the view if that is due."""
        if self._outputs and self._times.due(now):
            self.leave()

    def leave(self) -> None:
        """Update the static form beside the view."""
        with self._lock:
            if self._outputs:
                static = self._beside()
                for output in self._outputs:
                    output.leave(static)

    def end(self) -> None:
        """Show the static form in every output, and forget the outputs."""
        with self._lock:
            outputs, self._outputs = self._outputs, []
            static = self._static() if outputs else {}
            for output in outputs:
                with suppress(Exception):  # the other outputs are still updated
                    output.end(static)
                forget(output)

    def _beside(self) -> Bundle:
        static = self._static()
        title = f"{self._title()}, as of {datetime.fromtimestamp(self._clock()).strftime('%H:%M:%S')}"
        # Closed in front ends that ignore the style sheet: there it is visible below the live view.
        summary, body = element("summary", title), Markup(static["text/html"])
        details = element("details", summary, body, class_="na-left", open=host() == "jupyter")
        html = join([style_sheet("left.css"), details])
        return {"text/html": html, "text/plain": f"{title}\n\n{static['text/plain']}"}


_all: weakref.WeakSet[PanelOutput] = weakref.WeakSet()
