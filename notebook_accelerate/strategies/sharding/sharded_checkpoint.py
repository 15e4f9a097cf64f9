"""Save and load sharded models and optimizers under Accelerate's names, with torch's distributed checkpoint.

How a folder is read depends on its content, not on the settings of the reader. Both full files and sharded folders can
be loaded on any number of ranks.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from notebook_accelerate.config import constants
from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.files.weight_files import plain_data_only, read_metadata, read_torch
from notebook_accelerate.strategies.module_queries import is_compiled_module, tied_names
from notebook_accelerate.strategies.sharding.shard_files import bytes_around_values, is_framed
from notebook_accelerate.strategies.sharding.write_plans import StatePart, exchange_or_raise, make_part
from notebook_accelerate.torch_internals import CHECKPOINT_PREFIX, StorageInfo, has_own_names, narrow_tensor_by_index


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def full_model_state(model: nn.Module) -> dict[str, Any]:
    """Return a sharded model's full state on rank 0, in CPU memory; every rank must call this.

    Args:
        model: The sharded model whose state is gathered.

    Returns:
        The tensors by name on rank 0, and an empty dict on other ranks. All names of a tied weight refer to one tensor.
    """
    state = get_model_state_dict(model, options=_full_state_options(model))
    if _rank() != 0:
        return {}
    for first, *others in tied_names(model):  # torch gathers a separate copy for each name.
        state.update({name: state[first] for name in others if {first, name} <= state.keys()})
    return state


def _full_state_options(model: nn.Module) -> StateDictOptions:
    """Return torch's options for a full state on rank 0, in CPU memory.

    For FSDP 1 on the CPU, offloading is off, and every rank gets the state. With offloading, torch 2.13 would not copy
    the state, and would then free the memory of the state that it has returned.
    """
    flat_on_cpu = isinstance(model, FullyShardedDataParallel) and next(model.parameters()).device.type == "cpu"
    return StateDictOptions(full_state_dict=True, cpu_offload=not flat_on_cpu)


OWN_SHARDS = "own shards"
"""A format that FSDP's `state_dict_type` does not have: each rank writes its shards to a separate file (FSDP 2)."""
Filter = Callable[[dict[str, Any]], dict[str, Any]]
"""A function that selects the entries of a state to write or read."""


# ---- models


def save_model(
    model: nn.Module, folder: str | os.PathLike[str], index: int, kind: str, keep: Filter | None = None
) -> None:
    """Write a sharded model to a folder; every rank must call this.

    Args:
        model: The sharded model to save.
        folder: The folder of the checkpoint.
        index: The position of the model among the prepared models.
        kind: The format: SHARDED_STATE_DICT, FULL_STATE_DICT or LOCAL_STATE_DICT.
        keep: A filter for the state before it is written. If None, everything is kept.
    """
    for part in model_parts(model, index, kind, keep):
        part.write_here(Path(folder))


def model_parts(model: nn.Module, index: int, kind: str, keep: Filter | None = None) -> list[StatePart]:
    """Return this rank's parts of a sharded model; every rank must call this.

    Args:
        model: The sharded model to save.
        index: The position of the model among the prepared models.
        kind: The format (see `save_model`), or OWN_SHARDS.
        keep: A filter for the state before it is written. If None, everything is kept.

    Returns:
        One part, or an empty list on a rank that writes nothing.
    """
    keep = keep or _keep_all
    if kind == "SHARDED_STATE_DICT":
        state = {"model": keep(sharded_model_state(model, keep_vars=True))}
        return [make_part(f"{constants.FSDP_MODEL_NAME}_{index}", state)]
    if kind == OWN_SHARDS:
        own = {name: _detached(tensor) for name, tensor in keep(sharded_model_state(model)).items()}
        return [StatePart(_shards_name(constants.FSDP_MODEL_NAME, index), own)]
    if kind == "LOCAL_STATE_DICT":
        local = {name: tensor.detach() for name, tensor in _local_tensors(model).items()}
        return [StatePart(_file_name(constants.FSDP_MODEL_NAME, index, _rank()), local)]
    state = full_model_state(model)
    return [StatePart(_file_name(constants.FSDP_MODEL_NAME, index), keep(state))] if _rank() == 0 else []


def _file_name(name: str, index: int, rank: int | None = None) -> str:
    numbered = name if index == 0 else f"{name}_{index}"
    return f"{numbered}.bin" if rank is None else f"{numbered}_rank{rank}.bin"


def _shards_name(name: str, index: int) -> str:
    return f"{name}_{index}_rank{_rank()}.bin"


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _keep_all(state: dict[str, Any]) -> dict[str, Any]:
    return state


def load_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    index: int = 0,
    strict: bool = True,
    keep: Filter | None = None,
) -> Any:
    """Read a sharded model from a folder; every rank must call this.

    Args:
        model: The sharded model to load.
        folder: The folder of the checkpoint.
        index: The position of the model among the prepared models.
        strict: Whether all names must match the model's.
        keep: The filter that the state was written with. If None, everything is kept.

    Returns:
        The names that were missing or unexpected, if torch returns them.

    Raises:
        CheckpointMismatchError: The folder does not contain this model, or contains the parts of a different number of
            ranks.
    """
    folder = Path(folder)
    shards = folder / f"{constants.FSDP_MODEL_NAME}_{index}"
    whole = folder / _file_name(constants.FSDP_MODEL_NAME, index)
    if shards.is_dir() or (folder / ".metadata").is_file():
        state = {"model": (keep or _keep_all)(sharded_model_state(model))}
        read_shards(state, shards if shards.is_dir() else folder)
        return set_model_state_dict(model, state["model"], options=StateDictOptions(strict=strict))
    if whole.is_file():
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
        return set_model_state_dict(model, _read_on_first_rank(whole), options=options)
    own = folder / _shards_name(constants.FSDP_MODEL_NAME, index)
    if own.is_file() and not isinstance(model, FullyShardedDataParallel):
        return set_model_state_dict(model, read_torch(own), options=StateDictOptions(strict=strict))
    return _load_local(model, folder, index)


def _local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _load_local(model: nn.Module, folder: Path, index: int) -> None:
    path = folder / _file_name(constants.FSDP_MODEL_NAME, index, _rank())
    mine = _local_tensors(model)
    state = read_torch(path) if path.is_file() else None
    if state is None or {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in mine.items()}:
        raise CheckpointMismatchError(
            f"{folder} has no weights that fit this model on rank {_rank()}: neither "
            f"{constants.FSDP_MODEL_NAME}_{index}/ nor {_file_name(constants.FSDP_MODEL_NAME, index)}, nor a "
            f"{path.name} with matching shapes. Prepare the same models in the same order as before saving; "
            "LOCAL_STATE_DICT also needs the same number of ranks (SHARDED_STATE_DICT does not)."
        )
    with torch.no_grad():
        for name, tensor in state.items():
            mine[name].copy_(tensor)


# ---- optimizers


def save_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, folder: str | os.PathLike[str], index: int, kind: str
) -> None:
    """Write the optimizer of a sharded model to a folder; every rank must call this.

    Args:
        optimizer: The torch optimizer, without wrappers.
        model: The sharded model that has the optimizer's parameters.
        folder: The folder of the checkpoint.
        index: The position of the optimizer among the prepared optimizers.
        kind: The format, as in `save_model`. LOCAL_STATE_DICT writes the full state.
    """
    for part in optimizer_parts(optimizer, model, index, kind):
        part.write_here(Path(folder))


def optimizer_parts(optimizer: torch.optim.Optimizer, model: nn.Module, index: int, kind: str) -> list[StatePart]:
    """Return this rank's parts of the optimizer of a sharded model; every rank must call this.

    Args:
        optimizer: The torch optimizer, without wrappers.
        model: The sharded model that has the optimizer's parameters.
        index: The position of the optimizer among the prepared optimizers.
        kind: The format (see `save_optimizer`), or OWN_SHARDS.

    Returns:
        One part, or an empty list on a rank that writes nothing.
    """
    if kind == OWN_SHARDS:
        own = sharded_optimizer_state(model, optimizer)
        return [StatePart(_shards_name(constants.OPTIMIZER_NAME, index), own)]
    if kind == "SHARDED_STATE_DICT":
        state = sharded_optimizer_state(model, optimizer)
        return [make_part(f"{constants.OPTIMIZER_NAME}_{index}", {"optimizer": state}, optimizer)]
    whole = get_optimizer_state_dict(model, optimizer, options=_full_state_options(model))
    return [StatePart(_file_name(constants.OPTIMIZER_NAME, index), whole)] if _rank() == 0 else []


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, folder: str | os.PathLike[str], index: int = 0
) -> None:
    """Read the optimizer of a sharded model from a folder; every rank must call this.

    Args:
        optimizer: The torch optimizer, without wrappers.
        model: The sharded model that has the optimizer's parameters.
        folder: The folder of the checkpoint.
        index: The position of the optimizer among the prepared optimizers.

    Raises:
        CheckpointMismatchError: The folder does not contain this optimizer.
    """
    folder = Path(folder)
    shards = folder / f"{constants.OPTIMIZER_NAME}_{index}"
    whole = folder / _file_name(constants.OPTIMIZER_NAME, index)
    if shards.is_dir():
        state = {"optimizer": sharded_optimizer_state(model, optimizer)}
        read_shards(state, shards)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    elif whole.is_file():
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(model, optimizer, _read_on_first_rank(whole), options=options)
    elif (own := folder / _shards_name(constants.OPTIMIZER_NAME, index)).is_file():
        set_optimizer_state_dict(model, optimizer, read_torch(own))
    else:
        raise CheckpointMismatchError(
            f"{folder} has no state of optimizer number {index}: neither {shards.name}/ nor {whole.name}. Prepare "
            "the same optimizers in the same order as before saving."
        )


def _read_on_first_rank(path: Path) -> dict[str, Any]:
    """Return the content of a file on rank 0, which broadcasts it later, or an empty dict on other ranks.

    If reading fails, every rank raises.
    """
    state: dict[str, Any] = {}
    failure: BaseException | None = None
    try:
        if _rank() == 0:
            state = read_torch(path)
    except Exception as error:  # noqa: BLE001 - raised below, after the other ranks have received it
        failure = error
    exchange_or_raise(failure, None, None)
    return state


# ---- faster versions of torch's `get_model_state_dict` and `get_optimizer_state_dict`
#
# torch looks up every name in the modules several times. For 300 parameters with Adam's states, torch's two functions
# delay training by 40 ms when a background save starts. The functions below delay it by 10 ms (torch 2.13).


def sharded_model_state(model: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
    """Return this rank's shards of a model's state, by names without wrappers; every rank must call this.

    Args:
        model: The sharded model whose shards are returned.
        keep_vars: Whether values may be parameters, which saves the 30 us that it takes to detach each DTensor.
    """
    if not _has_own_names(model):
        return get_model_state_dict(model)
    with torch.no_grad():
        state: dict[str, Any] = model.state_dict(keep_vars=keep_vars)
    return state


def sharded_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this rank's shards of an optimizer's state, by parameter name; every rank must call this.

    Args:
        model: The sharded model that has the optimizer's parameters.
        optimizer: The torch optimizer, without wrappers. If it has not stepped yet, torch initializes its state.
    """
    if not (_has_own_names(model) and optimizer.state):
        return get_optimizer_state_dict(model, optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    if any(id(parameter) not in names for parameter in parameters):
        return get_optimizer_state_dict(model, optimizer)  # Let torch's own function raise the error.
    # An optimizer's state dict refers to parameters by number. Their names here have the prefixes of activation
    # checkpointing, but the names in checkpoints do not.
    named = [names[id(parameter)].replace(CHECKPOINT_PREFIX, "") for parameter in parameters]
    with torch.no_grad():
        state = optimizer.state_dict()
    groups = [{**group, "params": [named[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {named[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def _has_own_names(model: nn.Module) -> bool:
    """Return whether parameters have the same names in state dicts. Wrappers and hooks can change names."""
    return not any(
        isinstance(module, (FullyShardedDataParallel, DistributedDataParallel))
        or is_compiled_module(module)
        or not has_own_names(module)
        for module in model.modules()
    )


# ---- reading torch's format, without calling torch.load for each tensor
# torch.load takes 0.6 ms per tensor. In addition, torch's distributed checkpoint makes ranks exchange plans, even
# though every rank could create its plan from the metadata. For 230 MB in 1,200 tensors on two gloo ranks, `load_state`
# took 0.4 to 0.6 s with this module instead of 2.5 to 3.3 s (2 busy cores).


def read_shards(state: dict[str, Any], folder: Path) -> None:
    """Load a sharded state from a folder in place; every rank must call this.

    Args:
        state: The state to fill, with torch's sharded tensors.
        folder: The folder of the checkpoint.

    Raises:
        ShardsError: One or more ranks could not read their parts.
    """
    failure: BaseException | None = None
    try:
        with plain_data_only(), warnings.catch_warnings():
            # This read needs no collectives, so torch's warning about no_dist does not apply.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, storage_reader=ShardReader(folder, read_metadata_in(folder)), no_dist=True)
    except CheckpointException as error:  # The exception wraps this rank's own failure.
        failure = error.failures[0][0]
    except Exception as error:  # noqa: BLE001 - raised below, after the other ranks have received it
        failure = error
    exchange_or_raise(failure, None, None)


def read_metadata_in(folder: Path) -> Metadata | None:
    """Return the metadata in a folder, or None if each rank has written its own metadata.

    The metadata is read here because torch mistakes any error while reading it for a missing file.

    Args:
        folder: The folder of the checkpoint.

    Raises:
        CheckpointError: The metadata is corrupt, or contains more than plain data.
    """
    if not (folder / ".metadata").is_file():
        return None
    with (folder / ".metadata").open("rb") as file:
        metadata: Metadata = read_metadata(file)
    return metadata


class ShardReader(FileSystemReader):
    """torch's reader, except that tensors framed by `shard_files` are copied directly from memory-mapped files.

    Args:
        folder: The folder of the checkpoint.
        metadata: The folder's metadata. If None, torch reads a metadata file for each rank.
    """

    def __init__(self, folder: Path, metadata: Metadata | None) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that has been read already."""
        if self._metadata is None:
            return super().read_metadata(*args, **kwargs)
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Store the metadata, whose dtypes and shapes determine how tensors are framed."""
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._tensors = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan: framed items directly, and all others with torch.

        Args:
            plan: The items that this rank reads.
            planner: The planner, which has the tensors to fill.
        """
        with ExitStack() as stack:
            files: dict[str, mmap.mmap] = {}
            others = list(self._not_framed(plan.items, planner, files, stack))
        return super().read_data(replace(plan, items=others), planner)

    def _not_framed(
        self, items: list[ReadItem], planner: LoadPlanner, files: dict[str, mmap.mmap], stack: ExitStack
    ) -> Iterator[ReadItem]:
        """Read the framed items, and yield the others."""
        for item in items:
            info: StorageInfo = self.storage_data[item.storage_index]
            if info.relative_path not in files:
                files[info.relative_path] = self._map(info.relative_path, stack)
            values = self._values(item, info, files[info.relative_path])
            if values is None:
                yield item
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(values, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)

    def _map(self, name: str, stack: ExitStack) -> mmap.mmap:
        file = stack.enter_context((Path(self.path) / name).open("rb"))
        return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _values(self, item: ReadItem, info: StorageInfo, file: mmap.mmap) -> torch.Tensor | None:
        """Return a copy of a framed tensor, or None if the item is not framed."""
        found = self._tensors[item.storage_index.fqn]
        if (
            item.type != LoadItemType.TENSOR
            or not isinstance(found, TensorStorageMetadata)
            or info.transform_descriptors
        ):
            return None
        dtype, offset = found.properties.dtype, item.storage_index.offset
        shape = next((chunk.sizes for chunk in found.chunks if offset is None or chunk.offsets == offset), None)
        if shape is None or not is_framed(dtype, size := math.prod(shape) * dtype.itemsize):
            return None
        before, after = bytes_around_values(dtype, shape)
        begin, end = info.offset + len(before), info.offset + len(before) + size
        if info.length != len(before) + size + len(after) or file[info.offset : begin] != before:
            return None  # The tensor was written by torch itself, or with another version of torch.
        # Copy the bytes, because the values in the file are not aligned.
        return torch.frombuffer(bytearray(file[begin:end]), dtype=dtype).view(shape)
