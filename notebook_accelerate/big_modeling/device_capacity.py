"""Whether devices have the memory that a device map takes of them, asked before anything moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch

from notebook_accelerate.big_modeling.module_sizes import readable
from notebook_accelerate.big_modeling.tied_parameters import device_of
from notebook_accelerate.hardware.detection import memory_bytes


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device has free for tensors, those that torch's allocator keeps for reuse included.

    Args:
        device: The device.

    Returns:
        Bytes; None where the device does not tell.
    """
    if device.type == "cpu":
        return min(int(psutil.virtual_memory().available), memory_bytes())
    backend: Any = getattr(torch, device.type, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    kept = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0]) + int(kept)


def bytes_to_move(model: torch.nn.Module, device_map: Mapping[str, Any]) -> dict[torch.device, int]:
    """Add up what a device map moves to each device; what is there already, or has no memory yet, is not counted.

    Args:
        model: The model.
        device_map: Device by module name.
    """
    found: dict[torch.device, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        target = device_of(name, device_map)
        # What the map leaves on the CPU or on disk is not moved: it comes piece by piece, with each forward.
        if target is None or str(target) in ("cpu", "disk") or tensor.device.type == "meta":
            continue
        device = torch.device(target)
        if tensor.device != device:
            found[device] = found.get(device, 0) + tensor.nbytes
    return found


def check_room(needed: Mapping[torch.device, int]) -> None:
    """Refuse what does not fit.

    Args:
        needed: Bytes by device.

    Raises:
        ValueError: A device has less free.
    """
    for device, size in needed.items():
        free = free_bytes(device)
        if free is not None and size > free:
            raise ValueError(_overflow(device, size, f"has {readable(free)} free"))


def check_limits(sizes: Mapping[str, int], limits: Mapping[Any, int]) -> None:
    """Refuse a device map that puts more on a device than the user allows.

    Args:
        sizes: Bytes that the map puts on each device, by the device's name.
        limits: Bytes by device.

    Raises:
        ValueError: It does.
    """
    for device, limit in limits.items():
        size = sizes.get(str(device), 0)
        if size > limit:
            raise ValueError(_overflow(device, size, f"may hold {readable(limit)} by max_memory"))


def _overflow(device: Any, size: int, has: str) -> str:
    return (
        f"The device map puts {readable(size)} on device {device}, which {has}. Nothing was moved or loaded. Put some "
        'modules on "cpu" or "disk", or let device_map="auto" choose.'
    )
