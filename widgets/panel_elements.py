"""Elements that all panels share: style sheets, boxes, messages and MIME bundles.

Importing this module imports no widget library: panels without widgets use it, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import anywidget
import traitlets

from notebook_accelerate.launch.report.markup import Markup, element
from notebook_accelerate.widgets.assets import asset


@cache
def style_sheet(name: str = "panel.css") -> Markup:
    """Return a style sheet of ``static/`` as an element."""
    return Markup(f"<style>{asset(name)}</style>")


def style_widget(name: str = "panel.css") -> Any:
    """Return a hidden widget with a style sheet."""
    import ipywidgets

    widget = ipywidgets.HTML(style_sheet(name))
    widget.layout.display = "none"
    return widget


def with_classes(widget: Any, *names: str) -> Any:
    """Add CSS classes to a widget and return it."""
    for name in names:
        widget.add_class(name)
    return widget


def card(*children: Any) -> Any:
    """Return the box of a run's panel, with its style sheet."""
    import ipywidgets

    return with_classes(ipywidgets.VBox([style_widget(), *children]), "na-run", "na-card")


def row(children: Sequence[Any], name: str) -> Any:
    """Return widgets side by side, in a box of the class ``name``."""
    import ipywidgets

    return with_classes(ipywidgets.HBox(children), name)


def alert(text: str) -> Markup:
    """Return an error message."""
    return element("span", text, class_="na-error", role="alert")


def notice(text: str, kind: str = "na-help") -> Markup:
    """Return a status message.

    Args:
        text: The text.
        kind: na-help or na-good.
    """
    return element("span", text, class_=kind, role="status")


def problem(text: str) -> Markup:
    """Return a warning as a paragraph; "" for no text."""
    return element("p", text, class_="na-problem", role="alert") if text else Markup()


def widget_bundle(widget: Any, static: Mapping[str, Any]) -> dict[str, Any]:
    """Return the MIME bundle of a live widget (ipywidgets 7 and 8).

    Args:
        widget: The widget.
        static: The bundle of its static form, for front ends without widgets.
    """
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view, **static}


# Buttons and rows of text with buttons, without widgets.


@dataclass(frozen=True, kw_only=True)
class Action:
    """A button.

    Attributes:
        id: What a click sends.
        label: The text of the button.
        hint: What a click does.
        tone: "bad" or "first" for another colour; "": the usual one.
        enabled: Whether it can be clicked.
        interrupts: Whether a click interrupts the cell that blocks the kernel, through the notebook's server. Where
            the browser does not reach that, the button is disabled.
    """

    id: str
    label: str
    hint: str
    tone: str = ""
    enabled: bool = True
    interrupts: bool = False


@dataclass(frozen=True, kw_only=True)
class ActionRow:
    """A text and its buttons.

    Attributes:
        key: Identifies the row in later updates.
        text: The text.
        actions: The buttons.
        tone: "bad", "warn" or "".
    """

    key: str
    text: str = ""
    actions: tuple[Action, ...] = ()
    tone: str = ""


# Rows of text with buttons, and a Stop button that works while a cell blocks the kernel.


class ActionRows(anywidget.AnyWidget):
    """Rows of text with buttons.

    Args:
        on_action: Called with the id of the action that was clicked.
        label: Name of the rows for screen readers.
    """

    _esm = asset("actions.js")
    rows: Any = traitlets.List().tag(sync=True)
    note: Any = traitlets.Dict().tag(sync=True)
    label: Any = traitlets.Unicode("").tag(sync=True)
    kernel: Any = traitlets.Unicode("").tag(sync=True)

    def __init__(self, on_action: Callable[[str], None], label: str = "") -> None:
        super().__init__(label=label)
        self._on_action = on_action
        self.on_msg(self._on_message)

    def show(self, rows: Sequence[ActionRow], kernel: str = "", note: str = "", unreachable: str = "") -> None:
        """Show these rows.

        Args:
            rows: The rows, from the top.
            kernel: Id of the kernel on the notebook's server; "": not known.
            note: A text below them.
            unreachable: The text instead of ``note`` where the browser cannot interrupt the kernel; "": ``note``.
        """
        shown = [asdict(row) for row in rows]
        for row in shown:
            row["actions"] = list(row["actions"])
        self.kernel, self.note, self.rows = kernel, {"text": note, "unreachable": unreachable}, shown

    @property
    def text(self) -> str:
        """The rows and the note as plain text, a line each."""
        lines = [" ".join([row["text"], *(f"[{each['label']}]" for each in row["actions"])]) for row in self.rows]
        return "\n".join(filter(None, [*map(str.strip, lines), self.note.get("text", "")]))

    def click(self, action: str) -> None:
        """Do what a click does."""
        self._on_action(action)

    def _on_message(self, _: object, content: object, __: object) -> None:
        if isinstance(content, dict) and content.get("kind") == "click":
            self.click(str(content.get("action")))


# Buttons for a text: Copy, and Insert cell below, which plain ipywidgets cannot do.


class CopyButton(anywidget.AnyWidget):
    """Copies ``text`` to the browser's clipboard, or inserts it as a cell below, when it is clicked.

    Args:
        text: The text.
        label: What is copied, for screen readers, such as "Copy this cell".
        insertable: Whether the text is the code of a cell: it can be inserted in JupyterLab and Notebook.
    """

    _esm = asset("copy.js")
    text: Any = traitlets.Unicode("").tag(sync=True)
    label: Any = traitlets.Unicode("Copy this text").tag(sync=True)
    insertable: Any = traitlets.Bool(default_value=False).tag(sync=True)


# The times at which something is repeated.


class RepeatTimes:
    """The times at which something is repeated: at some ages, then once per period.

    Args:
        ages: Seconds after the start.
        period: Seconds between later repetitions.
    """

    def __init__(self, ages: Sequence[float], period: float = math.inf) -> None:
        self._ages, self._period = ages, period
        self._start: float | None = None
        self._next = math.inf

    def start(self, now: float) -> None:
        """Begin at ``now``, in seconds on any clock."""
        self._start = now
        self.plan(now)

    def plan(self, now: float) -> None:
        """Set the next time, after something was repeated at ``now``."""
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
