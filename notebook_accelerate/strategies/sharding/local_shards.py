"""A rank's part of a sharded state without torch's wrappers: memory that a thread can copy and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from notebook_accelerate.strategies.sharding.shard_files import FileChecksums
from notebook_accelerate.strategies.sharding.write_plans import KeyPath, StateForm, write_planned
from notebook_accelerate.torch_internals import Shard, ShardedTensor, group_of_sharded_tensor, sharded_tensor

Wrapper = Callable[[Any], Any]
"""Wraps a rank's own memory in torch's sharded tensor again."""


@dataclass
class StatePart:
    """One rank's part of an entry of a checkpoint's folder.

    Attributes:
        name: The entry: a file that this rank writes alone, or a folder that all ranks write to.
        value: Nested dicts and lists of this rank's own tensors; for a folder, without torch's wrappers.
        wrappers: The wrappers of a folder's values; None for a file.
        optimizer: torch's optimizer if its steps alone change the tensors; None otherwise.
    """

    name: str
    value: Any
    wrappers: dict[KeyPath, Wrapper] | None = None
    optimizer: Any = None

    def write(self, value: Any, path: Path, group: Any = None) -> FileChecksums:
        """Write a folder; every rank must call this.

        Args:
            value: The value, or a copy of it.
            path: The folder.
            group: Processes that agree on who writes what; None: torch's default group.

        Returns:
            The files that this rank wrote, which are synced to the disk.

        Raises:
            ShardsError: A rank could not write its part.
        """
        assert self.wrappers is not None
        return write_shards(value, self.wrappers, path, group)

    def write_here(self, folder: Path) -> None:
        """Write the value itself into a folder, now; every rank must call this.

        Args:
            folder: The folder of the checkpoint.
        """
        if self.wrappers is None:
            torch.save(self.value, folder / self.name)
        else:
            self.write(self.value, folder / self.name)


def make_part(name: str, state: dict[str, Any], optimizer: Any = None) -> StatePart:
    """Take the wrappers off a sharded state.

    Args:
        name: Name of the folder.
        state: The state, with torch's sharded tensors.
        optimizer: As for `StatePart`.
    """
    wrappers: dict[KeyPath, Wrapper] = {}
    with torch.no_grad():  # with autograd, to_local takes twenty times as long
        return StatePart(name, _unwrapped(state, wrappers, ()), wrappers, optimizer)


def _unwrapped(value: Any, wrappers: dict[KeyPath, Wrapper], path: KeyPath) -> Any:
    """Return a nested state with this rank's own memory, and record the wrappers."""
    if isinstance(value, DTensor):
        wrappers[path] = _DTensorWrapper(value.device_mesh, tuple(value.placements), value.shape, value.stride())
        return value.to_local().detach()
    if isinstance(value, ShardedTensor):
        wrappers[path] = _sharded_tensor_wrapper(value)
        return [shard.tensor.detach() for shard in value.local_shards()]
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    if isinstance(value, dict):
        return {key: _unwrapped(item, wrappers, (*path, key)) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_unwrapped(item, wrappers, (*path, index)) for index, item in enumerate(value))
    return value


def _wrapped(value: Any, wrappers: dict[KeyPath, Wrapper], path: KeyPath) -> Any:
    if path in wrappers:
        return wrappers[path](value)
    if isinstance(value, dict):
        return {key: _wrapped(item, wrappers, (*path, key)) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_wrapped(item, wrappers, (*path, index)) for index, item in enumerate(value))
    return value


@dataclass(frozen=True)
class _DTensorWrapper:
    """Wraps the one shard that a rank has of a DTensor."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __call__(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def _sharded_tensor_wrapper(tensor: ShardedTensor) -> Wrapper:
    metadata, group = tensor.metadata(), group_of_sharded_tensor(tensor)
    shards_metadata = [shard.metadata for shard in tensor.local_shards()]

    def wrap(tensors: list[torch.Tensor]) -> ShardedTensor:
        shards = [Shard(local, own) for local, own in zip(tensors, shards_metadata, strict=True)]
        return sharded_tensor(shards, metadata, group)

    return wrap


# -- torch's distributed checkpoints ----------------------------------------------------------------------------------


def write_shards(value: Any, wrappers: dict[KeyPath, Wrapper], folder: Path, group: Any = None) -> FileChecksums:
    """Write a sharded state into a folder, one file per rank; every rank must call this.

    Args:
        value: The state, without torch's wrappers.
        wrappers: The wrappers.
        folder: The folder; made where it does not exist.
        group: As for `StatePart.write`.

    Returns:
        The files that this rank wrote.

    Raises:
        ShardsError: A rank could not write its part.
    """
    return write_planned(value, _form_of(value, wrappers), lambda: _wrapped(value, wrappers, ()), folder, group)


def _form_of(value: Any, wrappers: dict[KeyPath, Wrapper]) -> StateForm | None:
    """Return everything a plan depends on; None where a rank has several shards of a value (FSDP 1)."""
    dtensors = {path: wrapper for path, wrapper in wrappers.items() if isinstance(wrapper, _DTensorWrapper)}
    if len(dtensors) != len(wrappers):
        return None
    form: StateForm = [(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)]
    meshes = {id(wrapper.mesh): wrapper.mesh for wrapper in dtensors.values()}
    numbers = {key: number for number, key in enumerate(meshes)}
    form += [(mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names) for mesh in meshes.values()]
    layouts = {
        path: (numbers[id(wrapper.mesh)], wrapper.placements, wrapper.shape, wrapper.stride)
        for path, wrapper in dtensors.items()
    }
    _add_form(value, layouts, (), form)
    return form


def _add_form(value: Any, layouts: dict[KeyPath, Any], path: KeyPath, form: StateForm) -> None:
    if isinstance(value, torch.Tensor):
        form.append((path, value.dtype, value.shape, layouts.get(path)))
        return
    form.append((path, type(value)))
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _add_form(item, layouts, (*path, key), form)
