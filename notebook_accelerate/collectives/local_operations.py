"""Operations on nested tensors that do not involve other ranks: moving, slicing, joining, describing, converting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from notebook_accelerate.collectives.layouts import (
    Nested,
    is_container,
    is_tensor_information,
    map_children,
    recursively_apply,
)
from notebook_accelerate.config.kwargs_handlers import TensorInformation


class CannotPadNestedTensorWarning(UserWarning):
    """Issued for a tensor with a nested layout, which cannot be padded, and is left unchanged."""


def send_to_device(
    tensor: Nested,
    device: torch.device | str | int | None,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Nested:
    """Move every tensor of a nested structure to a device.

    Args:
        tensor: Nested containers of tensors, or any object with a `.to(device)` method.
        device: The device to move to: a `torch.device`, a name or an index.
        non_blocking: Whether to return without waiting for copies from pinned memory.
        skip_keys: The keys of mappings whose values are not moved.

    Returns:
        The structure on the device. Leaves that cannot be moved are kept.
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
    except TypeError:  # In early versions of transformers, BatchEncoding.to() does not accept `non_blocking`.
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
        tensor_slice: The slice to take along the first dimension.
        process_index: Not used, but a part of Accelerate's signature.
        num_processes: Not used, but a part of Accelerate's signature.

    Returns:
        The structure with slices in place of the tensors.
    """
    slices: Nested = recursively_apply(lambda tensor: tensor[tensor_slice], data)
    return slices


def concatenate(data: list[Any] | tuple[Any, ...], dim: int = 0) -> Any:
    """Join structures of the same form, tensor by tensor.

    Args:
        data: The structures to join, in order.
        dim: The dimension to join tensors along.

    Returns:
        A single structure of the same form.

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
        key: The index, key or field name of the child, as passed by `map_children`.
    """
    return node[key] if isinstance(node, (list, tuple, Mapping)) else getattr(node, key)


def get_data_structure(data: Any) -> Any:
    """Describe the shapes and dtypes of the tensors in a nested structure.

    Args:
        data: Nested containers of tensors.

    Returns:
        The structure with a `TensorInformation` (shape and dtype) in place of each tensor.
    """
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Create uninitialized tensors with the shapes and dtypes that `get_data_structure` returned.

    Args:
        data_structure: Nested containers of `TensorInformation`.

    Returns:
        The structure with tensors on the CPU.
    """
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def convert_to_fp32(tensor: Nested) -> Nested:
    """Convert the half-precision tensors of a nested structure to float32.

    Args:
        tensor: Nested containers of tensors.

    Returns:
        The structure with float32 tensors. Tensors of other dtypes are kept.
    """
    converted: Nested = recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)
    return converted


def _is_half(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in {torch.float16, torch.bfloat16}


# ---- forward methods that return float32. They are objects, not closures, so that models can still be pickled.


class ConvertOutputsToFp32:
    """A forward method that returns float32 instead of float16 or bfloat16.

    Args:
        model_forward: The original forward method.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model_forward)
        self.model_forward = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original method and convert its result to float32."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))
