"""Checks that devices have the memory a device map needs, before anything is moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from notebook_accelerate.big_modeling.module_sizes import readable
from notebook_accelerate.big_modeling.tied_parameters import device_of
from notebook_accelerate.hardware.detection import memory_bytes, system_memory


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device that are free for tensors, including those cached by torch's allocator.

    Args:
        device: The device.

    Returns:
        Bytes; None if the device does not report them.
    """
    if device.type == "cpu":
        return min(system_memory()[1], memory_bytes())
    backend: Any = getattr(torch, device.type, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    cached = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0]) + int(cached)


def bytes_to_move(model: torch.nn.Module, device_map: Mapping[str, Any]) -> dict[torch.device, int]:
    """Return the bytes a device map moves to each device, without tensors that are there or on the meta device.

    Args:
        model: The model.
        device_map: Device by module name.
    """
    found: dict[torch.device, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        target = device_of(name, device_map)
        # Offloaded tensors are not moved now: each forward loads them one module at a time.
        if target is None or str(target) in ("cpu", "disk") or tensor.device.type == "meta":
            continue
        device = torch.device(target)
        if tensor.device != device:
            found[device] = found.get(device, 0) + tensor.nbytes
    return found


def check_free_memory(needed: Mapping[torch.device, int]) -> None:
    """Check that devices have free memory.

    Args:
        needed: Bytes by device.

    Raises:
        ValueError: A device has too little.
    """
    for device, size in needed.items():
        free = free_bytes(device)
        if free is not None and size > free:
            raise ValueError(_overflow(device, size, f"has {readable(free)} free"))


def check_limits(sizes: Mapping[str, int], limits: Mapping[Any, int]) -> None:
    """Check that a device map keeps the user's limits.

    Args:
        sizes: Bytes that the map puts on each device, by name of the device.
        limits: Bytes by device.

    Raises:
        ValueError: It exceeds one.
    """
    for device, limit in limits.items():
        size = sizes.get(str(device), 0)
        if size > limit:
            raise ValueError(_overflow(device, size, f"may hold {readable(limit)} by max_memory"))


def _overflow(device: Any, size: int, has: str) -> str:
    return (
        f"The device map puts {readable(size)} on device {device}, which {has}. Nothing was moved or loaded. Put some "
        'modules on "cpu" or "disk", or pass device_map="auto".'
    )
