"""Where a live view stands in the notebook, and what is left of it there.

A saved notebook holds no widgets: without its kernel a live view is an error message, whatever else its bundle holds.
So a live view has a second output beside it with its static form, which is hidden while the view lives (see
``static/left.css``) and is brought up to date now and then. When the view ends, its place keeps the static form alone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from notebook_accelerate.hardware.detection import host
from notebook_accelerate.launch.output.cell_outputs import CellOutput, forget, leave_at_exit
from notebook_accelerate.widgets.assets import asset
from notebook_accelerate.widgets.render_schedule import live_bundle

if TYPE_CHECKING:
    Bundle = dict[str, Any]

LEAVE_AGES = (2.0, 5.0, 15.0, 30.0)
LEAVE_SECONDS = 60.0
"""The static form beside a live view is made anew soon after the beginning, and every so many seconds."""


class PanelOutput:
    """The places where one view is shown live.

    Args:
        static: Makes the static form, a bundle with text/html and text/plain.
        name: What the view is, in a few words, as it should stand above its static form.
        clock: Seconds since the epoch.
    """

    def __init__(
        self, static: Callable[[], Bundle], name: Callable[[], str], clock: Callable[[], float] = time.time
    ) -> None:
        self._static, self._name, self._clock = static, name, clock
        self._lock = threading.RLock()
        self._places: list[CellOutput] = []
        self._born = 0.0
        self._due = float("inf")
        _all.add(self)

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, place: CellOutput, widget: Any) -> None:
        """Show the live widget in ``place``."""
        widget.add_class("na-live")
        for other in list(_all):  # holding no lock: they are views that another thread may be showing just now
            other._leave_cell(place)
        with self._lock:
            place.show(live_bundle(widget, f"{self._name()}: live in the notebook that it runs in"))
            place.leave(self._left())
            leave_at_exit(place, self._static)
            self._places.append(place)
            self._born = self._clock()
            self._plan(self._born)

    def _leave_cell(self, newer: CellOutput) -> None:
        """Forget places under a cell that was executed again: their output is gone."""
        with self._lock:
            gone = [p for p in self._places if p.notebook_cell and p.notebook_cell == newer.notebook_cell]
            for place in gone:
                if place.cell != newer.cell:
                    self._places.remove(place)
                    forget(place)

    def update(self, now: float) -> None:
        """Bring what is left beside the view up to date, when that is due."""
        if now >= self._due:
            self.leave()
            self._plan(now)

    def leave(self) -> None:
        """Bring what is left beside the view up to date."""
        with self._lock:
            if self._places:
                left = self._left()
                for place in self._places:
                    place.leave(left)

    def _plan(self, now: float) -> None:
        later = [age for age in LEAVE_AGES if self._born + age > now]
        self._due = self._born + later[0] if later else now + LEAVE_SECONDS

    def end(self) -> None:
        """Leave the static form in every place, and forget the places."""
        with self._lock:
            places, self._places = self._places, []
            self._due = float("inf")
            static = self._static() if places else {}
            for place in places:
                with suppress(Exception):  # the others keep theirs all the same
                    place.end(static)
                forget(place)

    def _left(self) -> Bundle:
        static = self._static()
        seen = datetime.fromtimestamp(self._clock()).strftime("%H:%M:%S")
        title = f"{self._name()}, as of {seen}"
        # Where the style sheet does not reach, a static form below the live one should not be in the way.
        opened = " open" if host() == "jupyter" else ""
        html = (
            f"<style>{_sheet()}</style>"
            f'<details class="na-left"{opened}><summary>{escape(title)}</summary>{static["text/html"]}</details>'
        )
        return {"text/html": html, "text/plain": f"{title}\n\n{static['text/plain']}"}


_all: weakref.WeakSet[PanelOutput] = weakref.WeakSet()


@cache
def _sheet() -> str:
    return asset("left.css")


__all__ = ["LEAVE_AGES", "LEAVE_SECONDS", "PanelOutput"]
