"""Reads rank and world size from the variables of torchrun, MPI or this package's launchers."""

from __future__ import annotations

from dataclasses import dataclass

from notebook_accelerate.config import environ
from notebook_accelerate.hardware.numa import RANK_VARIABLES


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
