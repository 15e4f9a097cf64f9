"""Finds the ranks of a device mesh that read different data."""

from __future__ import annotations

from typing import Any

# Ranks that differ only in these dimensions use the same samples: they share a model, a sequence or a pipeline.
# Ranks of "sp" share sequences too, but each reads some of them, and `SequenceLoader` combines them.
MODEL_DIMENSIONS = frozenset({"tp", "cp", "pp", "ep"})


def data_parallel_rank(mesh: Any, num_processes: int, process_index: int) -> tuple[int, int]:
    """Return this rank's index among the ranks that read different data.

    Args:
        mesh: A torch DeviceMesh with named dimensions; None: all ranks are data parallel.
        num_processes: Number of all ranks.
        process_index: This rank.

    Returns:
        The number of ranks that read different data, and this rank's index among them.
    """
    if mesh is None or not mesh.mesh_dim_names:
        return num_processes, process_index
    dp_size, dp_rank = 1, 0
    for name, size, position in zip(mesh.mesh_dim_names, mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        if name not in MODEL_DIMENSIONS:
            dp_size, dp_rank = dp_size * size, dp_rank * size + position
    return dp_size, dp_rank
