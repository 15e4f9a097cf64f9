"""Properties of this machine's GPUs, read without creating a CUDA context."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import parse

from notebook_accelerate.hardware import nvml

# GeForce 40 cards have no peer-to-peer access; drivers before this one report that they have, and hang.
# Source: NVIDIA driver 550.40.07, release highlights.
_PEER_TO_PEER_DRIVER = "550.40.07"


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of all NVIDIA GPUs of this machine, and how many there are."""
    names = [gpu.name for gpu in nvml.gpus()]
    return names, len(names)


def get_driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None without a driver."""
    return nvml.driver_version()


def without_peer_to_peer(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that stop NCCL from using peer-to-peer access and InfiniBand, except for those that are set.

    Args:
        environment: The variables that are set.
    """
    return {name: "1" for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in environment}


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs support peer-to-peer access and InfiniBand.

    Returns:
        False for several GeForce RTX 40 cards with a driver before 550.40.07, otherwise True, also without GPUs.
    """
    names, count = get_gpu_info()
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    version = get_driver_version()
    return version is not None and parse(version) >= parse(_PEER_TO_PEER_DRIVER)
