"""Quantize weights to 8 or 4 bits with bitsandbytes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.big_modeling.checkpoint_shards import find_shards
from notebook_accelerate.big_modeling.device_map import make_device_map
from notebook_accelerate.big_modeling.dispatching import dispatch_model
from notebook_accelerate.big_modeling.empty_init import init_empty_weights
from notebook_accelerate.big_modeling.module_tensors import (
    device_of,
    find_tied_parameters,
    name_of_scales,
    retie_parameters,
    set_module_tensor_to_device,
)
from notebook_accelerate.big_modeling.module_tree import find_tensor, full_name, prefixes, submodule
from notebook_accelerate.big_modeling.offload_folder import offload_weight, save_offload_index
from notebook_accelerate.config.low_precision import BnbQuantizationConfig
from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.hardware.versions import is_package

_LOG = accelerate_logger("utils.bnb")


def load_and_quantize_model(
    model: torch.nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Any = None,
    no_split_module_classes: Any = None,
    max_memory: Mapping[Any, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001
) -> torch.nn.Module:
    """Quantize a model's linear layers, either with the model's own weights, or while loading weights.

    Args:
        model: The model, on the meta device if weights are to be loaded.
        bnb_quantization_config: The settings that say which layers to quantize, and how.
        weights_location: A file, an index, or a folder that contains one of them. It is required if the model is on the
            meta device.
        device_map: The device of each module by name, or a strategy ("auto", ...). If None, the accelerator is used if
            there is one, or else the CPU.
        no_split_module_classes: The names of classes that are not split across devices.
        max_memory: The limit of each device for a strategy, in bytes or as a string such as "10GB".
        offload_folder: The folder for modules on "disk". Offloaded modules are kept in 8 bits, with their scales. With
            4 bits, they are not quantized, because bitsandbytes cannot load them for a forward pass.
        offload_state_dict: Accepted for compatibility, but not needed: only one tensor is in memory at a time.

    Returns:
        The model, quantized in place, on its devices.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: The model is on the meta device without `weights_location`, or the map needs an `offload_folder`.
        CheckpointError: The weights cannot be read, or belong to another model.
    """
    if not is_package("bitsandbytes"):
        raise ImportError("Quantization needs bitsandbytes, which is not installed: pip install bitsandbytes")
    config = bnb_quantization_config
    kept = list(get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules)
    float32 = list(config.keep_in_fp32_modules or [])
    empty = any(parameter.device.type == "meta" for parameter in model.parameters())
    if empty and weights_location is None:
        raise ValueError(
            "`weights_location` should be the folder path containing the weights of the model: the model is on the "
            "meta device, so it has none of its own. Write weights_location='a_folder'."
        )
    if isinstance(device_map, str) or device_map is None:
        device_map = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    _make_folder(device_map, offload_folder)
    away = offloaded_modules(device_map)
    if away and config.load_in_4bit:
        _LOG.warning("%s will not be quantized: they are offloaded.", ", ".join(away))
        kept += away
    if not empty:
        _LOG.warning(
            "The weights of this model are in memory before they are quantized. To need less memory, create the model "
            "under init_empty_weights(), and pass weights_location."
        )
    tied = find_tied_parameters(model)
    source = None if empty or weights_location is not None else model.state_dict()
    model = replace_with_bnb_layers(model, config, modules_to_not_convert=[*kept, *float32])
    make_offloadable_below(model, away)
    _load_weights(model, config, source, weights_location, device_map, offload_folder)
    retie_parameters(model, tied)
    model.is_quantized = True  # type: ignore[assignment]
    model.is_loaded_in_4bit = config.load_in_4bit  # type: ignore[assignment]
    model.is_loaded_in_8bit = config.load_in_8bit  # type: ignore[assignment]
    if len({str(device) for device in device_map.values()}) == 1 and not away:
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    return dispatch_model(model, device_map, offload_dir=offload_folder)


def _make_folder(device_map: Mapping[str, Any], folder: Any) -> None:
    if "disk" in [str(device) for device in device_map.values()]:
        if folder is None:
            raise ValueError(
                "The device map puts modules on disk, but offload_folder is None; pass offload_folder='a_folder'."
            )
        Path(folder).mkdir(parents=True, exist_ok=True)


def offloaded_modules(device_map: Mapping[str, Any]) -> list[str]:
    """List the modules whose weights are loaded for each forward pass.

    Args:
        device_map: The device of each module by name. If the map has an accelerator, modules on the CPU are offloaded.
    """
    has_accelerator = bool({str(device) for device in device_map.values()} - {"cpu", "disk"})
    return [
        name
        for name, device in device_map.items()
        if str(device) == "disk" or (has_accelerator and str(device) == "cpu")
    ]


def _load_weights(
    model: torch.nn.Module, config: Any, own: Any, location: Any, device_map: Mapping[str, Any], folder: Any
) -> None:
    """Move each weight to its device, in the right dtype. Moving the weight of a quantized layer quantizes it."""
    parts = [own.items()] if own is not None else (
        ((name, source.load(torch.device("cpu"))) for name, source in shard.sources().items())
        for shard in find_shards(location)
    )  # fmt: skip
    index: dict[str, Any] = {}
    missing = set(model.state_dict()) if own is None else set()
    for part in parts:
        for name, value in part:
            missing.discard(name)
            device = device_of(name, device_map)
            if is_offloadable(model, name):
                missing.discard(name_of_scales(name))
                keep_8bit(model, name, value.to(config.torch_dtype), None if str(device) != "disk" else folder, index)
            elif str(device) == "disk":
                cast = _cast(name, value, config)
                index = offload_weight(cast, name, folder, index=index)
                # In each forward pass, the weight is loaded in the dtype of this tensor.
                _place(model, name, torch.empty_like(cast, device="meta"), "meta")
            else:
                _place(model, name, _cast(name, value, config), "cpu" if device is None else device)
    save_offload_index(index, folder)
    left = [
        name for name in sorted(missing) if name not in index and getattr(find_tensor(model, name), "is_meta", False)
    ]
    if left:
        raise CheckpointMismatchError(
            f"{location} contains no {', '.join(left[:5])}: it belongs to another model; pass this model's "
            "weights_location"
        )


def keep_8bit(model: torch.nn.Module, name: str, value: torch.Tensor, folder: Any, index: dict[str, Any]) -> None:
    """Quantize an offloaded weight, and keep it in 8 bits.

    Args:
        model: The model that has the weight.
        name: The dotted name of the weight.
        value: The weight, in floating point.
        folder: The offload folder, or None to keep the weight in CPU memory.
        index: The index of the folder. The weight's dtype and shape are added to it.
    """
    from notebook_accelerate.big_modeling import eight_bit  # Import it only here, because it needs bitsandbytes.

    if folder is None:
        eight_bit.place_8bit(model, name, value)
    else:
        eight_bit.offload_8bit(model, name, value, folder, index)


def make_offloadable_below(model: torch.nn.Module, names: list[str]) -> None:
    """Replace bitsandbytes' 8-bit layers in some modules with layers whose weights can be offloaded.

    Args:
        model: The model, changed in place.
        names: The names of the modules.
    """
    layers = [name for name, module in model.named_modules() if type(module).__name__ == "Linear8bitLt"]
    for layer in layers:
        if set(prefixes(layer)) & set(names):
            from notebook_accelerate.big_modeling.eight_bit import make_offloadable

            make_offloadable(model, layer)


def is_offloadable(model: torch.nn.Module, name: str) -> bool:
    """Return whether a tensor is the weight of an 8-bit layer whose weights can be offloaded.

    Args:
        model: The model that has the tensor.
        name: The dotted name of the tensor.
    """
    owner, _, key = name.rpartition(".")
    try:
        return key == "weight" and type(model.get_submodule(owner)).__name__ == "OffloadedLinear8bitLt"
    except AttributeError:
        return False


def _cast(name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    float32 = any(part in name.split(".") or name.startswith(part) for part in config.keep_in_fp32_modules or [])
    return value.to(torch.float32 if float32 else config.torch_dtype)


def _place(model: torch.nn.Module, name: str, value: torch.Tensor, device: Any) -> None:
    try:
        owner, key = submodule(model, name)
    except AttributeError:
        return
    old = owner._parameters.get(key)
    if type(old).__name__ in ("Int8Params", "Params4bit") and isinstance(old, torch.nn.Parameter):
        kind: Any = type(old)
        parameter = kind(value, requires_grad=False, **old.__dict__)
        owner._parameters[key] = parameter.to(device)  # Moving the weight quantizes it.
    elif key in owner._parameters or key in owner._buffers:
        set_module_tensor_to_device(owner, key, device, value=value, dtype=value.dtype)


def get_quantized_model_device_map(
    model: torch.nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: Any = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
) -> dict[str, Any]:
    """Create a device map for a model that will be quantized, based on the sizes after quantization.

    Args:
        model: The model before it is quantized.
        bnb_quantization_config: The settings that say which layers are quantized.
        device_map: "auto", "balanced", "balanced_low_0", "sequential", a map, or None for a single device.
        max_memory: The limit of each device, in bytes or as a string such as "10GB".
        no_split_module_classes: The names of classes that are not split across devices.

    Raises:
        ValueError: The strategy is unknown.
    """
    if device_map is None:
        accelerator = torch.accelerator.current_accelerator()
        return {"": "cpu" if accelerator is None else torch.accelerator.current_device_index()}
    if not isinstance(device_map, str):
        return dict(device_map)
    config = bnb_quantization_config
    unquantized = set(config.skip_modules or []) | set(config.keep_in_fp32_modules or [])
    special = {
        name: torch.float32 if set(name.split(".")) & set(config.keep_in_fp32_modules or []) else config.torch_dtype
        for name, _ in model.named_parameters()
        if set(prefixes(name)) & unquantized or set(name.split(".")) & unquantized
    }
    return make_device_map(
        model,
        device_map,
        max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=config.target_dtype,
        special_dtypes=special,
    )


def get_keys_to_not_convert(model: torch.nn.Module) -> list[str]:
    """List the modules that should not be quantized: the last module (the head) and modules with tied weights.

    Args:
        model: The model that will be quantized.
    """
    tied = sorted({name for group in find_tied_parameters(model) for name in group[1:]})
    children = list(model.named_children())
    last = [children[-1][0]] if children else []
    found = [*last, *(name for name in tied if name not in last)]
    return [name.removesuffix(".weight").removesuffix(".bias") for name in found]


def replace_with_bnb_layers(
    model: torch.nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: list[str] | None = None,
    current_key_name: list[str] | None = None,
) -> torch.nn.Module:
    """Replace linear layers with empty bitsandbytes layers.

    Args:
        model: The model, changed in place.
        bnb_quantization_config: The number of bits (8 or 4) and the options.
        modules_to_not_convert: The names, or parts of names, of modules that are not replaced.
        current_key_name: The name of the model inside a larger model.

    Returns:
        The model with its layers replaced.
    """
    kept = set(modules_to_not_convert or [])
    root = ".".join(current_key_name or [])
    replaced = False
    for name, module in list(model.named_modules()):
        path = full_name(root, name)
        if not isinstance(module, torch.nn.Linear) or kept & {*prefixes(path)[1:], *path.split(".")} or not name:
            continue
        owner, key = submodule(model, name)
        setattr(owner, key, _quantized_like(module, bnb_quantization_config))
        replaced = True
    if not replaced:
        _LOG.warning("No linear modules were found in the model: nothing is quantized.")
    return model


def _quantized_like(linear: torch.nn.Linear, config: Any) -> torch.nn.Module:
    bnb: Any = importlib.import_module("bitsandbytes")
    shape = (linear.in_features, linear.out_features)
    made: torch.nn.Module
    with init_empty_weights():
        if config.load_in_8bit:
            made = bnb.nn.Linear8bitLt(
                *shape, bias=linear.bias is not None, has_fp16_weights=False, threshold=config.llm_int8_threshold
            )
        else:
            made = bnb.nn.Linear4bit(
                *shape,
                bias=linear.bias is not None,
                compute_dtype=config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
    made.requires_grad_(False)
    return made.train(linear.training)


def get_parameter_device(parameter: torch.nn.Module) -> torch.device:
    """Return the device of a module's first parameter.

    Args:
        parameter: The module (the name is Accelerate's).
    """
    return next(parameter.parameters()).device


def quantize_and_offload_8bit(
    model: torch.nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: str | os.PathLike[str],
    offload_index: dict[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Quantize a weight to 8 bits and write it, with its scales, to an offload folder.

    Args:
        model: The model that has the weight. The weight's layer is replaced with one whose weights can be offloaded.
        param: The weight, in floating point, or in int8 if `fp16_statistics` is given.
        param_name: The dotted name of the weight.
        new_dtype: The dtype that the weight is converted to before it is quantized.
        offload_folder: The offload folder to write to.
        offload_index: The index of the folder. The weight's dtype and shape are added to it.
        fp16_statistics: The scales, if `param` is already quantized.
    """
    from notebook_accelerate.big_modeling.eight_bit import offload_8bit

    weight = param.to(new_dtype) if fp16_statistics is None else param
    offload_8bit(model, param_name, weight, offload_folder, offload_index, fp16_statistics)
