"""The collectives: gather, reduce, broadcast, pad_across_processes, and those for Python objects."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch

from notebook_accelerate.collectives import verify
from notebook_accelerate.collectives.communicator import COMMUNICATORS
from notebook_accelerate.collectives.containers import is_torch_tensor, tensors_of, with_leaves
from notebook_accelerate.collectives.fused import fused, unpack, unpack_rows
from notebook_accelerate.collectives.local import CannotPadNestedTensorWarning
from notebook_accelerate.state import PartialState
from notebook_accelerate.state.notices import warn_once

REDUCTIONS = ("mean", "sum", "none")


def gather(tensor: Any) -> Any:
    """Join every tensor of a nested structure over ranks, along the first dimension; every rank must call this.

    Args:
        tensor: Nested containers of tensors with the same shapes on every rank (see `pad_across_processes`).

    Returns:
        The structure; tensors of shape (n, ...) become (ranks * n, ...), those without dimensions (ranks,), on every
        rank, in the order of ranks. In a world of one, what was given.

    Raises:
        TypeError: A leaf is no tensor; use `gather_object`.
        DistributedOperationException: In debug mode: shapes, dtypes or structures differ between ranks.
    """
    state = PartialState()
    leaves = _checked_leaves(tensor, "gather", state)
    if state.num_processes == 1 or not leaves:
        return tensor
    row = COMMUNICATORS[state.communicator]
    moved = _on(state.device, leaves)
    joined = fused(moved, lambda flat, group: unpack_rows(row.all_gather(flat, state.num_processes), group))
    return _rebuilt(tensor, joined)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Add up, or average, every tensor of a nested structure over ranks; every rank must call this.

    Args:
        tensor: Nested containers of tensors with the same shapes on every rank.
        reduction: mean, sum or none. A mean of whole numbers is a float.
        scale: Factor applied to the result, on XLA only, as in Accelerate.

    Returns:
        The structure, with new tensors; in a world of one, what was given.

    Raises:
        ValueError: There is no such reduction.
        TypeError: A leaf is no tensor.
        DistributedOperationException: In debug mode: shapes, dtypes or structures differ between ranks.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not known; pass 'mean', 'sum' or 'none'")
    state = PartialState()
    leaves = _checked_leaves(tensor, "reduce", state)
    if state.num_processes == 1 or not leaves or reduction == "none":
        return tensor
    factor = _scale_of(state, scale)
    row = COMMUNICATORS[state.communicator]

    def move(flat: torch.Tensor, group: list[torch.Tensor]) -> list[torch.Tensor]:
        whole = flat.to(torch.int64) if flat.dtype == torch.bool else flat
        total = row.all_reduce(whole)
        if reduction == "mean":
            total = total / state.num_processes
        return unpack(total * factor if factor != 1.0 else total, group)

    return _rebuilt(tensor, fused(_on(state.device, leaves), move))


def _scale_of(state: PartialState, scale: float) -> float:
    if scale != 1.0 and state.communicator != "xla":
        warn_once(f"reduce(scale={scale}) has an effect on XLA only: multiply the result instead")
        return 1.0
    return scale


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Give every rank the tensors of one rank; every rank must call this.

    Args:
        tensor: Nested containers of tensors with the same shapes on every rank. They are overwritten in place.
        from_process: The rank whose values all get.

    Returns:
        The structure, on the rank's device.

    Raises:
        TypeError: A leaf is no tensor.
        DistributedOperationException: In debug mode: shapes, dtypes or structures differ between ranks.
    """
    state = PartialState()
    leaves = _checked_leaves(tensor, "broadcast", state)
    if state.num_processes == 1 or not leaves:
        return tensor
    row = COMMUNICATORS[state.communicator]
    moved = _on(state.device, leaves)
    received = fused(moved, lambda flat, group: unpack(row.broadcast(flat, from_process), group))
    with torch.no_grad():
        torch._foreach_copy_(moved, received)
    return _rebuilt(tensor, moved)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad every tensor of a nested structure to the largest size among ranks; every rank must call this.

    Args:
        tensor: Nested containers of tensors; between ranks they may differ in the size of `dim` only.
        dim: The dimension that is padded; tensors without it are kept.
        pad_index: What is padded with.
        pad_first: Pad at the beginning instead of the end.

    Returns:
        The structure; in a world of one, what was given.

    Raises:
        TypeError: A leaf is no tensor.
    """
    state = PartialState()
    leaves = _checked_leaves(tensor, "pad_across_processes", state, dim)
    if state.num_processes == 1 or not leaves:
        return tensor
    sizes = [_size_along(leaf, dim) for leaf in leaves]
    told = torch.tensor(sizes, dtype=torch.int64, device=state.device)
    largest = COMMUNICATORS[state.communicator].all_reduce(told, maximum=True).tolist()
    return _rebuilt(
        tensor,
        [
            _padded(leaf, dim, wanted, pad_index, pad_first) if wanted > size >= 0 else leaf
            for leaf, size, wanted in zip(leaves, sizes, largest, strict=True)
        ],
    )


def _size_along(leaf: torch.Tensor, dim: int) -> int:
    """Return the size of a dimension; -1 where the tensor has none such or cannot be padded."""
    if getattr(leaf, "is_nested", False):
        warnings.warn(
            "a tensor of nested layout cannot be padded: it stays as it is", CannotPadNestedTensorWarning, stacklevel=4
        )
        return -1
    return leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else -1


def _padded(leaf: torch.Tensor, dim: int, size: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    shape = list(leaf.shape)
    shape[dim] = size
    result = leaf.new_full(shape, pad_index)
    begin = size - leaf.shape[dim] if pad_first else 0
    result.narrow(dim, begin, leaf.shape[dim]).copy_(leaf)
    return result


def _checked_leaves(data: Any, operation: str, state: PartialState, free_dim: int | None = None) -> list[torch.Tensor]:
    """List the tensors, after checking that there is nothing else and, in debug mode, that ranks agree."""
    leaves = tensors_of(data, operation)
    if state.debug and state.num_processes > 1:
        verify.check(operation, data, state, free_dim)
    return leaves


def _on(device: torch.device, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    # Comparing devices costs a quarter of a `.to` that has nothing to do.
    return [leaf if leaf.device == device else leaf.to(device) for leaf in leaves]


def _rebuilt(data: Any, leaves: list[torch.Tensor]) -> Any:
    return leaves[0] if is_torch_tensor(data) else with_leaves(data, leaves)


def gather_object(object: Any) -> Any:
    """Collect Python objects from all ranks; every rank must call this.

    Args:
        object: A list (or tuple) of picklable objects, or any other picklable object.

    Returns:
        The lists of all ranks one after the other; a list with one entry per rank where the object is no list. In a
        world of one, what was given.
    """
    state = PartialState()
    if state.num_processes == 1:
        return object
    found = COMMUNICATORS[state.communicator].all_gather_object(object, state.num_processes)
    if all(isinstance(part, (list, tuple)) for part in found):
        return list(itertools.chain.from_iterable(found))
    return found


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Give every rank the Python objects of one rank; every rank must call this.

    Args:
        object_list: Picklable objects; equally long on every rank, overwritten in place.
        from_process: The rank whose objects all get.

    Returns:
        The list.
    """
    state = PartialState()
    if state.num_processes > 1:
        COMMUNICATORS[state.communicator].broadcast_object_list(object_list, from_process, state.device)
    return object_list


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Give every rank a tensor that only one rank has, whose shape the others do not know; every rank must call this.

    Args:
        tensor: The tensor, on exactly one rank; None on the others.

    Returns:
        The tensor, on the rank's device.

    Raises:
        ValueError: No rank, or more than one, has a tensor.
    """
    state = PartialState()
    row = COMMUNICATORS[state.communicator]
    mine = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    told = row.all_gather_object(mine, state.num_processes)
    holders = [rank for rank, what in enumerate(told) if what is not None]
    if len(holders) != 1:
        raise ValueError(
            f"copy_tensor_to_devices needs a tensor on exactly one rank; ranks {holders or 'none'} passed one"
        )
    shape, dtype = told[holders[0]]
    buffer = torch.empty(shape, dtype=dtype, device=state.device) if tensor is None else tensor.to(state.device)
    return row.broadcast(buffer.contiguous(), holders[0]) if state.num_processes > 1 else buffer
