"""Functions for quantization with bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.big_modeling.quantization import (
        get_keys_to_not_convert as get_keys_to_not_convert,
        get_parameter_device as get_parameter_device,
        get_quantized_model_device_map as get_quantized_model_device_map,
        load_and_quantize_model as load_and_quantize_model,
        quantize_and_offload_8bit as quantize_and_offload_8bit,
        replace_with_bnb_layers as replace_with_bnb_layers,
    )

reexport(__name__)


def has_4bit_bnb_layers(model: torch.nn.Module) -> bool:
    """Return whether a model contains 4-bit layers of bitsandbytes.

    Args:
        model: The model to inspect.
    """
    return any(
        kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes")
        for module in model.modules()
        for kind in type(module).__mro__
    )
