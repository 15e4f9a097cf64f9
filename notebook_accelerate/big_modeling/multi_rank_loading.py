"""Loads checkpoints on several ranks: read by one and broadcast, or read by each and sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from notebook_accelerate.big_modeling.checkpoint_shards import Shard, find_shards, tensor_names
from notebook_accelerate.big_modeling.tensor_sources import Source
from notebook_accelerate.collectives import broadcast_object_list
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.torch_internals import uncompiled_name


def load_on_ranks(
    model: torch.nn.Module,
    checkpoint: Any,
    check: Callable[[dict[str, Source]], None],
    check_names: Callable[[Iterable[str]], None],
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> list[str]:
    """Load a checkpoint, one file at a time; every rank must call this.

    Args:
        model: The model: replicated, or with distributed tensors; on the meta device too.
        checkpoint: A file, an index, or a folder; only rank 0 needs it if it broadcasts.
        check: Raises if the tensors of a file are not the model's.
        check_names: The same for the names of all files, before the first is loaded.
        full_state_dict: The files contain full tensors; False: distributed ones, in files of each rank.
        broadcast_from_rank0: Only rank 0 reads.

    Returns:
        The names of all tensors in the files.

    Raises:
        CheckpointError: The files are broken, or another model's; raised on every rank.
        ValueError: The checkpoint contains no weights; raised on every rank.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    alone = not torch.distributed.is_initialized()
    reads = alone or not broadcast_from_rank0 or torch.distributed.get_rank() == 0
    broadcasts = broadcast_from_rank0 and not alone
    shards: list[Shard] = []

    def find() -> int:
        shards.extend(find_shards(checkpoint, model.state_dict()))
        check_names(tensor_names(shards))
        return len(shards)

    names: list[str] = []
    for index in range(_on_all_ranks(find, reads, broadcasts)):
        part: dict[str, Any] = {}

        def read(index: int = index, part: dict[str, Any] = part) -> list[str]:
            sources = shards[index].sources()
            check(sources)
            loaded = {name: source.load(torch.device("cpu")) for name, source in sources.items()}
            if not full_state_dict:
                _check_divided(model, loaded)
            part.update((uncompiled_name(name), tensor) for name, tensor in loaded.items())  # as torch names them
            return list(sources)

        names += _on_all_ranks(read, reads, broadcasts)
        options = StateDictOptions(full_state_dict=full_state_dict, broadcast_from_rank0=broadcasts, strict=False)
        set_model_state_dict(model, part, options=options)
    return names


def _check_divided(model: torch.nn.Module, part: dict[str, Any]) -> None:
    """Check that the files contain distributed tensors for a model's distributed ones."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in part and hasattr(parameter, "device_mesh") and not hasattr(part[name], "device_mesh"):
            raise ValueError(
                f"full_state_dict=False needs files with distributed tensors, and {name} is a full tensor there; pass "
                "full_state_dict=True, and each rank loads its shard of it"
            )


def _on_all_ranks(action: Callable[[], Any], reads: bool, broadcasts: bool) -> Any:
    """Return the result of the reading rank's action, or raise its exception, on every rank."""
    value, failure = None, None
    if reads:
        try:
            value = action()
        except (CheckpointError, ValueError, OSError) as error:
            failure = error
    if broadcasts:
        value, failure = broadcast_object_list([value, failure], from_process=0)
    if failure is not None:
        raise failure
    return value
