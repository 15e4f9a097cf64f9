"""A button that copies a text: the one thing plain ipywidgets cannot do."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import anywidget
import traitlets


class CopyButton(anywidget.AnyWidget):
    """Puts ``text`` on the browser's clipboard when it is clicked."""

    _esm = files(__package__).joinpath("static/copy.js").read_text(encoding="utf-8")
    text: Any = traitlets.Unicode("").tag(sync=True)
    label: Any = traitlets.Unicode("Copy").tag(sync=True)


__all__ = ["CopyButton"]
