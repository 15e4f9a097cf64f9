"""Operations on nested tensors without other ranks: moving, slicing, joining, padding and describing them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from notebook_accelerate.collectives import shape_checks
from notebook_accelerate.collectives.communicator import COMMUNICATORS
from notebook_accelerate.collectives.layouts import (
    Nested,
    is_container,
    is_tensor_information,
    map_children,
    recursively_apply,
)
from notebook_accelerate.config.cluster import TensorInformation
from notebook_accelerate.errors import DistributedOperationException
from notebook_accelerate.state import PartialState


class CannotPadNestedTensorWarning(UserWarning):
    """A tensor of nested layout cannot be padded and is unchanged."""


def send_to_device(
    tensor: Nested,
    device: torch.device | str | int | None,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Nested:
    """Move every tensor of a nested structure to a device.

    Args:
        tensor: Nested containers of tensors, or anything with a `.to(device)` method.
        device: The device (`torch.device`, name or index).
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Keys of mappings whose values are not moved.

    Returns:
        The structure on the device; leaves that cannot be moved are kept.
    """
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    moved: Nested = _move(tensor, device, non_blocking, skipped)
    return moved


def _move(node: Any, device: Any, non_blocking: bool, skipped: frozenset[str]) -> Any:
    if isinstance(node, torch.Tensor):
        return node.to(device, non_blocking=non_blocking)
    moves_itself = hasattr(node, "to") and not isinstance(node, type)
    if not moves_itself or (skipped and isinstance(node, Mapping)):
        return map_children(
            node, lambda key, child: child if key in skipped else _move(child, device, non_blocking, skipped)
        )
    try:
        return node.to(device, non_blocking=non_blocking)
    except TypeError:  # early versions of transformers' BatchEncoding have no `non_blocking`
        return node.to(device)


def slice_tensors(
    data: Nested,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001 - Accelerate's signature
    num_processes: int | None = None,  # noqa: ARG001 - the same
) -> Nested:
    """Take the same slice of every tensor of a nested structure.

    Args:
        data: Nested containers of tensors.
        tensor_slice: The slice of the first dimension.
        process_index: Not used; kept for Accelerate's signature.
        num_processes: Not used; kept for Accelerate's signature.

    Returns:
        The structure of slices.
    """
    slices: Nested = recursively_apply(lambda tensor: tensor[tensor_slice], data)
    return slices


def concatenate(data: list[Any] | tuple[Any, ...], dim: int = 0) -> Any:
    """Join structures of the same form, tensor by tensor.

    Args:
        data: The structures, in order.
        dim: Dimension along which tensors are joined.

    Returns:
        One structure of that form.

    Raises:
        TypeError: There are several structures, and a leaf is not a tensor.
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if not is_container(first) and len(data) == 1:
        return first
    if not is_container(first):
        raise TypeError(f"only tensors can be concatenated; got {type(first).__name__}")
    return map_children(first, lambda key, _: concatenate([child_of(part, key) for part in data], dim=dim))


def child_of(node: Any, key: Any) -> Any:
    """Return a child of a container.

    Args:
        node: A list, tuple, mapping or dataclass instance.
        key: Its index, key or field name, as `map_children` passes it.
    """
    return node[key] if isinstance(node, (list, tuple, Mapping)) else getattr(node, key)


def get_data_structure(data: Any) -> Any:
    """Describe the tensors of a nested structure without their values.

    Args:
        data: Nested containers of tensors.

    Returns:
        The structure, with a `TensorInformation` (shape, dtype) in place of each tensor.
    """
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Create uninitialized tensors of the shapes that `get_data_structure` returned.

    Args:
        data_structure: Nested containers of `TensorInformation`.

    Returns:
        The structure of tensors, on the CPU.
    """
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def convert_to_fp32(tensor: Nested) -> Nested:
    """Convert the half-precision tensors of a nested structure to float32.

    Args:
        tensor: Nested containers of tensors.

    Returns:
        The structure; tensors of other dtypes are kept.
    """
    converted: Nested = recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)
    return converted


def _is_half(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in {torch.float16, torch.bfloat16}


def pad_input_tensors(tensor: Nested, batch_size: int, num_processes: int, dim: int = 0) -> Nested:
    """Pad the tensors of a batch with zeros so that it splits evenly between processes.

    Args:
        tensor: Nested containers of tensors.
        batch_size: Size of the batch along `dim`; tensors of another size are kept.
        num_processes: Number of parts that the batch is split into.
        dim: The dimension that is split.

    Returns:
        The structure, each padded tensor a multiple of `num_processes` long.
    """
    missing = -batch_size % num_processes

    def padded(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim <= dim or leaf.shape[dim] != batch_size:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)  # constant_pad_nd refuses sparse tensors

    result: Nested = recursively_apply(padded, tensor, error_on_other_type=True) if missing else tensor
    return result


# Forwards that return float32; objects rather than closures, so that models can still be pickled.


class ConvertOutputsToFp32:
    """A forward that returns float32 instead of float16 or bfloat16.

    Args:
        model_forward: The original.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model_forward)
        self.model_forward = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original and convert its result."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Make a forward return float32 instead of float16 or bfloat16.

    Args:
        model_forward: A function or a bound method.

    Returns:
        A callable with the same signature; it can be pickled if the original can.
    """
    return ConvertOutputsToFp32(model_forward)


# Older helpers of `accelerate.utils.operations` that other libraries import.

Operation = TypeVar("Operation", bound=Callable[..., Any])

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
TENSOR_TYPE_TO_INT: dict[torch.dtype, int] = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}
"""Numbers that represent dtypes between ranks."""
TENSOR_INT_TO_DTYPE: dict[int, torch.dtype] = dict(enumerate(_DTYPES, start=1))
"""The dtype of each number."""


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Tell whether `tensor` is a tensor on an xpu device (an Intel GPU)."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def get_shape(data: Any) -> Any:
    """Describe the shapes of a nested structure.

    Args:
        data: Nested containers of tensors.

    Returns:
        The structure, with a list of sizes in place of each tensor.
    """
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Size | None, int | None]:
    """Send the shape of a tensor that only one rank has to all ranks; every rank must call this.

    Args:
        tensor: The tensor, on one rank; None on the others.

    Returns:
        Its shape, and the number of its dtype in `TENSOR_TYPE_TO_INT`; None and None if no rank has one.
    """
    state = PartialState()
    mine = None if tensor is None else (tensor.shape, TENSOR_TYPE_TO_INT[tensor.dtype])
    gathered = COMMUNICATORS[state.communicator].all_gather_object(mine, state.num_processes)
    return next((found for found in gathered if found is not None), (None, None))


def verify_operation(function: Operation) -> Operation:
    """Decorate a collective to check, in debug mode, that all ranks pass the same shapes.

    Args:
        function: A function whose first argument is a nested structure of tensors.

    Returns:
        The function; it raises `DistributedOperationException` if ranks pass different shapes.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.num_processes > 1:
            data = kwargs.get("tensor", args[0] if args else None)
            shape_checks.check(getattr(function, "__name__", "operation"), data, state)
        return function(*args, **kwargs)

    return cast("Operation", checked)


def chained_operation(function: Operation) -> Operation:
    """Add the function's name to the errors of collectives that it calls.

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

    return cast("Operation", named)


@contextmanager
def GatheredParameters(  # noqa: N802 - Accelerate's name
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Gather parameters that DeepSpeed's ZeRO stage 3 sharded, for a block; every rank must enter it.

    It does nothing for other parameters.

    Args:
        params: The parameters.
        modifier_rank: The rank whose changes inside the block are sent to all ranks; None: changes are lost.
        fwd_module: The module that uses them.
        enabled: False does nothing.

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
