"""Checks of models before they move to a device: a device map may spread them, or parameters have no values."""

from __future__ import annotations

from typing import Any

import torch


def is_on_several_devices(model: torch.nn.Module) -> bool:
    """Tell whether a device map spreads a model over several devices.

    Args:
        model: The model.

    Returns:
        True if its `hf_device_map`, or that of the first submodule that has one, has more than one device.
    """
    maps = (getattr(module, "hf_device_map", None) for module in model.modules())
    found: dict[str, Any] = next((found for found in maps if found is not None), {})
    return len(set(found.values())) > 1


def check_values(model: torch.nn.Module, remedy: str) -> None:
    """Check that the parameters of a model have values.

    Args:
        model: The model.
        remedy: The end of the message: how to give them values.

    Raises:
        ValueError: Some parameters are on the meta device.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(
            f"{type(model).__name__} has parameters without values ({', '.join(empty[:3])}, ...): {remedy}"
        )
