"""A rank's part of a sharded state, apart from torch's wrappers of it: memory that a thread can copy and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from notebook_accelerate.strategies.sharding.shard_files import Sums
from notebook_accelerate.strategies.sharding.write_plans import Outline, Place, write_planned

Dress = Callable[[Any], Any]
"""Puts torch's wrapper around a rank's own memory."""


@dataclass
class StatePart:
    """What goes into one entry of a checkpoint's folder.

    Attributes:
        name: The entry: a file that this rank writes alone, or a folder that all ranks write to.
        value: Nested dicts and lists of this rank's own tensors; for a folder, without torch's wrappers.
        dresses: The wrappers of a folder's values; None for a file.
        optimizer: torch's optimizer whose step alone changes the tensors; None for everything else.
    """

    name: str
    value: Any
    dresses: dict[Place, Dress] | None = None
    optimizer: Any = None

    def write(self, value: Any, path: Path, group: Any = None) -> Sums:
        """Write a folder; every rank must call this.

        Args:
            value: The value, or a copy of it.
            path: The folder.
            group: Processes that agree on who writes what; None: torch's default group.

        Returns:
            The files that this rank wrote, which are on the disk itself then.

        Raises:
            ShardsError: Some rank could not.
        """
        assert self.dresses is not None
        return write_shards(value, self.dresses, path, group)

    def write_here(self, folder: Path) -> None:
        """Write the value itself into a folder, now; every rank must call this.

        Args:
            folder: The folder that the entry goes to.
        """
        if self.dresses is None:
            torch.save(self.value, folder / self.name)
        else:
            self.write(self.value, folder / self.name)


def part_of(name: str, state: dict[str, Any], optimizer: Any = None) -> StatePart:
    """Return the part of a checkpoint's folder that a sharded state becomes.

    Args:
        name: Name of the folder.
        state: The state, with torch's sharded tensors.
        optimizer: torch's optimizer that the state is of, if it is.
    """
    dresses: dict[Place, Dress] = {}
    with torch.no_grad():  # autograd takes twenty times as long to show a rank's own memory
        return StatePart(name, _bare(state, dresses, ()), dresses, optimizer)


def _bare(value: Any, dresses: dict[Place, Dress], place: Place) -> Any:
    """Return a nested state with this rank's own memory, and note what was around it."""
    if isinstance(value, DTensor):
        dresses[place] = _WholeTensor(value.device_mesh, tuple(value.placements), value.shape, value.stride())
        return value.to_local().detach()
    if isinstance(value, ShardedTensor):
        dresses[place] = _dress_of_sharded(value)
        return [shard.tensor.detach() for shard in value.local_shards()]
    if isinstance(value, dict):
        return {key: _bare(item, dresses, (*place, key)) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_bare(item, dresses, (*place, index)) for index, item in enumerate(value))
    return value


def _dressed(value: Any, dresses: dict[Place, Dress], place: Place) -> Any:
    if place in dresses:
        return dresses[place](value)
    if isinstance(value, dict):
        return {key: _dressed(item, dresses, (*place, key)) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_dressed(item, dresses, (*place, index)) for index, item in enumerate(value))
    return value


@dataclass(frozen=True)
class _WholeTensor:
    """What is around the one piece that a rank has of a DTensor."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def _dress_of_sharded(tensor: ShardedTensor) -> Dress:
    metadata, group = tensor.metadata(), tensor._process_group
    places = [shard.metadata for shard in tensor.local_shards()]

    def dress(locals_: list[torch.Tensor]) -> ShardedTensor:
        shards = [Shard(local, place) for local, place in zip(locals_, places, strict=True)]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, sharded_tensor_metadata=metadata, process_group=group
        )

    return dress


# -- torch's distributed checkpoints ----------------------------------------------------------------------------------


def write_shards(value: Any, dresses: dict[Place, Dress], folder: Path, group: Any = None) -> Sums:
    """Write a sharded state into a folder, one file per rank; every rank must call this.

    Args:
        value: The state, without torch's wrappers.
        dresses: The wrappers.
        folder: The folder; made where it does not exist.
        group: As for `StatePart.write`.

    Returns:
        The files that this rank wrote.

    Raises:
        ShardsError: Some rank could not.
    """
    return write_planned(value, _outline_of(value, dresses), lambda: _dressed(value, dresses, ()), folder, group)


def _outline_of(value: Any, dresses: dict[Place, Dress]) -> Outline | None:
    """Return all of a state that a plan depends on; None where a value is in several pieces (FSDP 1)."""
    if not all(isinstance(dress, _WholeTensor) for dress in dresses.values()):
        return None
    outline: Outline = [(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)]
    meshes = {id(dress.mesh): dress.mesh for dress in dresses.values() if isinstance(dress, _WholeTensor)}
    numbers = {key: number for number, key in enumerate(meshes)}
    outline += [(mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names) for mesh in meshes.values()]
    forms = {
        place: (numbers[id(dress.mesh)], dress.placements, dress.shape, dress.stride)
        for place, dress in dresses.items()
        if isinstance(dress, _WholeTensor)
    }
    _add_outline(value, forms, (), outline)
    return outline


def _add_outline(value: Any, forms: dict[Place, Any], place: Place, outline: Outline) -> None:
    if isinstance(value, torch.Tensor):
        outline.append((place, value.dtype, value.shape, forms.get(place)))
        return
    outline.append((place, type(value)))
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _add_outline(item, forms, (*place, key), outline)


def read_shards(state: dict[str, Any], folder: Path) -> None:
    """Fill a sharded state from a folder; every rank must call this.

    Args:
        state: The state, with torch's sharded tensors.
        folder: The folder.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, storage_reader=FileSystemReader(folder))
