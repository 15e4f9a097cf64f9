"""List a model's modules and tensors by name, with their sizes and dtypes. The model may be on the meta device."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.config.enums import CustomDtype
from notebook_accelerate.torch_internals import non_persistent_buffers, uncompiled_name


@dataclass
class ModuleTree:
    """A model's modules in depth-first order. A shared module is listed once for each of its names.

    Attributes:
        names: The dotted names. The name of the model itself is "".
        modules: The modules themselves.
        parents: The index of each module's parent, or -1 for the model.
        ends: The index after each module's last descendant: ``names[i + 1:ends[i]]`` are the descendants of
            ``names[i]``.
    """

    names: list[str] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def build_tree(model: torch.nn.Module) -> ModuleTree:
    """List the modules of a model.

    Args:
        model: The model, which may be on any device.

    Returns:
        The modules. Listing them takes linear time, whereas `named_modules` takes one step per module and level.
    """
    tree = ModuleTree([""], [model], [-1], [1])
    names, modules, parents, ends = tree.names, tree.modules, tree.parents, tree.ends
    # With one iterator per level, a module without children costs only four appends and no call.
    levels = [("", 0, iter(model._modules.items()))]
    while levels:
        prefix, parent, children = levels[-1]
        for key, child in children:
            if child is None:
                continue
            names.append(prefix + key)
            modules.append(child)
            parents.append(parent)
            ends.append(len(names))
            if child._modules:
                index = len(names) - 1
                levels.append((f"{names[index]}.", index, iter(child._modules.items())))
                break
        else:
            levels.pop()
            ends[parent] = len(names)
    return tree


def full_name(prefix: str, name: str) -> str:
    """Join a module's dotted name and the name of one of its members."""
    return f"{prefix}.{name}" if prefix else name


def prefixes(name: str) -> list[str]:
    """List the prefixes of a dotted name, from the shortest to the name itself: "", "a", "a.b"."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def submodule(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Return the module that contains a tensor, and the tensor's name in it.

    Args:
        module: The module that the name is relative to.
        name: The dotted name of the tensor, such as ``layers.0.weight``.

    Returns:
        The module that contains the tensor, and the last part of the name.

    Raises:
        AttributeError: There is no module with this name.
    """
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def fit_compiled_names(names: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Rename tensors to a model's names if they differ only by the prefixes that `torch.compile` adds.

    Args:
        names: The names in a file whose model may have been compiled as a whole or in parts.
        wanted: The names in the model.

    Returns:
        The new name of each tensor. Names that already match, or that match no name of the model, are unchanged.
    """
    exact = set(wanted)
    by_plain = {uncompiled_name(name): name for name in exact}
    return {name: name if name in exact else by_plain.get(uncompiled_name(name), name) for name in names}


def find_tensor(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the tensor with a dotted name, or None if it does not exist."""
    try:
        owner, key = submodule(module, name)
    except AttributeError:
        return None
    found = getattr(owner, key, None)
    return found if isinstance(found, torch.Tensor) else None


# ---- sizes, computed from shapes and dtypes

_BYTES_OF_CUSTOM = {"fp8": 1, "int4": 0.5, "int2": 0.25}
_FACTORS = {
    "GIB": 2**30,
    "MIB": 2**20,
    "KIB": 2**10,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", re.IGNORECASE)
INTEGERS = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

Sizes = dict[str, Any]


def dtype_byte_size(dtype: Any) -> int | float:
    """Return the number of bytes that an element of a dtype takes up.

    Args:
        dtype: A torch dtype, or one of `CustomDtype`.

    Returns:
        The number of bytes. It is less than 1 for packed dtypes, and 1/8 for bool, as in Accelerate.

    Raises:
        ValueError: `dtype` is not a dtype.
    """
    if isinstance(dtype, CustomDtype):
        return _BYTES_OF_CUSTOM[dtype.value]
    dtype = dtype_of(dtype)
    return 1 / 8 if dtype == torch.bool else dtype.itemsize


def dtype_of(dtype: Any) -> torch.dtype:
    """Return the dtype that has a name such as "float16" or "torch.float16". A dtype itself is returned unchanged.

    Raises:
        ValueError: torch does not have a dtype with this name.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f'{dtype!r} is not a valid dtype; pass a dtype such as torch.float16 or "float16"')
    return found


def convert_file_size_to_int(size: float | str) -> int:
    """Convert a size to bytes.

    Args:
        size: The number of bytes, or a number with a unit: "10GB" (powers of 1000), "5MiB" (powers of 1024), "8Gb"
            (bits).

    Raises:
        ValueError: `size` is negative, or not a size.
    """
    if isinstance(size, (int, float)) and 0 <= size < math.inf:
        return int(size)
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise ValueError(
            f"`size` {size!r} is not in a valid format. Use an integer for bytes, or a string with a unit "
            "(like '5.0GB', '512MiB')."
        )
    count = int(float(match[1]) * _FACTORS[match[2].upper()])
    return count // 8 if match[2].endswith("b") else count


def named_module_tensors(
    module: torch.nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over a module's parameters, then its buffers.

    Args:
        module: The module whose tensors are listed.
        include_buffers: Whether to include buffers.
        recurse: Whether to include submodules.
        remove_non_persistent: Whether to leave out buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        skip = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else ()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in skip)


def get_non_persistent_buffers(module: torch.nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that are not in the state dict.

    Args:
        module: The module whose buffers are listed.
        recurse: Whether to include submodules.
        fqns: Whether to return dotted names if `recurse` is True.
    """
    if not recurse:
        return non_persistent_buffers(module)
    found = set()
    for name, part in module.named_modules():
        found |= {full_name(name, buffer) if fqns else buffer for buffer in non_persistent_buffers(part)}
    return found


@dataclass
class Totals:
    """The sizes of the modules in a tree.

    Attributes:
        all: The size of each module in bytes.
        buffers: The size of each module's buffers in bytes.
        tied: The names of tied parameters, in groups, in the tree's order.
        measure: A function that returns the size of a named tensor in bytes.
    """

    all: list[Any]
    buffers: list[Any]
    tied: list[list[str]]
    measure: Callable[[str, torch.Tensor], Any]


def totals_of(tree: ModuleTree, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None) -> Totals:
    """Measure all modules of a tree in one pass, and find its tied parameters."""
    measure, per_element = _measure(dtype, special_dtypes), _PerElement(dtype)
    every: list[Any] = [0] * len(tree.names)
    buffers: list[Any] = [0] * len(tree.names)
    seen: dict[int, int] = {}
    count, tied = 0, False
    for index, module in enumerate(tree.modules):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            count += 1
            if seen.setdefault(id(parameter), count) != count:
                tied = True
            elif special_dtypes:
                every[index] += measure(full_name(tree.names[index], key), parameter)
            else:
                every[index] += parameter.numel() * per_element[parameter.dtype]
        if module._buffers:
            for key, buffer in module._buffers.items():
                count += 1
                if buffer is not None and seen.setdefault(id(buffer), count) == count:
                    buffers[index] += measure(full_name(tree.names[index], key), buffer)
    with_buffers = any(buffers)
    for sums in (every, buffers) if with_buffers else (every,):
        for index in range(len(sums) - 1, 0, -1):  # Children come after their parents.
            sums[tree.parents[index]] += sums[index]
    if with_buffers:
        every = [size + buffer for size, buffer in zip(every, buffers, strict=True)]
    return Totals(every, buffers, tied_parameters(tree.modules[0]) if tied else [], measure)


class _PerElement(dict[torch.dtype, Any]):
    """The size of an element, by dtype. Except for integers, it is limited to the size of the target dtype."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self._limit = None if dtype is None else dtype_byte_size(dtype)

    def __missing__(self, kind: torch.dtype) -> Any:
        size = dtype_byte_size(kind)
        self[kind] = size if self._limit is None or kind in INTEGERS else min(size, self._limit)
        return self[kind]


def _measure(dtype: Any, special: Mapping[str, Any] | None) -> Any:
    """Return a function that returns the size in bytes of a tensor, given its name and the tensor."""
    per_element = _PerElement(dtype)
    exact = {name: dtype_byte_size(value) for name, value in (special or {}).items()}

    def size(name: str, tensor: torch.Tensor) -> int | float:
        return tensor.numel() * (exact[name] if name in exact else per_element[tensor.dtype])

    return size


def tied_parameters(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of a model's tied parameters, in groups, in the model's order."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def compute_module_sizes(
    model: torch.nn.Module,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> Sizes:
    """Compute the size of each module and tensor of a model. A tied tensor counts once, under its first name.

    Args:
        model: The model, which may be on any device.
        dtype: The dtype that floating-point tensors will be converted to. Tensors of larger dtypes count as converted.
        special_dtypes: The dtypes of tensors by name, which take precedence over `dtype`.
        buffers_only: Whether to count only buffers.

    Returns:
        The sizes in bytes by dotted name. The name of the whole model is "".
    """
    measure = _measure(dtype, special_dtypes)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    sizes: Sizes = defaultdict(int)
    for name, tensor in tensors:
        size = measure(name, tensor)
        for outer in prefixes(name):
            sizes[outer] += size
    return sizes


def compute_module_total_buffer_size(
    model: torch.nn.Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> Any:
    """Compute the size of all buffers of a model in bytes. For the arguments, see `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_module_leaves(module_sizes: Mapping[str, Any]) -> list[str]:
    """List the names of modules and tensors that have no children.

    Args:
        module_sizes: The result of `compute_module_sizes`, or any mapping keyed by dotted name.
    """
    parents = {name.rpartition(".")[0] for name in module_sizes}
    outer = {prefix for parent in parents for prefix in prefixes(parent)}
    return [name for name in module_sizes if name not in outer]


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, Any], no_split_module_classes: Any
) -> tuple[Any, list[str]]:
    """Find the largest layer. A layer is a module that has no children, or whose class is not split.

    Args:
        modules: The named modules and parameters to search.
        module_sizes: The sizes in bytes by name.
        no_split_module_classes: The names of classes that are not split.

    Returns:
        The size of the largest layer in bytes, and the names of all layers of that size.
    """
    largest: Any = 0
    names: list[str] = []
    stack = list(reversed(modules))
    while stack:
        name, module = stack.pop()
        children = [] if isinstance(module, torch.Tensor) else list(module.named_children())
        if children and type(module).__name__ not in as_names(no_split_module_classes):
            stack += [(full_name(name, key), child) for key, child in reversed(children)]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def as_names(classes: Any) -> Sequence[str]:
    """Return class names as a sequence. `classes` may be None or a single name."""
    if classes is None:
        return ()
    return (classes,) if isinstance(classes, str) else tuple(classes)


def calculate_maximum_sizes(model: torch.nn.Module) -> tuple[Any, tuple[Any, list[str]]]:
    """Compute the size of a model and its largest layer.

    Args:
        model: The model. Modules of the classes in its `_no_split_modules` (transformers) are not split.

    Returns:
        The size of the model in bytes, and the size and names of its largest layers.
    """
    sizes = compute_module_sizes(model)
    classes = getattr(model, "_no_split_modules", None) or []
    layers = [*model.named_parameters(recurse=False), *model.named_children()]
    return sizes[""], get_max_layer_size(layers, sizes, classes)
