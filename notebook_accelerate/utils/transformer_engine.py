"""Re-export the functions that convert models to fp8 with Transformer Engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.precision.fp8 import (
        apply_fp8_autowrap as apply_fp8_autowrap,
        contextual_fp8_autocast as contextual_fp8_autocast,
        convert_model as convert_model,
        has_transformer_engine_layers as has_transformer_engine_layers,
    )

reexport(__name__)
