"""Re-exports: quantization with bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.big_modeling.quantization import (
        get_keys_to_not_convert as get_keys_to_not_convert,
        get_parameter_device as get_parameter_device,
        get_quantized_model_device_map as get_quantized_model_device_map,
        has_4bit_bnb_layers as has_4bit_bnb_layers,
        load_and_quantize_model as load_and_quantize_model,
        quantize_and_offload_8bit as quantize_and_offload_8bit,
        replace_with_bnb_layers as replace_with_bnb_layers,
    )

reexport(__name__)
