"""Re-exports: file names, version limits and lists of allowed values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.big_modeling.module_hooks import (
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    )
    from notebook_accelerate.config.constants import *

reexport(__name__)
