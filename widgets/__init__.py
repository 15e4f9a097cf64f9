"""Panels and forms of the notebook, importable as notebook_accelerate.widgets: views of a store, never its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.widgets.config_panel import ConfigPanel
    from notebook_accelerate.widgets.debug_panel import DebugPanel
    from notebook_accelerate.widgets.forms import Form
    from notebook_accelerate.widgets.resource_strip import ResourceStrip
    from notebook_accelerate.widgets.run_panel import RunPanel
    from notebook_accelerate.widgets.runs_table import RunsTable
    from notebook_accelerate.widgets.training_options import TrainingOptions

__all__ = ["ConfigPanel", "DebugPanel", "Form", "ResourceStrip", "RunPanel", "RunsTable", "TrainingOptions"]

# Where each panel lives: importing this package loads no widget library.
_NAMES_OF_MODULE = {
    "widgets.config_panel": ("ConfigPanel",),
    "widgets.debug_panel": ("DebugPanel",),
    "widgets.forms": ("Form",),
    "widgets.resource_strip": ("ResourceStrip",),
    "widgets.run_panel": ("RunPanel",),
    "widgets.runs_table": ("RunsTable",),
    "widgets.training_options": ("TrainingOptions",),
}

__getattr__, __dir__, _ = attach(__name__, _NAMES_OF_MODULE)
