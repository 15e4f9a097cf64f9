"""Attaches hooks to the modules of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from notebook_accelerate.big_modeling.align_hook import AlignDevicesHook
from notebook_accelerate.big_modeling.module_hooks import LayerwiseCastingHook, add_hook_to_module
from notebook_accelerate.big_modeling.module_sizes import as_names, named_module_tensors
from notebook_accelerate.big_modeling.module_tensors import TiedParams
from notebook_accelerate.big_modeling.module_tree import full_name
from notebook_accelerate.big_modeling.offload_folder import PrefixedDataset

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d,
    torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d,
    torch.nn.Linear,
)  # fmt: skip
"""Layers that `attach_layerwise_casting_hooks` casts; normalizations are small and need their precision."""


def attach_execution_device_hook(
    module: torch.nn.Module,
    execution_device: Any,
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach hooks to all modules inside a module that move their inputs to one device.

    Args:
        module: The module.
        execution_device: The device.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: Classes whose submodules need no hook.
        tied_params_map: See `AlignDevicesHook`.
    """
    if not hasattr(module, "_hf_hook") and any(True for _ in named_module_tensors(module, recurse=True)):
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    if type(module).__name__ in as_names(preload_module_classes):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: torch.nn.Module,
    execution_device: torch.device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to every module inside a module that has tensors of its own.

    Args:
        module: The module.
        execution_device: Where all of them compute.
        offload: Offload their weights between forwards.
        weights_map: The weights by name.
        offload_buffers: Offload buffers too.
        module_name: The module's name in `weights_map`.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: Classes whose weights are loaded together with those of their submodules.
        tied_params_map: See `AlignDevicesHook`.
    """
    loads_submodules = offload and type(module).__name__ in as_names(preload_module_classes)
    if loads_submodules or any(True for _ in named_module_tensors(module)):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=loads_submodules,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        hook.block = module_name
        add_hook_to_module(module, hook, append=True)
    if loads_submodules:
        return
    for key, child in module.named_children():
        attach_align_device_hook(
            child, execution_device, offload, weights_map, offload_buffers, full_name(module_name, key), skip_keys,
            preload_module_classes, tied_params_map,
        )  # fmt: skip


def attach_align_device_hook_on_blocks(
    module: torch.nn.Module,
    execution_device: Any = None,
    offload: Any = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach hooks to the blocks of a device map.

    Args:
        module: The model.
        execution_device: Where each block computes, by name; or one device for all.
        offload: Whether each block's weights are offloaded, by name; or one value for all.
        weights_map: The weights by name.
        offload_buffers: Offload buffers too.
        module_name: Name of `module` in these mappings.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: See `attach_align_device_hook`.
        tied_params_map: See `AlignDevicesHook`.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {module_name: execution_device}
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    shared = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping) and not offload:
        hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **shared)
        add_hook_to_module(module, hook, append=True)
        return
    if module_name in devices and module_name in offloaded:
        arguments = (devices[module_name], offloaded[module_name], weights_map, offload_buffers)
        _attach_to_block(module, module_name, arguments, preload_module_classes, shared)
    elif not module_name:
        hook = AlignDevicesHook(devices.get(""), io_same_device=True, **shared)
        add_hook_to_module(module, hook, append=True)
    for key, child in module.named_children():
        attach_align_device_hook_on_blocks(
            child, devices, offloaded, weights_map, offload_buffers, full_name(module_name, key), skip_keys,
            preload_module_classes, tied_params_map,
        )  # fmt: skip


def _attach_to_block(
    module: torch.nn.Module, name: str, arguments: tuple[Any, ...], preload: Any, shared: dict[str, Any]
) -> None:
    device, offload, weights, buffers = arguments
    outermost = not name
    if not offload:
        hook = AlignDevicesHook(
            device, offload_buffers=buffers, io_same_device=outermost, place_submodules=True, **shared
        )
        add_hook_to_module(module, hook, append=True)
    else:
        if outermost:  # first, so that a pass begins before the model's own weights are loaded
            add_hook_to_module(module, AlignDevicesHook(io_same_device=True, **shared), append=True)
        attach_align_device_hook(module, device, True, weights, buffers, name, preload_module_classes=preload, **shared)
        if not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, AlignDevicesHook(device, io_same_device=outermost, **shared))
    attach_execution_device_hook(module, device, preload_module_classes=preload, **shared)


def attach_layerwise_casting_hooks(
    module: torch.nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: Any = None,
    skip_modules_classes: tuple[type[torch.nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear layers and convolutions in one dtype and compute in another.

    Args:
        module: The model.
        storage_dtype: Dtype between forwards, for instance float8_e4m3fn.
        compute_dtype: Dtype during forwards.
        skip_modules_pattern: Regular expressions; modules whose names match are not cast.
        skip_modules_classes: Classes that are not cast, with all submodules.
        non_blocking: Do not wait for the conversions.
    """
    _cast(module, "", as_names(skip_modules_pattern), skip_modules_classes or (),
          (storage_dtype, compute_dtype, non_blocking))  # fmt: skip


def _cast(module: torch.nn.Module, name: str, patterns: Any, classes: Any, dtypes: tuple[Any, ...]) -> None:
    if isinstance(module, tuple(classes)) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, LayerwiseCastingHook(*dtypes), append=True)
        return
    for key, child in module.named_children():
        _cast(child, full_name(name, key), patterns, classes, dtypes)
