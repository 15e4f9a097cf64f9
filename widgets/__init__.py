"""Panels and forms for notebooks, which show the contents of stores but never own them.

Importable as notebook_accelerate.widgets; importing the package loads no widget library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.widgets.config_panel import ConfigPanel as ConfigPanel
    from notebook_accelerate.widgets.debug_panel import DebugPanel as DebugPanel
    from notebook_accelerate.widgets.forms import Form as Form
    from notebook_accelerate.widgets.memory_panel import MemoryPanel as MemoryPanel
    from notebook_accelerate.widgets.resource_strip import ResourceStrip as ResourceStrip
    from notebook_accelerate.widgets.run_panel import RunPanel as RunPanel
    from notebook_accelerate.widgets.runs_table import RunsTable as RunsTable
    from notebook_accelerate.widgets.training_options import TrainingOptions as TrainingOptions

reexport(__name__)
