"""Chooses a rank's device and back end from the table of devices."""

from __future__ import annotations

import torch

from notebook_accelerate import hardware
from notebook_accelerate.config import environ
from notebook_accelerate.hardware import device_table
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.state.world import World

Row = device_table.DeviceRow


def device_row(*, cpu: bool, world: World | None = None) -> Row:
    """Return the row of this process's type of device.

    Args:
        cpu: Use the CPU.
        world: Rank and world size, if known: several ranks on devices that cannot be connected use the CPU.

    Returns:
        The row of ACCELERATE_TORCH_DEVICE's type if it is set, otherwise of this machine's accelerator or its CPU.
    """
    requested = _requested_device()
    kind = hardware.detect().accelerator if requested is None else requested.type
    row = device_table.row("cpu" if cpu or kind == "meta" else kind)
    if world is not None and world.size > 1 and row.communicator == "none":
        warn_once(f"{row.type} devices cannot be connected: the {world.size} ranks train on the CPU")
        return device_table.row("cpu")
    return row


def select_device(row: Row, world: World) -> torch.device:
    """Select this rank's device and make it current.

    Args:
        row: The type of device.
        world: Rank and world size.

    Returns:
        The device with the rank's local index.

    Raises:
        ValueError: The machine has fewer devices than ranks.
    """
    requested = _requested_device()
    if requested is not None and requested.type in {row.type, "meta"} and not row.is_accelerator:
        return requested
    if requested is not None and requested.type == row.type and requested.index is not None:
        return row.select(requested.index)
    count = hardware.detect().count if row.is_accelerator else 0
    if count and world.local_rank >= count:
        raise ValueError(
            f"rank {world.rank} needs {row.type} device {world.local_rank}, but this machine has {count} "
            f"(numbered from 0); pass num_processes={count}, or use the CPU: Accelerator(cpu=True)"
        )
    return row.select(world.local_rank)


def _requested_device() -> torch.device | None:
    """Return the device of ACCELERATE_TORCH_DEVICE, for example "cuda:1"; None if it is not set.

    Raises:
        ValueError: It is not a device.
    """
    text = environ.text("ACCELERATE_TORCH_DEVICE")
    if not text:
        return None
    device_table.row(text.partition(":")[0]) if text != "meta" else None
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"ACCELERATE_TORCH_DEVICE={text!r} is not a device; set for instance cuda:0 or cpu") from error


def choose_backend(row: Row, requested: str | None, with_cpu: bool = False) -> str:
    """Return the back end that connects the ranks.

    Args:
        row: The type of device.
        requested: The user's choice. nccl, the default of `InitProcessGroupKwargs`, means the device's own.
        with_cpu: Whether ranks on accelerators also exchange tensors in main memory, for which NCCL has no collectives.

    Returns:
        Name of the back end for `torch.distributed.init_process_group`: as "nccl", or "cuda:nccl,cpu:gloo".
    """
    if requested not in {None, "nccl"}:
        return str(requested)
    return f"{row.type}:{row.backend},cpu:gloo" if with_cpu and row.is_accelerator else row.backend
