"""Putting models on devices, and knowing those that are on several already."""

from __future__ import annotations

from typing import Any

import torch


def device_map_of(model: torch.nn.Module) -> dict[str, Any] | None:
    """Return the device map that a model was loaded with.

    Args:
        model: The model.

    Returns:
        Its `hf_device_map`, or that of the first submodule that has one; None without one.
    """
    for module in model.modules():
        found = getattr(module, "hf_device_map", None)
        if found is not None:
            return dict(found)
    return None


def is_on_several_devices(model: torch.nn.Module) -> bool:
    """Tell whether a model was spread over devices by a device map.

    Args:
        model: The model.

    Returns:
        True where its map names more than one place.
    """
    found = device_map_of(model)
    return found is not None and len(set(found.values())) > 1


def place_model(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model to a device.

    Args:
        model: The model.
        device: Where to.

    Returns:
        The model.

    Raises:
        ValueError: It has parameters without values.
    """
    hollow = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if hollow:
        raise ValueError(
            f"{type(model).__name__} has parameters without values ({', '.join(hollow[:3])}, ...): load its weights "
            "before prepare(), or prepare with device_placement=[False, ...]"
        )
    return model.to(device)
