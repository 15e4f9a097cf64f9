"""What needs no other rank: moving, slicing, joining, padding and describing nested tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from notebook_accelerate.collectives.containers import (
    Nested,
    honor_type,
    is_tensor_information,
    rebuilt_dataclass,
    rebuilt_mapping,
    recursively_apply,
)
from notebook_accelerate.config.training_config import TensorInformation


class CannotPadNestedTensorWarning(UserWarning):
    """A tensor of nested layout was to be padded; it is left as it is."""


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
        skip_keys: Keys of mappings whose values stay where they are.

    Returns:
        The structure on the device; leaves that cannot be moved are kept.
    """
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    moved: Nested = _moved(tensor, device, non_blocking, skipped)
    return moved


def _moved(node: Any, device: Any, non_blocking: bool, skipped: frozenset[str]) -> Any:
    if isinstance(node, torch.Tensor):
        return node.to(device, non_blocking=non_blocking)
    if hasattr(node, "to") and not isinstance(node, type):
        return _moved_itself(node, device, non_blocking, skipped)
    if isinstance(node, (list, tuple)):
        return honor_type(node, [_moved(item, device, non_blocking, skipped) for item in node])
    if isinstance(node, Mapping):
        items = {
            key: value if key in skipped else _moved(value, device, non_blocking, skipped)
            for key, value in node.items()
        }
        return rebuilt_mapping(node, items)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        values = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
        return rebuilt_dataclass(
            node, {k: v if k in skipped else _moved(v, device, non_blocking, skipped) for k, v in values.items()}
        )
    return node


def _moved_itself(node: Any, device: Any, non_blocking: bool, skipped: frozenset[str]) -> Any:
    """Move an object by its own `to`, which may not know `non_blocking` (transformers' BatchEncoding once did not)."""
    if skipped and isinstance(node, Mapping):
        items = {k: v if k in skipped else _moved(v, device, non_blocking, skipped) for k, v in node.items()}
        return rebuilt_mapping(node, items)
    try:
        return node.to(device, non_blocking=non_blocking)
    except TypeError:
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
        TypeError: The leaves are no tensors.
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (list, tuple)):
        return honor_type(first, [concatenate([part[i] for part in data], dim=dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        return rebuilt_mapping(first, {key: concatenate([part[key] for part in data], dim=dim) for key in first})
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in dataclasses.fields(first)]
        return rebuilt_dataclass(
            first, {name: concatenate([getattr(part, name) for part in data], dim=dim) for name in names}
        )
    raise TypeError(f"only tensors can be concatenated; got {type(first).__name__}")


def get_data_structure(data: Any) -> Any:
    """Describe the tensors of a nested structure without their values.

    Args:
        data: Nested containers of tensors.

    Returns:
        The structure, with a `TensorInformation` (shape, dtype) in place of each tensor.
    """
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Make uninitialised tensors of the shapes that `get_data_structure` described.

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
        num_processes: Into how many parts the batch is split.
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
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    result: Nested = recursively_apply(padded, tensor, error_on_other_type=True) if missing else tensor
    return result
