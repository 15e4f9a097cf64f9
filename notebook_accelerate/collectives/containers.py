"""Nested lists, tuples, namedtuples, mappings and dataclasses: walking through them and building them again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from notebook_accelerate.config.training_config import TensorInformation

Nested = TypeVar("Nested")
"""Nested containers of tensors: functions that keep the structure return the type that they take."""
Test = Callable[[Any], bool]


def is_torch_tensor(tensor: Any) -> bool:
    """Tell whether `tensor` is a `torch.Tensor`.

    Args:
        tensor: Anything.

    Returns:
        True for tensors.
    """
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Tell whether `tensor_info` describes a tensor's shape and dtype.

    Args:
        tensor_info: Anything.

    Returns:
        True for `TensorInformation`.
    """
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Tell whether `data` is an instance of a namedtuple class.

    Args:
        data: Anything.

    Returns:
        True for namedtuples.
    """
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a sequence of the type of `obj`.

    Args:
        obj: A list, tuple or namedtuple.
        generator: Its new items.

    Returns:
        The new sequence.
    """
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def _is_dataclass(data: Any) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def rebuilt_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Build a mapping of the type of `data`, which may need more than its items to be made.

    Args:
        data: The original: a dict, a UserDict, an OrderedDict, a transformers output, ...
        items: The new items, same keys.

    Returns:
        The new mapping.
    """
    if type(data) is dict:
        return items
    try:
        return type(data)(items)  # type: ignore[call-arg]
    except TypeError:
        made: Any = copy.copy(data)
        for key, value in items.items():
            made[key] = value
        return made


def rebuilt_dataclass(data: Any, values: dict[str, Any]) -> Any:
    """Copy a dataclass instance with other field values, also where the class is frozen or its init is its own.

    Args:
        data: The original.
        values: The new value of each field.

    Returns:
        The new instance.
    """
    made = copy.copy(data)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Test = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every leaf of a nested structure.

    Args:
        func: What to apply; called as `func(leaf, *args, **kwargs)`.
        data: Nested lists, tuples, namedtuples, mappings, dataclasses.
        args: More arguments for `func`.
        test_type: Which leaves it is applied to.
        error_on_other_type: Raise on a leaf that fails the test, instead of keeping it.
        kwargs: More keyword arguments for `func`.

    Returns:
        The structure, with the same types, and the function's results as leaves.

    Raises:
        TypeError: A leaf failed the test and `error_on_other_type` is set.
    """

    def walk(node: Any) -> Any:
        if test_type(node):
            return func(node, *args, **kwargs)
        if isinstance(node, (list, tuple)):
            return honor_type(node, [walk(item) for item in node])
        if isinstance(node, Mapping):
            return rebuilt_mapping(node, {key: walk(value) for key, value in node.items()})
        if _is_dataclass(node):
            return rebuilt_dataclass(node, {f.name: walk(getattr(node, f.name)) for f in dataclasses.fields(node)})
        if error_on_other_type:
            raise TypeError(
                f"{type(node).__name__} cannot be passed to {getattr(func, '__name__', func)!r}: only nested lists, "
                "tuples, dicts and dataclasses of objects that satisfy "
                f"{getattr(test_type, '__name__', test_type)!r} can"
            )
        return node

    return walk(data)


def leaves_of(data: Any, test_type: Test = is_torch_tensor) -> list[Any]:
    """List the leaves of a nested structure that pass a test, in order.

    Args:
        data: Nested lists, tuples, namedtuples, mappings, dataclasses.
        test_type: Which leaves to list.

    Returns:
        The leaves.
    """
    found: list[Any] = []

    def collect(node: Any) -> None:
        if test_type(node):
            found.append(node)
        else:
            for child in children_of(node):
                collect(child)

    collect(data)
    return found


def tensors_of(data: Any, operation: str) -> list[torch.Tensor]:
    """List the tensors of a nested structure, in order, where it holds nothing else.

    Args:
        data: Nested lists, tuples, namedtuples, mappings, dataclasses.
        operation: Who asks, for the error.

    Returns:
        The tensors.

    Raises:
        TypeError: A leaf is no tensor.
    """
    found: list[torch.Tensor] = []
    _collect_tensors(data, operation, found)
    return found


def _collect_tensors(node: Any, operation: str, found: list[torch.Tensor]) -> None:
    if isinstance(node, torch.Tensor):
        found.append(node)
        return
    if not (isinstance(node, (list, tuple, Mapping)) or _is_dataclass(node)):
        raise TypeError(
            f"{operation}() was given {type(node).__name__} ({node!r:.60}): it takes tensors, and lists, tuples, dicts "
            "and dataclasses of tensors; gather_object() takes any object"
        )
    for child in children_of(node):
        if isinstance(child, torch.Tensor):
            found.append(child)
        else:
            _collect_tensors(child, operation, found)


def children_of(node: Any) -> Iterable[Any]:
    """List what a container holds directly; nothing for a leaf.

    Args:
        node: A list, tuple, mapping, dataclass, or a leaf.

    Returns:
        Its items, values or field values.
    """
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, Mapping):
        return node.values()
    if _is_dataclass(node):
        return [getattr(node, f.name) for f in dataclasses.fields(node)]
    return ()


def with_leaves(data: Any, leaves: Iterable[Any], test_type: Test = is_torch_tensor) -> Any:
    """Build a nested structure again with other leaves.

    Args:
        data: The original.
        leaves: The new leaves, in the order of `leaves_of`.
        test_type: Which leaves are replaced.

    Returns:
        The new structure.
    """
    replacement: Iterator[Any] = iter(leaves)
    return recursively_apply(lambda _: next(replacement), data, test_type=test_type)


def with_tensors(data: Nested, leaves: Iterable[torch.Tensor]) -> Nested:
    """Build a nested structure that holds tensors alone again, with other tensors.

    Args:
        data: The original.
        leaves: The new tensors, in the order of `tensors_of`.

    Returns:
        The new structure.
    """
    rebuilt: Nested = _with_tensors(data, iter(leaves))
    return rebuilt


def _with_tensors(node: Any, leaves: Iterator[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        return next(leaves)
    if type(node) is dict:  # the usual container, without a call per tensor: a quarter of the time
        return {
            key: next(leaves) if isinstance(value, torch.Tensor) else _with_tensors(value, leaves)
            for key, value in node.items()
        }
    return recursively_apply(lambda _: next(leaves), node)


def listify(data: Any) -> Any:
    """Turn every tensor of a nested structure into numbers in lists.

    Args:
        data: Nested containers of tensors.

    Returns:
        The structure; bfloat16, which numbers of other libraries do not have, goes through float32.
    """

    def numbers(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).tolist()

    return recursively_apply(numbers, data)


def find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor in a nested structure.

    Args:
        data: Nested containers of tensors.

    Returns:
        The size; None for an empty structure.

    Raises:
        ValueError: Nothing in it is a tensor with at least one dimension.
    """
    if isinstance(data, (list, tuple, Mapping)) and len(data) == 0:
        return None
    size = _first_dimension(data)
    if size is None:
        raise ValueError(f"no batch size in {type(data).__name__}: it holds no tensor with at least one dimension")
    return size


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor in a nested structure, or None where there is none.

    Args:
        data: Anything.

    Returns:
        The size, or None.
    """
    return _first_dimension(data)


def _first_dimension(node: Any) -> int | None:
    if isinstance(node, torch.Tensor):
        return node.shape[0] if node.ndim else None
    for child in children_of(node):
        size = _first_dimension(child)
        if size is not None:
            return size
    return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested structure.

    Args:
        data: Nested containers of tensors.

    Returns:
        The device; None where there is no tensor.
    """
    if isinstance(data, torch.Tensor):
        return data.device
    for child in children_of(data):
        device = find_device(child)
        if device is not None:
            return device
    return None
