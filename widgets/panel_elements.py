"""What panels and forms share: scripts, style sheets, boxes, messages, and MIME bundles.

Importing this module imports no widget library: panels without widgets use it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.markup import Markup, element

if TYPE_CHECKING:
    from notebook_accelerate.launch.report.document import Node


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


class SectionWidgets:
    """HTML widgets, each with a part of a document that is rendered only if what it shows has changed.

    Args:
        keys: Identify the parts.
    """

    def __init__(self, *keys: str) -> None:
        import ipywidgets

        self.widgets = {key: ipywidgets.HTML() for key in keys}
        self._shown: dict[str, object] = {}

    def show(self, key: str, content: object, view: Callable[[], Node]) -> None:
        """Show a part of a document.

        Args:
            key: Identifies the part.
            content: What the part depends on. If it equals that of the last call, the widget stays as it is.
            view: Returns the part.
        """
        if key not in self._shown or self._shown[key] != content:
            self._shown[key] = content
            self.widgets[key].value = rendering.html(view(), inline=False)


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


def asset(name: str) -> str:
    """Return the text of a file in ``static/``."""
    return files(__package__).joinpath("static").joinpath(name).read_text(encoding="utf-8")


def script(*names: str) -> str:
    """Return files of ``static/`` as one module, in this order: definitions before their uses.

    A widget's script is sent to the browser as one text, which cannot import other files.
    """
    return "\n".join(asset(name) for name in names)
