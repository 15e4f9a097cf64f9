"""Collectives, and functions for nested containers of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from notebook_accelerate._lazy import reexport
from notebook_accelerate.collectives import (
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    ignorant_find_batch_size as ignorant_find_batch_size,
    recursively_apply as recursively_apply,
)
from notebook_accelerate.collectives.block_exchange import check_arguments
from notebook_accelerate.collectives.communicator import COMMUNICATORS
from notebook_accelerate.collectives.layouts import Nested
from notebook_accelerate.errors import DistributedOperationException as DistributedOperationException
from notebook_accelerate.state import PartialState

if TYPE_CHECKING:
    from notebook_accelerate.collectives import (
        CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
        broadcast as broadcast,
        broadcast_object_list as broadcast_object_list,
        concatenate as concatenate,
        convert_to_fp32 as convert_to_fp32,
        find_device as find_device,
        gather as gather,
        gather_object as gather_object,
        get_data_structure as get_data_structure,
        honor_type as honor_type,
        initialize_tensors as initialize_tensors,
        is_namedtuple as is_namedtuple,
        is_tensor_information as is_tensor_information,
        is_torch_tensor as is_torch_tensor,
        pad_across_processes as pad_across_processes,
        reduce as reduce,
        send_to_device as send_to_device,
        slice_tensors as slice_tensors,
    )

reexport(__name__)


# ---- descriptions of containers


def get_shape(data: Any) -> Any:
    """Describe the shapes of a nested structure.

    Args:
        data: Nested containers of tensors.

    Returns:
        The structure, with a list of sizes instead of each tensor.
    """
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def listify(data: Any) -> Any:
    """Convert every tensor of a nested structure to numbers in lists.

    Args:
        data: Nested containers of tensors. bfloat16 is converted through float32, because other libraries lack it.
    """

    def numbers(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).tolist()

    return recursively_apply(numbers, data)


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first tensor in a nested structure.

    Args:
        data: Nested containers of tensors.

    Raises:
        ValueError: The structure contains no tensor with at least one dimension.
    """
    size = ignorant_find_batch_size(data)
    if size is None:
        raise ValueError(
            f"{type(data).__name__} has no batch size, because it contains no tensor with at least one dimension; pass "
            "a batch of tensors, for instance torch.ones(batch_size, 3)"
        )
    return size


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether `tensor` is a tensor on an xpu device (an Intel GPU)."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


# ---- convert containers and outputs


def pad_input_tensors(tensor: Nested, batch_size: int, num_processes: int, dim: int = 0) -> Nested:
    """Pad the tensors of a batch with zeros so that it splits evenly between processes.

    Args:
        tensor: Nested containers of tensors.
        batch_size: The size of the batch along `dim`. Tensors with another size are kept unchanged.
        num_processes: The number of parts that the batch is split into.
        dim: The dimension that is split.

    Returns:
        The structure. The length of each padded tensor is a multiple of `num_processes`.
    """
    missing = -batch_size % num_processes

    def padded(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim <= dim or leaf.shape[dim] != batch_size:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)  # constant_pad_nd does not support sparse tensors.

    result: Nested = recursively_apply(padded, tensor, error_on_other_type=True) if missing else tensor
    return result


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Wrap a forward method so that it returns float32 instead of float16 or bfloat16.

    Args:
        model_forward: A function or a bound method.

    Returns:
        A callable with the same signature. It can be pickled if the original can.
    """
    return ConvertOutputsToFp32(model_forward)


# ---- collectives


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
TENSOR_TYPE_TO_INT = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}
"""The number of each dtype, which ranks send instead of the dtype itself."""
TENSOR_INT_TO_DTYPE = dict(enumerate(_DTYPES, start=1))
"""The dtype for each number in `TENSOR_TYPE_TO_INT`."""


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Size | None, int | None]:
    """Send the shape of one rank's tensor to all ranks; every rank must call this.

    Args:
        tensor: The tensor on one rank, and None on the others.

    Returns:
        The shape, and the number of the dtype in `TENSOR_TYPE_TO_INT`. Both are None if no rank has a tensor.
    """
    state = PartialState()
    mine = None if tensor is None else (tensor.shape, TENSOR_TYPE_TO_INT[tensor.dtype])
    gathered = COMMUNICATORS[state.communicator].all_gather_object(mine, state.num_processes)
    return next((found for found in gathered if found is not None), (None, None))


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Send a tensor from one rank to all ranks, which need not know its shape; every rank must call this.

    Args:
        tensor: The tensor on exactly one rank, and None on the others.

    Returns:
        The tensor, on the rank's device.

    Raises:
        ValueError: No rank, or more than one, has a tensor.
    """
    state = PartialState()
    row = COMMUNICATORS[state.communicator]
    mine = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    found = row.all_gather_object(mine, state.num_processes)
    sources = [rank for rank, shape in enumerate(found) if shape is not None]
    if len(sources) != 1:
        raise ValueError(
            f"copy_tensor_to_devices needs a tensor on exactly one rank; ranks {sources or 'none'} passed one: "
            "copy_tensor_to_devices(tensor if accelerator.is_main_process else None)"
        )
    shape, dtype = found[sources[0]]
    buffer = torch.empty(shape, dtype=dtype, device=state.device) if tensor is None else tensor.to(state.device)
    return row.broadcast(buffer.contiguous(), sources[0]) if state.num_processes > 1 else buffer


_Operation = TypeVar("_Operation", bound=Callable[..., Any])


def verify_operation(function: _Operation) -> _Operation:
    """Decorate a collective to check, in debug mode, that all ranks pass the same shapes.

    Args:
        function: A function whose first argument is a nested structure of tensors.

    Returns:
        The wrapped function. It raises `DistributedOperationException` if ranks pass different shapes.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.num_processes > 1:
            data = kwargs.get("tensor", args[0] if args else None)
            check_arguments(getattr(function, "__name__", "operation"), data, state)
        return function(*args, **kwargs)

    return cast("_Operation", checked)


def chained_operation(function: _Operation) -> _Operation:
    """Decorate a function to add its name to errors from the collectives that it calls.

    Args:
        function: A function that calls collectives.
    """

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"while calling {name!r}: {error}") from error

    return cast("_Operation", named)


@contextmanager
def GatheredParameters(  # noqa: N802 - Accelerate's name
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Gather parameters sharded by DeepSpeed's ZeRO stage 3 during a with block; every rank must enter it.

    Other parameters are left unchanged.

    Args:
        params: The parameters to gather.
        modifier_rank: The rank whose changes inside the block are sent to all ranks. If None, changes are discarded.
        fwd_module: The module that uses the parameters.
        enabled: Whether to gather the parameters. If False, this does nothing.

    Yields:
        Nothing.
    """
    sharded = [item for item in (params if isinstance(params, (list, tuple)) else [params]) if hasattr(item, "ds_id")]
    if not (enabled and sharded):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled):
        yield
