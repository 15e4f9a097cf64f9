"""Reads rank and world size from the variables of torchrun, MPI or this package's launchers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from notebook_accelerate.config import environ

# torchrun's name, then those of MPI launchers (Intel MPI and MPICH, Open MPI, MVAPICH2).
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


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
    size = _first(_SIZE, 1)
    rank = _first(_RANK, 0)
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} is outside WORLD_SIZE={size}; ranks count from 0: RANK must be below WORLD_SIZE")
    if size == 1:
        return World(local_rank=_first(_LOCAL_RANK, 0))
    return World(rank=rank, size=size, local_rank=_first(_LOCAL_RANK, rank), local_size=_first(_LOCAL_SIZE, size))


def _first(names: Iterable[str], default: int) -> int:
    for name in names:
        value = environ.integer(name)
        if value is not None and value >= 0:
            return value
    return default
