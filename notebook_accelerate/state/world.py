"""Reads rank and world size from the variables of torchrun, MPI or this package's launchers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from notebook_accelerate.config import environ
from notebook_accelerate.hardware import device_counts, nvml


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank and world size of a process."""

    rank: int = 0
    """Index of this process, from 0, over all machines."""
    size: int = 1
    """Number of processes of the run."""
    local_rank: int = 0
    """Index of this process on its machine."""
    local_size: int = 1
    """Number of processes of the run on this machine."""


def world_from_environ() -> World:
    """Read rank and world size from the environment.

    Returns:
        The values; rank 0 of 1 if no variable is set.

    Raises:
        ValueError: A variable is not a number, or the rank is not below the world size.
    """
    size = _first("world_size", 1)
    rank = _first("rank", 0)
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} is outside WORLD_SIZE={size}; ranks count from 0: RANK must be below WORLD_SIZE")
    if size == 1:
        return World(local_rank=_first("local_rank", 0))
    return World(
        rank=rank, size=size, local_rank=_first("local_rank", rank), local_size=_first("local_world_size", size)
    )


def _first(value_name: str, default: int) -> int:
    return environ.get_int_from_env(RANK_VARIABLES[value_name], default)


# Ranks on CPUs: rank and world size from torchrun or MPI, and affinity to the cores near a GPU.

# Variables of torchrun, then of Intel MPI and MPICH, Open MPI, MVAPICH2.
RANK_VARIABLES = {
    "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "local_rank": ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "local_world_size": (
        "LOCAL_WORLD_SIZE",
        "MPI_LOCALNRANKS",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
}


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its GPU.

    Args:
        local_process_index: Index of this rank on its machine.
        verbose: Whether to print the cores; None: only with ACCELERATE_DEBUG_MODE.
    """
    cores = _near_cores(local_process_index)
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    os.sched_setaffinity(0, cores)
    if environ.flag("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        sys.stdout.write(f"process {local_process_index} runs on cores {sorted(cores)}\n")


def _near_cores(local_process_index: int) -> set[int]:
    """Return the allowed cores near a GPU, from the kernel's list for its PCI slot; empty if there is no list."""
    if not device_counts.count("cuda"):
        return set()
    gpu = nvml.visible_gpu(local_process_index)
    if gpu is None:
        return set()
    # NVML writes the PCI domain with eight digits, the kernel with four.
    file = Path("/sys/bus/pci/devices") / gpu.pci_bus_id[-12:] / "local_cpulist"
    if not file.is_file():
        return set()
    return parse_cpu_list(file.read_text(encoding="ascii")) & os.sched_getaffinity(0)


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list of cores such as ``0-3,8,10-11``.

    Args:
        text: The list, as Linux writes it.
    """
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
