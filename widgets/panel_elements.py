"""Elements that panels and forms share: scripts, style sheets, boxes, messages and MIME bundles.

Importing this module imports no widget library, because panels without widgets use it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from notebook_accelerate.errors import SITE
from notebook_accelerate.launch.report.markup import Markup, element, join

PANEL_STYLES = ("palette.css", "panel.css")
"""The style sheets of panels."""
GUIDES = {
    "run": "guides/run_panel.html",
    "table": "guides/run_panel.html#compare-runs",
    "form": "guides/config_panel.html",
    "debug": "guides/hangs.html",
    "profile": "guides/profiling.html",
    "memory": "guides/profiling.html#memory",
}
"""The page of the documentation that describes each panel, in the published site."""


@cache
def style_sheet(*names: str) -> Markup:
    """Return style sheets of ``static/`` as an element."""
    return Markup(f"<style>{''.join(map(asset, names))}</style>")


def style_widget(*names: str, guide: str = "") -> Any:
    """Return a widget with style sheets, and with the link to a panel's guide if the panel has a guide.

    Args:
        names: The style sheets.
        guide: The key of the guide in GUIDES, or "" if no link is shown.
    """
    import ipywidgets

    if guide:
        return with_classes(ipywidgets.HTML(join([style_sheet(*names), guide_link(guide)])), "na-guide")
    widget = ipywidgets.HTML(style_sheet(*names))
    widget.layout.display = "none"
    return widget


def guide_link(panel: str) -> Markup:
    """Return a question mark that opens the guide of a panel in a new tab.

    Args:
        panel: The key of the guide in GUIDES.
    """
    hint = "Open the guide to this panel"
    address = f"{SITE}{GUIDES[panel]}"
    return element(
        "a", "?", class_="na-guide-link", href=address, target="_blank", rel="noopener", title=hint, aria_label=hint
    )


def html_widgets(count: int) -> list[Any]:
    """Return HTML widgets of one view, which share a layout and a style.

    Layouts and styles are models, too, so a view with one of each per widget sends three times as many messages. Close
    the widgets together, because closing one also closes its layout and its style.
    """
    import ipywidgets

    first = ipywidgets.HTML()
    return [first, *(ipywidgets.HTML(layout=first.layout, style=first.style) for _ in range(count - 1))]


def with_classes(widget: Any, *names: str) -> Any:
    """Add CSS classes to a widget and return it."""
    for name in names:
        widget.add_class(name)
    return widget


def card(*children: Any, guide: str = "") -> Any:
    """Return the outer box of a run's panel, with the style sheet.

    Args:
        children: The widgets of the panel, from the top.
        guide: The key of the panel's guide in GUIDES, or "" if a child links to it.
    """
    import ipywidgets

    return with_classes(ipywidgets.VBox([style_widget(*PANEL_STYLES, guide=guide), *children]), "na-run", "na-card")


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
        text: The message.
        kind: The CSS class of the message: na-help or na-good.
    """
    return element("span", text, class_=kind, role="status")


def problem(text: str) -> Markup:
    """Return a warning as a paragraph, or "" if there is no text."""
    return element("p", text, class_="na-problem", role="alert") if text else Markup()


def widget_bundle(widget: Any, static: Mapping[str, Any]) -> dict[str, Any]:
    """Return the MIME bundle of a live widget (ipywidgets 7 and 8).

    Args:
        widget: The live widget.
        static: The bundle of its static form, for front ends without widgets.
    """
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view, **static}


def asset(name: str) -> str:
    """Return the text of a file in ``static/``."""
    return files(__package__).joinpath("static").joinpath(name).read_text(encoding="utf-8")


def script(*names: str) -> str:
    """Return files of ``static/`` as one module, in the given order. Definitions must come before their uses.

    A widget's script is sent to the browser as one string, which cannot import other files.
    """
    return "\n".join(asset(name) for name in names)
