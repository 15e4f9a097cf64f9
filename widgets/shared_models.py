"""The layouts and styles that the widgets of a panel share."""

from __future__ import annotations

from typing import Any

import ipywidgets


class SharedModels:
    """Layouts and styles, shared by the widgets that `make` returns.

    Each is a model, and a message to the browser: without sharing, two of three models of a form are these.
    """

    def __init__(self) -> None:
        self._layouts: dict[str, Any] = {}
        self._styles: dict[tuple[Any, str], Any] = {}

    def make(self, kind: Any, *, width: str = "", label: str = "", **traits: Any) -> Any:
        """Return a widget.

        Args:
            kind: Its class.
            width: Its width, as in a style sheet; "": the style sheet's.
            label: Width of its description; "": the class's own.
            **traits: Values of its other traits.
        """
        if width not in self._layouts:
            self._layouts[width] = ipywidgets.Layout(**({"width": width} if width else {}))
        traits["layout"] = self._layouts[width]
        if not kind.class_traits().get("style"):
            return kind(**traits)
        known = self._styles.get((kind, label))
        if known is None:
            made = kind(**traits, **({"style": {"description_width": label}} if label else {}))
            self._styles[kind, label] = made.style
            return made
        return kind(**traits, style=known)
