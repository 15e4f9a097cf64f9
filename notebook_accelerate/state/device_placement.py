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
    requested = environ.text("ACCELERATE_TORCH_DEVICE")
    row = device_table.row(
        "cpu" if cpu else requested.partition(":")[0] if requested else hardware.detect().accelerator
    )
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
    requested = environ.text("ACCELERATE_TORCH_DEVICE") or ""
    if requested.startswith(f"{row.type}:"):
        return row.select(int(requested.partition(":")[2]))
    count = hardware.detect().count if row.is_accelerator else 0
    if count and world.local_rank >= count:
        raise ValueError(
            f"rank {world.rank} needs {row.type} device {world.local_rank}, but this machine has {count} "
            f"(numbered from 0); pass num_processes={count}, or use the CPU: Accelerator(cpu=True)"
        )
    return row.select(world.local_rank)


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
