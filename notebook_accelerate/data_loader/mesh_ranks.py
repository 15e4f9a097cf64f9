"""Which ranks read different data, when ranks are arranged in a mesh."""

from __future__ import annotations

from typing import Any

# Ranks that differ in these dimensions only work on the same samples: they share a model, a sequence or a pipeline.
# Those along "sp" share sequences too, but each reads some of them, and they are put together afterwards.
MODEL_DIMENSIONS = frozenset({"tp", "cp", "pp", "ep"})


def data_parallel_place(mesh: Any, num_processes: int, process_index: int) -> tuple[int, int]:
    """Find this rank's place among the ranks that read different data.

    Args:
        mesh: A torch DeviceMesh with named dimensions; None for one dimension of data parallel ranks.
        num_processes: Number of all ranks.
        process_index: This rank.

    Returns:
        How many ranks read different data, and this rank's number among them.
    """
    if mesh is None or not mesh.mesh_dim_names:
        return num_processes, process_index
    count, place = 1, 0
    for name, size, position in zip(mesh.mesh_dim_names, mesh.mesh.shape, mesh.get_coordinate(), strict=True):
        if name not in MODEL_DIMENSIONS:
            count, place = count * size, place * size + position
    return count, place
