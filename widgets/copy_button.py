"""Buttons for a text: Copy, and Insert cell below, which plain ipywidgets cannot do."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from notebook_accelerate.widgets.assets import asset


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
