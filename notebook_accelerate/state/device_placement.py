"""Which device a rank uses and which back end connects it, from the table of devices."""

from __future__ import annotations

import torch

from notebook_accelerate import hardware
from notebook_accelerate.config import environ
from notebook_accelerate.hardware import devices
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.state.world import World

Row = devices.DeviceRow


def row_of(*, cpu: bool, world: World | None = None) -> Row:
    """Return the row of the devices this process uses.

    Args:
        cpu: Leave accelerators alone.
        world: The ranks, when known: devices that cannot be connected give way to the CPU in a world of several.

    Returns:
        The row of ACCELERATE_TORCH_DEVICE's type where that is set, else of this machine's accelerator or its CPU.
    """
    asked = environ.text("ACCELERATE_TORCH_DEVICE")
    row = devices.row("cpu" if cpu else asked.partition(":")[0] if asked else hardware.detect().accelerator)
    if world is not None and world.size > 1 and row.communicator == "none":
        warn_once(f"{row.type} devices cannot be connected: the {world.size} ranks train on the CPU")
        return devices.row("cpu")
    return row


def device_of(row: Row, world: World) -> torch.device:
    """Choose this rank's device and make it current.

    Args:
        row: The type of device.
        world: This rank's place.

    Returns:
        The device with the rank's index on its machine.

    Raises:
        ValueError: The machine has fewer devices than ranks.
    """
    asked = environ.text("ACCELERATE_TORCH_DEVICE") or ""
    if asked.startswith(f"{row.type}:"):
        return row.select(int(asked.partition(":")[2]))
    count = hardware.detect().count if row.is_accelerator else 0
    if count and world.local_rank >= count:
        raise ValueError(
            f"rank {world.rank} needs {row.type} device {world.local_rank}, but this machine shows {count} "
            f"(numbered from 0); start {count} processes, or use the CPU: Accelerator(cpu=True)"
        )
    return row.select(world.local_rank)


def backend_of(row: Row, asked: str | None, with_cpu: bool = False) -> str:
    """Return the back end that connects the ranks.

    Args:
        row: The type of device.
        asked: What the user asked for. nccl, the default of `InitProcessGroupKwargs`, means the device's own.
        with_cpu: Whether ranks on accelerators also exchange tensors in main memory, for which NCCL has no collectives.

    Returns:
        Name of the back end for `torch.distributed.init_process_group`: as "nccl", or "cuda:nccl,cpu:gloo".
    """
    if asked not in {None, "nccl"}:
        return str(asked)
    return f"{row.type}:{row.backend},cpu:gloo" if with_cpu and row.is_accelerator else row.backend
