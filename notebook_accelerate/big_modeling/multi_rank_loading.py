"""Checkpoints into models that several ranks have: read by one and broadcast, or by each and divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from notebook_accelerate.big_modeling.checkpoint_shards import Shard, names_of, shards_of, tensors_of
from notebook_accelerate.big_modeling.tensor_sources import Source
from notebook_accelerate.collectives import broadcast_object_list
from notebook_accelerate.errors import CheckpointError


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
        model: The model: whole on each rank, or of distributed tensors; on the meta device too.
        checkpoint: A file, an index, or a folder; where rank 0 broadcasts, it alone needs it.
        check: Raises where the tensors of a file are not the model's.
        check_names: The same for the names of all files, before the first is loaded.
        full_state_dict: The files have whole tensors; False: distributed ones, each rank its own files.
        broadcast_from_rank0: Rank 0 alone reads.

    Returns:
        The names of all tensors in the files.

    Raises:
        CheckpointError: The files are broken, or of another model; on every rank, whoever reads.
        ValueError: There are none.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    alone = not torch.distributed.is_initialized()
    reads = alone or not broadcast_from_rank0 or torch.distributed.get_rank() == 0
    tell = broadcast_from_rank0 and not alone
    shards: list[Shard] = []

    def find() -> int:
        shards.extend(shards_of(checkpoint))
        check_names(names_of(shards))
        return len(shards)

    names: list[str] = []
    for index in range(_told(find, reads, tell)):
        part: dict[str, Any] = {}

        def read(index: int = index, part: dict[str, Any] = part) -> list[str]:
            sources = shards[index].sources()
            check(sources)
            part.update(tensors_of(sources, lambda _: "cpu"))
            if not full_state_dict:
                _check_divided(model, part)
            return list(sources)

        names += _told(read, reads, tell)
        options = StateDictOptions(full_state_dict=full_state_dict, broadcast_from_rank0=tell, strict=False)
        set_model_state_dict(model, part, options=options)
    return names


def _check_divided(model: torch.nn.Module, part: dict[str, Any]) -> None:
    """Refuse whole tensors for a model's distributed ones where the files are said to have none."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in part and hasattr(parameter, "device_mesh") and not hasattr(part[name], "device_mesh"):
            raise ValueError(
                f"full_state_dict=False says that the files have distributed tensors, and {name} is whole there; pass "
                "full_state_dict=True, and each rank takes its part of it"
            )


def _told(action: Callable[[], Any], reads: bool, tell: bool) -> Any:
    """Return what the reading rank's action gives, on every rank; raise what it raises there, on every rank too."""
    value, failure = None, None
    if reads:
        try:
            value = action()
        except (CheckpointError, ValueError, OSError) as error:
            failure = error
    if tell:
        value, failure = broadcast_object_list([value, failure], from_process=0)
    if failure is not None:
        raise failure
    return value
