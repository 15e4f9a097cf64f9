"""A button that copies a text, which plain ipywidgets cannot do."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from notebook_accelerate.widgets.assets import asset


class CopyButton(anywidget.AnyWidget):
    """Copies ``text`` to the browser's clipboard when it is clicked."""

    _esm = asset("copy.js")
    text: Any = traitlets.Unicode("").tag(sync=True)
    label: Any = traitlets.Unicode("Copy").tag(sync=True)
