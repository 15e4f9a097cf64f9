"""Re-export the functions that convert models to fp8 with torchao."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.precision.fp8 import (
        convert_model_to_fp8_ao as convert_model_to_fp8_ao,
        filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
        filter_linear_layers as filter_linear_layers,
        find_first_last_linear_layers as find_first_last_linear_layers,
        has_ao_layers as has_ao_layers,
    )

reexport(__name__)
