"""The part of a run's panel that opens with Debug: the line that opens the debugger, and the panel for its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.report.markup import element
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets.copy_button import CopyButton
from notebook_accelerate.widgets.debug_panel import DebugPanel
from notebook_accelerate.widgets.live_panel import close_all
from notebook_accelerate.widgets.panel_elements import with_classes
from notebook_accelerate.widgets.render_schedule import ticker

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run


class DebugSection:
    """Shows how to open the debugger of a rank, and of ranks that can be asked their locations and values.

    Args:
        run: The run.
        clock: Seconds since the epoch.

    Attributes:
        widget: Empty while the section is closed.
        panel: The panel for the ranks; None until it is opened, and for ranks that have ended.
    """

    def __init__(self, run: Run, clock: Callable[[], float]) -> None:
        self.run, self._clock = run, clock
        self._text = ipywidgets.HTML()
        self._code = ipywidgets.HTML()
        self.copy = CopyButton(label="Copy this line", insertable=True)
        self._line = with_classes(ipywidgets.HBox([self._code, self.copy]), "na-debug-line")
        self.panel: DebugPanel | None = None
        self.widget: Any = with_classes(ipywidgets.VBox(), "na-debug")
        self.shows = ""

    def toggle(self, topic: str) -> None:
        """Open the section, or close it if it shows this topic.

        Args:
            topic: "debug", or "answer" for ranks that wait for input.
        """
        if self.shows == topic:
            self.shows = ""
            self._rest()
            self.widget.children = ()
            return
        self.shows = topic
        self._text.value, code = self._how_to_open(topic)
        self._code.value = element("pre", code, class_="na-code") if code else ""
        self.copy.text = code
        parts = [self._text, *([self._line] if code else [])]
        if topic == "debug" and self._reachable():
            self.panel = self.panel or DebugPanel(self.run, self._clock)
            ticker.add(self.panel.binding)
            parts.append(self.panel.widget)
        self.widget.children = parts

    def update(self) -> None:
        """Show that the ranks have ended meanwhile."""
        if self.shows and not self._reachable() and (self.panel is not None or self.shows == "answer"):
            self._close_panel()
            self.shows = ""
            self.widget.children = ()

    def close(self) -> None:
        """Stop updating; delete what is not shown, which is no part of the panel's tree of widgets."""
        self._close_panel()
        for part in (self._text, self._line):
            if part not in self.widget.children:
                close_all(part)

    def _close_panel(self) -> None:
        if self.panel is not None:
            self._rest()
            self.panel.close()
            self.panel = None

    def _rest(self) -> None:
        if self.panel is not None:
            ticker.suspend(self.panel.binding)

    def _reachable(self) -> bool:
        return self.run.ended is None or self.run.held

    def _how_to_open(self, topic: str) -> tuple[str, str]:
        """Return a text, and the line to type; "" where there is none to type now."""
        waiting = [rank for rank in self.run.prompts if rank not in self.run.commands.prompts.debugged()]
        if topic == "answer" and self.run.config.block:
            return _paragraph("Type the line into the box below the cell that launched the run."), ""
        if topic == "answer":
            text = f"{rank_names(waiting[:1]).capitalize()} asks in the cell that runs this line:"
            return _paragraph(text), _line(self.run, waiting[0] if waiting else None)
        if self._reachable():
            return _paragraph("This line opens the debugger of a rank in its cell:"), _line(self.run)
        text = "The ranks of this run have ended. Launch with debug=True to keep ranks at the failing line, then run:"
        return _paragraph(text), _line(None)


def _paragraph(text: str) -> str:
    return element("p", text)


def _line(run: Run | None, rank: int | None = None) -> str:
    """Return the code that opens a debugger: of a run, if another one could be meant."""
    argument = "" if rank is None else f"rank={rank}"
    known = run_registry.runs()
    others = [each for each in known if run is not None and each.id != run.id and (each.ended is None or each.held)]
    position = next((index for index, each in enumerate(known) if run is not None and each.id == run.id), None)
    of_run = f"runs()[{position}]." if others and position is not None else ""
    imported = vars(sys.modules["__main__"]).get("notebook_accelerate") is sys.modules["notebook_accelerate"]
    start = "" if imported else "import notebook_accelerate; "
    return f"{start}notebook_accelerate.{of_run}debug({argument})"
