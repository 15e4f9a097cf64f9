"""What the GPUs of this machine are, asked without creating a CUDA context."""

from __future__ import annotations

import os

from packaging.version import parse

from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.hardware import device_counts, devices, nvml, torch_build
from notebook_accelerate.hardware.detection import detect

# GeForce 40 cards cannot reach each other directly; drivers before this one claim they can and then hang.
# Source: NVIDIA driver 550.40.07, release highlights.
_PEER_TO_PEER_DRIVER = "550.40.07"


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of all NVIDIA GPUs of this machine, and how many there are."""
    names = [gpu.name for gpu in nvml.gpus()]
    return names, len(names)


def get_driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    return nvml.driver_version()


def check_cuda_p2p_ib_support() -> bool:
    """Tell whether the GPUs can reach each other directly (peer to peer) and over InfiniBand.

    Returns:
        False for several GeForce RTX 40 cards on a driver before 550.40.07; True for all else, also without GPUs.
    """
    names, count = get_gpu_info()
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    version = get_driver_version()
    return version is not None and parse(version) >= parse(_PEER_TO_PEER_DRIVER)


def check_cuda_fp8_capability() -> bool:
    """Tell whether the GPU this process uses first computes in fp8 (compute capability 8.9, or AMD's gfx94, gfx95)."""
    if not device_counts.count("cuda"):
        return False
    if torch_build.read().hip:
        properties = devices.row("cuda").call("get_device_properties", 0)
        return str(properties.gcnArchName).startswith(("gfx94", "gfx95", "gfx12"))
    gpu = visible_gpu(0)
    return gpu is not None and gpu.capability >= (8, 9)


def visible_gpu(local_index: int) -> nvml.Gpu | None:
    """Return the physical GPU behind ``cuda:local_index``; None where it is not known.

    Args:
        local_index: Index among the GPUs that CUDA_VISIBLE_DEVICES leaves.
    """
    physical = nvml.gpus()
    entries = os.environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return physical[local_index] if local_index < len(physical) else None
    chosen = [entry.strip() for entry in entries.split(",")]
    if local_index >= len(chosen):
        return None
    entry = chosen[local_index]
    return next((gpu for gpu in physical if entry and (entry == str(gpu.index) or gpu.uuid.startswith(entry))), None)


def get_current_device_type() -> tuple[str, str]:
    """Return the type of device a training would use here, and what a world of such devices is called."""
    row = devices.row(detect().accelerator)
    name = row.distributed_type if row.distributed_type != DistributedType.NO else DistributedType.MULTI_CPU
    return row.type, name.value


__all__ = [
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "visible_gpu",
]
