"""The collectives: gather, reduce, broadcast and pad_across_processes for tensors, and others for Python objects."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Sequence, Set as AbstractSet
from typing import Any

import torch

from notebook_accelerate.collectives.block_exchange import (
    BlockViews,
    CollectiveCall,
    check_arguments,
    exchange_for,
    gather_blocks,
)
from notebook_accelerate.collectives.communicator import COMMUNICATORS
from notebook_accelerate.collectives.layouts import (
    Layout,
    Nested,
    is_small,
    layout_of,
    recursively_apply,
    require_tensors,
    with_tensors,
)
from notebook_accelerate.collectives.local_operations import CannotPadNestedTensorWarning
from notebook_accelerate.state import GradientState, PartialState
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.torch_internals import foreach_copy

REDUCTIONS = ("mean", "sum", "max", "none")


def gather(tensor: Nested) -> Nested:
    """Join every tensor of a nested structure across ranks, along the first dimension; every rank must call this.

    Args:
        tensor: Nested containers of tensors with the same shapes on every rank (see `pad_across_processes`).

    Returns:
        The structure on every rank, joined in the order of ranks. Tensors of shape (n, ...) become (ranks * n, ...),
        and tensors without dimensions become (ranks,). With a single rank, the argument itself is returned.

    Raises:
        TypeError: A leaf is not a tensor; use `gather_object` instead.
        DistributedOperationException: Shapes or dtypes differ between ranks. This is always detected with gloo, and
            with other backends only in debug mode, which also compares the names of nested values.
    """
    state = PartialState()
    leaves = _check_leaves(tensor, "gather", state)
    if state.num_processes == 1:
        return tensor
    call = CollectiveCall("gather", tensor, _move_to(state.device, leaves))

    def allocate(views: BlockViews) -> tuple[list[torch.Tensor], Nested]:
        targets, joined = views.allocate_joined()
        return targets, with_tensors(tensor, joined)

    exchanged = gather_blocks(state, call, allocate)
    if exchanged is not None:
        views, (targets, results) = exchanged
        views.join(targets)
        return results
    send, size, segments = COMMUNICATORS[state.communicator].all_gather, state.num_processes, call.layout.segments
    joined = [segment.unpack_rows(send(segment.pack(call.leaves), size)) for segment in segments]
    return with_tensors(tensor, call.layout.in_order(joined))


def reduce(tensor: Nested, reduction: str = "mean", scale: float = 1.0) -> Nested:
    """Sum or average every tensor of a nested structure over ranks, or take the maximum; every rank must call this.

    Args:
        tensor: Nested containers of tensors with the same shapes on every rank.
        reduction: mean, sum, max or none. The mean of integers is a float.
        scale: A factor for the result. As in Accelerate, it only has an effect on XLA.

    Returns:
        The structure with new tensors. With a single rank, the argument itself is returned.

    Raises:
        ValueError: The reduction is unknown.
        TypeError: A leaf is not a tensor.
        DistributedOperationException: Shapes or dtypes differ between ranks (see `gather`).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not known; pass 'mean', 'sum', 'max' or 'none'")
    state = PartialState()
    leaves = _check_leaves(tensor, "reduce", state)
    if state.num_processes == 1 or reduction == "none":
        return tensor
    factor = _supported_scale(state, scale)
    call = CollectiveCall("reduce", tensor, _move_to(state.device, leaves))
    segments = call.layout.segments

    def allocate(_: BlockViews) -> tuple[list[torch.Tensor], Nested]:
        dtypes = [_result_dtype(part.dtype, reduction) for part in segments]
        totals = [
            torch.empty(part.count, dtype=dtype, device=state.device)
            for part, dtype in zip(segments, dtypes, strict=True)
        ]
        return totals, with_tensors(tensor, _unpack_all(call.layout, totals))

    exchanged = gather_blocks(state, call, allocate)
    if exchanged is not None:
        views, (totals, results) = exchanged
        for rows, total in zip(views.by_rank, totals, strict=True):
            _reduce_rows(rows, reduction, total)
        return results
    send = COMMUNICATORS[state.communicator].all_reduce
    totals = [send(_summable(segment.pack(call.leaves)), maximum=reduction == "max") for segment in segments]
    if reduction == "mean":
        totals = [_divide(total, state.num_processes) for total in totals]
    if factor != 1.0:
        totals = [total * factor for total in totals]
    return with_tensors(tensor, _unpack_all(call.layout, totals))


def _unpack_all(layout: Layout, totals: list[torch.Tensor]) -> list[torch.Tensor]:
    return layout.in_order([part.unpack(total) for part, total in zip(layout.segments, totals, strict=True)])


def _result_dtype(dtype: torch.dtype, reduction: str) -> torch.dtype:
    """Return the dtype of the sum, mean or maximum of tensors with a given dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    return torch.get_default_dtype() if reduction == "mean" else torch.int64 if dtype == torch.bool else dtype


def _reduce_rows(rows: tuple[torch.Tensor, ...], reduction: str, out: torch.Tensor) -> None:
    """Compute the sum, mean or maximum over ranks, in the order of ranks, and in the dtype of the tensors.

    The result is the same as with `all_reduce`.

    Args:
        rows: The packed tensor of each rank, of shape (count,).
        reduction: sum, mean or max.
        out: The tensor for the result, of shape (count,).
    """
    rows = tuple(_summable(row) for row in rows)
    if reduction == "max":
        torch.amax(torch.stack(rows), 0, out=out)
        return
    same = out.dtype == rows[0].dtype
    total = torch.add(rows[0], rows[1], out=out) if same else rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    if reduction == "mean":
        torch.div(total, len(rows), out=out)


def _divide(total: torch.Tensor, number: int) -> torch.Tensor:
    return total.div_(number) if total.is_floating_point() or total.is_complex() else total / number


def _summable(flat: torch.Tensor) -> torch.Tensor:
    return flat.to(torch.int64) if flat.dtype == torch.bool else flat


def _supported_scale(state: PartialState, scale: float) -> float:
    if scale != 1.0 and state.communicator != "xla":
        warn_once(f"reduce(scale={scale}) has no effect except on XLA: multiply the result instead")
        return 1.0
    return scale


def broadcast(tensor: Nested, from_process: int = 0) -> Nested:
    """Send the tensors of one rank to all ranks; every rank must call this.

    Args:
        tensor: Nested containers of tensors with the same shapes on every rank. They are overwritten in place.
        from_process: The rank that sends its tensors.

    Returns:
        The structure on the rank's device.

    Raises:
        ValueError: `from_process` is not the index of a rank.
        TypeError: A leaf is not a tensor.
        DistributedOperationException: Shapes or dtypes differ between ranks (see `gather`).
    """
    state = PartialState()
    leaves = _check_leaves(tensor, "broadcast", state)
    if state.num_processes == 1:
        return tensor
    _check_rank("from_process", from_process, state)
    if state.process_index == from_process:
        return _send(state, tensor, leaves)
    return _receive(state, tensor, leaves, from_process)


def _send(state: PartialState, tensor: Nested, leaves: list[torch.Tensor]) -> Nested:
    """Send this rank's tensors to the other ranks, which must call `_receive`."""
    call = CollectiveCall("broadcast", tensor, _move_to(state.device, leaves))
    exchange = exchange_for(state)
    if exchange is not None:
        fitted, results = exchange.send(call, state.process_index, lambda: with_tensors(tensor, call.leaves))
        if fitted:
            return results
    for segment in call.layout.segments:
        COMMUNICATORS[state.communicator].broadcast(segment.pack(call.leaves), state.process_index)
    return with_tensors(tensor, call.leaves)


def _receive(state: PartialState, tensor: Nested, leaves: list[torch.Tensor], source: int) -> Nested:
    """Overwrite this rank's tensors with the tensors of the rank that calls `_send`; all other ranks must call this."""

    def prepare() -> tuple[CollectiveCall, Nested]:
        call = CollectiveCall("broadcast", tensor, _move_to(state.device, leaves))
        return call, with_tensors(tensor, call.leaves)

    exchange = exchange_for(state)
    views, (call, results) = (None, prepare()) if exchange is None else exchange.receive(source, prepare)
    received = _receive_segments(state, call, source) if views is None else views.leaves
    if received:
        with torch.no_grad():
            foreach_copy(call.leaves, received)
    return results


def _receive_segments(state: PartialState, call: CollectiveCall, source: int) -> list[torch.Tensor]:
    """Receive the tensors of one rank, with one collective for each dtype."""
    receive = COMMUNICATORS[state.communicator].broadcast
    parts = [segment.views(receive(segment.empty(state.device), source)) for segment in call.layout.segments]
    return call.layout.in_order(parts)


def _check_rank(name: str, rank: int, state: PartialState) -> None:
    if not isinstance(rank, int) or not 0 <= rank < state.num_processes:
        raise ValueError(f"{name}={rank!r} is not a rank; pass one from 0 to {state.num_processes - 1}: {name}=0")


def pad_across_processes(tensor: Nested, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Nested:
    """Pad every tensor of a nested structure to the largest size across ranks; every rank must call this.

    Args:
        tensor: Nested containers of tensors, which may differ between ranks only in the size of dimension `dim`.
        dim: The dimension to pad. Tensors without this dimension are kept.
        pad_index: The padding value.
        pad_first: Whether to pad at the beginning instead of the end.

    Returns:
        The structure with padded tensors. With a single rank, the argument itself is returned.

    Raises:
        TypeError: A leaf is not a tensor.
        DistributedOperationException: The number of tensors differs between ranks. In debug mode, this is also raised
            if the size of another dimension differs.
    """
    state = PartialState()
    leaves = _check_leaves(tensor, "pad_across_processes", state, dim)
    if state.num_processes == 1:
        return tensor
    layout = _layout_if_dense(leaves)
    sizes = _sizes_along(leaves, layout, dim)
    own_sizes = torch.tensor(sizes, dtype=torch.int64, device=state.device)
    call = CollectiveCall("pad_across_processes", tensor, [own_sizes], dim)
    exchanged = gather_blocks(state, call, lambda _: _can_stack(leaves, layout))
    if exchanged is not None:
        views, can_stack = exchanged
        largest = views.rows[0].amax(0)
    else:
        largest, can_stack = COMMUNICATORS[state.communicator].all_reduce(own_sizes, maximum=True), None
    wanted = largest.tolist()
    if wanted == sizes:
        return with_tensors(tensor, leaves)
    if can_stack is None:
        can_stack = _can_stack(leaves, layout)
    if can_stack and wanted.count(wanted[0]) == len(wanted) and sizes[0] >= 0:
        # For 50 tensors of 64 x 4, padding all of them in one operation takes a fifth of the time.
        stacked = _pad(torch.stack(leaves), dim + 1 if dim >= 0 else dim, wanted[0], pad_index, pad_first)
        return with_tensors(tensor, stacked.unbind(0))
    padded = [
        _pad(leaf, dim, size, pad_index, pad_first) if size > own >= 0 else leaf
        for leaf, own, size in zip(leaves, sizes, wanted, strict=True)
    ]
    return with_tensors(tensor, padded)


def _layout_if_dense(leaves: list[torch.Tensor]) -> Layout | None:
    """Return the layout of tensors, or None if one of them has a nested layout, and therefore no shape."""
    if True in [leaf.is_nested for leaf in leaves]:  # A list is faster than a generator here.
        warnings.warn(
            "a tensor with a nested layout cannot be padded; it is left unchanged",
            CannotPadNestedTensorWarning,
            stacklevel=4,
        )
        return None
    return layout_of(leaves)


def _sizes_along(leaves: list[torch.Tensor], layout: Layout | None, dim: int) -> list[int]:
    """Return the size of each tensor along a dimension, or -1 if a tensor lacks the dimension or cannot be padded."""
    if layout is None:
        shapes = [torch.Size() if leaf.is_nested else leaf.shape for leaf in leaves]
    else:
        shapes = list(layout.shapes[:1] if layout.same_shape else layout.shapes)
    sizes = [shape[dim] if -len(shape) <= dim < len(shape) else -1 for shape in shapes]
    return sizes * len(leaves) if len(sizes) < len(leaves) else sizes


def _can_stack(leaves: list[torch.Tensor], layout: Layout | None) -> bool:
    """Return whether one operation can pad all tensors.

    This is not possible with autograd, because the results would be views, which reject in-place changes.
    """
    return (
        layout is not None
        and layout.same_shape
        and len(leaves) > 1
        and is_small(layout.bytes)
        and _on_device(leaves, leaves[0].device)
        and not (torch.is_grad_enabled() and True in [leaf.requires_grad for leaf in leaves])
    )


def _pad(leaf: torch.Tensor, dim: int, size: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    edges = [0] * (2 * leaf.ndim)  # torch expects two numbers per dimension, starting with the last dimension.
    last = 2 * (-dim - 1 if dim < 0 else leaf.ndim - 1 - dim)
    edges[last if pad_first else last + 1] = size - leaf.shape[dim]
    return torch.constant_pad_nd(leaf, edges, pad_index)


def _check_leaves(data: Any, operation: str, state: PartialState, free_dim: int | None = None) -> list[torch.Tensor]:
    """Return the tensors, after checking that there are no other leaves and, in debug mode, that all ranks agree."""
    leaves = require_tensors(data, operation)
    if state.debug and state.num_processes > 1:
        check_arguments(operation, data, state, free_dim)
    return leaves


def _move_to(device: torch.device, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return leaves if _on_device(leaves, device) else [leaf.to(device) for leaf in leaves]


def _on_device(leaves: list[torch.Tensor], device: torch.device) -> bool:
    if device.type == "cpu":  # Reading is_cpu takes half as long as comparing devices.
        return False not in [leaf.is_cpu for leaf in leaves]
    return [leaf.device for leaf in leaves].count(device) == len(leaves)


def gather_object(object: Any) -> Any:
    """Collect Python objects from all ranks; every rank must call this.

    Args:
        object: A sequence or set of picklable objects, a tensor or array with rows, or any other picklable object.

    Returns:
        A list of the items of all ranks. Strings, mappings and objects that have no items are collected as one entry
        per rank. With a single rank, the argument itself is returned.
    """
    state = PartialState()
    if state.num_processes == 1:
        return object
    found = COMMUNICATORS[state.communicator].all_gather_object(object, state.num_processes)
    return list(itertools.chain.from_iterable(found)) if all(map(_has_items, found)) else found


def _has_items(part: Any) -> bool:
    if isinstance(part, (list, tuple, torch.Tensor)) or type(part).__module__ == "numpy":
        return getattr(part, "ndim", 1) > 0
    return isinstance(part, (Sequence, AbstractSet)) and not isinstance(part, (str, bytes))


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Send the Python objects of one rank to all ranks; every rank must call this.

    Args:
        object_list: A list of picklable objects that has the same length on every rank. It is overwritten in place.
        from_process: The rank that sends its objects.

    Returns:
        The same list, with the items of the sending rank.

    Raises:
        ValueError: `object_list` is not a list, or `from_process` is not the index of a rank.
    """
    state = PartialState()
    if not isinstance(object_list, list):
        raise ValueError(
            f"broadcast_object_list overwrites a list in place; got {type(object_list).__name__}. Pass a list: "
            "broadcast_object_list([value])"
        )
    if state.num_processes > 1:
        _check_rank("from_process", from_process, state)
        COMMUNICATORS[state.communicator].broadcast_object_list(object_list, from_process, state.device)
    return object_list


# ---- results of an evaluation, where every sample of the dataset must count exactly once

_log = logging.getLogger(__name__)


def gather_for_metrics(input_data: Nested, gradient_state: GradientState, use_gather_object: bool = False) -> Nested:
    """Join results across ranks, without the samples that pad the last batches; every rank must call this.

    Args:
        input_data: Nested containers of tensors, or a list of picklable objects, with one entry for each sample.
        gradient_state: The gradient state, which has a reference to the loader that is being read.
        use_gather_object: Whether to treat the data as Python objects, even if it contains tensors.

    Returns:
        The results, with each sample once. Even with a single rank, results are cut to the number of samples: libraries
        that repeat the loss of a short batch up to the full batch size rely on this. If a part of the results has no
        rows, such as a number or, with a single rank, a loss without dimensions, nothing is cut.
    """
    as_objects = use_gather_object or not _only_tensors(input_data)
    data: Any = gather_object(input_data) if as_objects else gather(input_data)
    kept = gradient_state.remainder if gradient_state.end_of_dataloader else 0
    if kept < 0:
        _log.info("Nothing is cut from the results of the last batch: its loader has no length.")
    results: Nested = _first_rows(kept, data, as_objects) if kept > 0 else data
    return results


def _first_rows(kept: int, data: Any, as_objects: bool) -> Any:
    try:
        return data[:kept] if as_objects else recursively_apply(lambda tensor: tensor[:kept], data)
    except Exception:  # noqa: BLE001 - slicing an object may raise anything; Accelerate catches it, too
        return data


def _only_tensors(data: Any) -> bool:
    try:
        require_tensors(data, "gather_for_metrics")
    except TypeError:
        return False
    return True
