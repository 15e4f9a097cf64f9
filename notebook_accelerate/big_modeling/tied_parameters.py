"""Finds, checks and restores tied parameters: one parameter under several names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from notebook_accelerate.big_modeling.module_sizes import tied_names
from notebook_accelerate.big_modeling.module_tree import prefixes, submodule

_LOG = logging.getLogger(__name__)


def find_tied_parameters(model: torch.nn.Module, **kwargs: Any) -> list[list[str]]:  # noqa: ARG001
    """Find tied parameters.

    Args:
        model: The model, before it is dispatched: hooks untie what they offload.
        kwargs: Ignored; Accelerate accepts them.

    Returns:
        One sorted list of names per tied parameter, in the order of the first names.
    """
    return sorted(sorted(group) for group in tied_names(model))


def retie_parameters(model: torch.nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie parameters again, for instance after they were loaded.

    Args:
        model: The model.
        tied_params: The earlier result of `find_tied_parameters`. Each group gets its first tensor that is not on the
            meta device, or its first tensor if all are.
    """
    for group in tied_params:
        owners = [submodule(model, name) for name in group]
        tensors = [getattr(module, name) for module, name in owners]
        shared = next((tensor for tensor in tensors if tensor.device.type != "meta"), tensors[0] if tensors else None)
        for module, name in owners:
            setattr(module, name, shared)


def check_tied_parameters_in_config(model: torch.nn.Module) -> bool:
    """Return whether a model's configuration asks for tied weights (transformers' `tie_word_embeddings` and others).

    Args:
        model: The model.
    """
    config = getattr(model, "config", None)
    if config is None:
        return False
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings = getattr(text, "tie_word_embeddings", False) and _has_output_embeddings(model)
    encoders = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    modules = any(hasattr(module, "_tie_weights") for module in model.modules())
    return bool(embeddings or encoders or modules)


def _has_output_embeddings(model: Any) -> bool:
    return bool(hasattr(model, "get_output_embeddings") and model.get_output_embeddings())


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn where a device map divides a tied parameter among devices.

    Args:
        tied_params: The result of `find_tied_parameters`.
        device_map: Device by module name.
    """
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len({str(device) for device in devices.values()}) > 1:
            _LOG.warning(
                "Tied parameters are on different devices: %s. Please modify your custom device map or set "
                "`device_map='auto'`.",
                devices,
            )


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of a name in a device map: that of the innermost module listed there; None without one."""
    return next((device_map[outer] for outer in reversed(prefixes(name)) if outer in device_map), None)


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: Any,
    module_sizes: Mapping[str, Any],
    modules_to_treat: Iterable[tuple[str, torch.nn.Module]],
) -> tuple[Any, list[str], list[torch.nn.Module]]:
    """Add the modules that must be on the same device because they share parameters.

    Args:
        tied_params: Names of shared parameters elsewhere.
        module_size: Bytes of the module itself.
        module_sizes: Bytes by name.
        modules_to_treat: The named modules to choose from.

    Returns:
        Total bytes, with shared parameters counted once; names and modules of the added modules.
    """
    treated = dict(modules_to_treat)
    total, names = module_size, []
    for tied in tied_params:
        name = next((outer for outer in prefixes(tied) if outer in treated), None)
        if name is not None:
            total += (0 if name in names else module_sizes.get(name, 0)) - module_sizes.get(tied, 0)
            names += [] if name in names else [name]
    return total, names, [treated[name] for name in names]
