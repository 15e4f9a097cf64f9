"""Saves and loads sharded models and optimizers under Accelerate's names, by torch's distributed checkpoint.

The content of a folder decides how it is read, not the reader's settings: full files load into any number of ranks,
and so do sharded folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from notebook_accelerate.big_modeling.weight_files import read_torch
from notebook_accelerate.config import constants
from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.strategies.sharding.local_shards import StatePart, make_part
from notebook_accelerate.strategies.sharding.shard_reader import read_shards
from notebook_accelerate.strategies.sharding.sharded_states import sharded_model_state, sharded_optimizer_state
from notebook_accelerate.strategies.sharding.write_plans import exchange_or_raise
from notebook_accelerate.strategies.tied_weights import tied_names


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def full_model_state(model: nn.Module) -> dict[str, Any]:
    """Return a sharded model's full state on rank 0, in main memory; every rank must call this.

    Args:
        model: The sharded model.

    Returns:
        Tensors by name, the same tensor under all names of a tied weight; nothing on other ranks.
    """
    state = get_model_state_dict(model, options=_full_state_options(model))
    if _rank() != 0:
        return {}
    for first, *others in tied_names(model):  # torch gathers a copy for each name
        state.update({name: state[first] for name in others if {first, name} <= state.keys()})
    return state


def _full_state_options(model: nn.Module) -> StateDictOptions:
    """Return torch's options for a full state on rank 0, in main memory.

    On the CPU, FSDP 1 makes no copy to offload and frees the state it returned (torch 2.13): every rank gets a copy.
    """
    flat_on_cpu = isinstance(model, FullyShardedDataParallel) and next(model.parameters()).device.type == "cpu"
    return StateDictOptions(full_state_dict=True, cpu_offload=not flat_on_cpu)


def _file_name(name: str, index: int, rank: int | None = None) -> str:
    numbered = name if index == 0 else f"{name}_{index}"
    return f"{numbered}.bin" if rank is None else f"{numbered}_rank{rank}.bin"


OWN_SHARDS = "own shards"
"""A kind of files besides those of FSDP's `state_dict_type`: each rank writes its shards alone (FSDP 2)."""


def _shards_name(name: str, index: int) -> str:
    return f"{name}_{index}_rank{_rank()}.bin"


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


Filter = Callable[[dict[str, Any]], dict[str, Any]]


def _keep_all(state: dict[str, Any]) -> dict[str, Any]:
    return state


# -- models -----------------------------------------------------------------------------------------------------------


def save_model(
    model: nn.Module, folder: str | os.PathLike[str], index: int, kind: str, keep: Filter | None = None
) -> None:
    """Write a sharded model into a folder; every rank must call this.

    Args:
        model: The sharded model.
        folder: The folder.
        index: Position of the model among the prepared ones.
        kind: SHARDED_STATE_DICT, FULL_STATE_DICT or LOCAL_STATE_DICT.
        keep: Filters the state before it is written; None keeps everything.
    """
    for part in model_parts(model, index, kind, keep):
        part.write_here(Path(folder))


def model_parts(model: nn.Module, index: int, kind: str, keep: Filter | None = None) -> list[StatePart]:
    """Return this rank's parts of a sharded model; every rank must call this.

    Args:
        model: The sharded model.
        index: Position of the model among the prepared ones.
        kind: As for `save_model`.
        keep: As for `save_model`.

    Returns:
        One part, or none on a rank that writes nothing.
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


def load_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    index: int = 0,
    strict: bool = True,
    keep: Filter | None = None,
) -> Any:
    """Read a sharded model from a folder; every rank must call this.

    Args:
        model: The sharded model.
        folder: The folder.
        index: Position of the model among the prepared ones.
        strict: Whether the names must be those of the model.
        keep: The filter that the state was written with; None keeps everything.

    Returns:
        The names that were missing or not expected, if torch returns them.

    Raises:
        CheckpointMismatchError: The folder has no such model, or parts of another number of ranks.
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
            f"{path.name} of the same shapes. Prepare the same models in the same order as before saving; "
            "LOCAL_STATE_DICT also needs the same number of ranks (SHARDED_STATE_DICT does not)."
        )
    with torch.no_grad():
        for name, tensor in state.items():
            mine[name].copy_(tensor)


# -- optimizers -------------------------------------------------------------------------------------------------------


def save_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, folder: str | os.PathLike[str], index: int, kind: str
) -> None:
    """Write the optimizer of a sharded model into a folder; every rank must call this.

    Args:
        optimizer: torch's optimizer.
        model: The sharded model that has its parameters.
        folder: The folder.
        index: Position of the optimizer among the prepared ones.
        kind: As for `save_model`; LOCAL_STATE_DICT writes the full state.
    """
    for part in optimizer_parts(optimizer, model, index, kind):
        part.write_here(Path(folder))


def optimizer_parts(optimizer: torch.optim.Optimizer, model: nn.Module, index: int, kind: str) -> list[StatePart]:
    """Return this rank's parts of the optimizer of a sharded model; every rank must call this.

    Args:
        optimizer: torch's optimizer.
        model: The sharded model that has its parameters.
        index: Position of the optimizer among the prepared ones.
        kind: As for `save_optimizer`.

    Returns:
        One part, or none on a rank that writes nothing.
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
        optimizer: torch's optimizer.
        model: The sharded model that has its parameters.
        folder: The folder.
        index: Position of the optimizer among the prepared ones.

    Raises:
        CheckpointMismatchError: The folder has no such optimizer.
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
    """Return the content of a file on rank 0, which broadcasts it, and nothing on others; if it fails, all raise."""
    state: dict[str, Any] = {}
    failure: BaseException | None = None
    try:
        if _rank() == 0:
            state = read_torch(path)
    except Exception as error:  # noqa: BLE001 - raised below, after the other ranks have received it
        failure = error
    exchange_or_raise(failure, None, None)
    return state
