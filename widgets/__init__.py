"""Panels and forms of the notebook, importable as notebook_accelerate.widgets: views of a store, never its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.widgets.config_panel import ConfigPanel
    from notebook_accelerate.widgets.forms import Form
    from notebook_accelerate.widgets.training_options import TrainingOptions

__all__ = ["ConfigPanel", "Form", "TrainingOptions"]

# Where each panel lives: importing this package loads no widget library.
_NAMES_OF_MODULE = {
    "widgets.config_panel": ("ConfigPanel",),
    "widgets.forms": ("Form",),
    "widgets.training_options": ("TrainingOptions",),
}

__getattr__, __dir__, _ = attach(__name__, _NAMES_OF_MODULE)
