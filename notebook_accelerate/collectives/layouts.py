"""Walk nested containers of tensors, and pack their tensors by dtype, so that each dtype needs only one collective."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import torch

from notebook_accelerate.config.kwargs_handlers import TensorInformation
from notebook_accelerate.torch_internals import flatten_dense_tensors

Nested = TypeVar("Nested")
"""The type of nested containers of tensors. Functions that keep the structure return the type of their argument."""
LeafTest = Callable[[Any], bool]
_TENSOR_TYPES = frozenset([torch.Tensor, torch.nn.Parameter])


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether `tensor` is a `torch.Tensor`."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether `tensor_info` is a `TensorInformation`, which describes the shape and dtype of a tensor."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Return whether `data` is an instance of a namedtuple class."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a sequence with the type of `obj`.

    Args:
        obj: A list, tuple or namedtuple.
        generator: The items of the new sequence.
    """
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def _is_dataclass(data: Any) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_container(node: Any) -> bool:
    """Return whether `node` is a list, tuple, mapping or dataclass instance."""
    return isinstance(node, (list, tuple, Mapping)) or _is_dataclass(node)


def _rebuild_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Build a mapping with the type of `data` (UserDict, a transformers output, ...), but with new values."""
    if type(data) is dict:
        return items
    try:
        return type(data)(items)  # type: ignore[call-arg]
    except TypeError:
        rebuilt: Any = copy.copy(data)  # The constructor does not accept a dict.
        for key, value in items.items():
            rebuilt[key] = value
        return rebuilt


def map_children(node: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """Build a container of the same type, but with converted children. A leaf is returned unchanged.

    Args:
        node: A list, a tuple, a mapping, a dataclass instance (which may be frozen), or a leaf.
        convert: A function that is called with the index, key or field name of each child, and with the child.
    """
    if isinstance(node, (list, tuple)):
        return honor_type(node, [convert(index, item) for index, item in enumerate(node)])
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, {key: convert(key, value) for key, value in node.items()})
    if not _is_dataclass(node):
        return node
    rebuilt = copy.copy(node)
    for field in dataclasses.fields(node):
        object.__setattr__(rebuilt, field.name, convert(field.name, getattr(node, field.name)))
    return rebuilt


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: LeafTest = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every leaf of a nested structure.

    Args:
        func: The function to apply, called as `func(leaf, *args, **kwargs)`.
        data: Nested lists, tuples, namedtuples, mappings and dataclasses.
        args: Further positional arguments for `func`.
        test_type: A test that selects the leaves that the function is applied to.
        error_on_other_type: Whether to raise a TypeError if a leaf fails the test, instead of keeping the leaf.
        kwargs: Keyword arguments for `func`.

    Returns:
        A structure of the same types, with the function's results as leaves.

    Raises:
        TypeError: A leaf fails the test, and `error_on_other_type` is True.
    """

    def walk(node: Any) -> Any:
        if test_type(node):
            return func(node, *args, **kwargs)
        if is_container(node):
            return map_children(node, lambda _, child: walk(child))
        if error_on_other_type:
            raise TypeError(
                f"{type(node).__name__} cannot be passed to {getattr(func, '__name__', func)!r}: only nested lists, "
                "tuples, dicts and dataclasses of objects that satisfy "
                f"{getattr(test_type, '__name__', test_type)!r} can"
            )
        return node

    return walk(data)


def leaves_of(data: Any) -> list[torch.Tensor]:
    """List the tensors of a nested structure in order.

    Args:
        data: Nested lists, tuples, namedtuples, mappings and dataclasses.
    """
    return list(_iterate_leaves(data))


def _iterate_leaves(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    else:
        for child in children_of(node):
            yield from _iterate_leaves(child)


def require_tensors(data: Any, operation: str) -> list[torch.Tensor]:
    """List the tensors of a nested structure in order, and check that it contains nothing else.

    Args:
        data: Nested lists, tuples, namedtuples, mappings and dataclasses.
        operation: The name of the collective, for the error message.

    Raises:
        TypeError: A leaf is not a tensor.
    """
    found: list[torch.Tensor] = []
    if type(data) is dict and _are_tensors(data.values()):  # This halves the time for the most common structure.
        found.extend(data.values())
    else:
        _collect_tensors(data, operation, found)
    return found


def _collect_tensors(node: Any, operation: str, found: list[torch.Tensor]) -> None:
    if isinstance(node, torch.Tensor):
        found.append(node)
        return
    if not is_container(node):
        raise TypeError(
            f"{operation}() got {type(node).__name__} ({node!r:.60}): it takes tensors, and lists, tuples, dicts and "
            "dataclasses of tensors; for other objects call gather_object([value])"
        )
    children = children_of(node)
    if _are_tensors(children):
        found.extend(children)
        return
    for child in children:
        _collect_tensors(child, operation, found)


def _are_tensors(nodes: Iterable[Any]) -> bool:
    """Return whether all nodes are plain tensors, in a quarter of the time that it takes to check them one by one."""
    return _TENSOR_TYPES.issuperset(map(type, nodes))


def children_of(node: Any) -> Iterable[Any]:
    """Return the items, values or field values of a container. A leaf has no children."""
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, Mapping):
        return node.values()
    if _is_dataclass(node):
        return [getattr(node, f.name) for f in dataclasses.fields(node)]
    return ()


def with_tensors(data: Nested, leaves: Iterable[torch.Tensor]) -> Nested:
    """Rebuild a nested structure with other tensors.

    Args:
        data: The original structure.
        leaves: The new tensors, in the order of `leaves_of`.
    """
    rebuilt: Nested = _with_tensors(data, iter(leaves))
    return rebuilt


def _with_tensors(node: Any, leaves: Iterator[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        return next(leaves)
    # Handling common containers without a call for each tensor takes an eighth of the time.
    if type(node) is dict:
        if _are_tensors(node.values()):
            return dict(zip(node, leaves, strict=False))
        return {key: _with_tensors(value, leaves) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(islice(leaves, len(node)) if _are_tensors(node) else [_with_tensors(n, leaves) for n in node])
    return recursively_apply(lambda _: next(leaves), node)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the size of the first tensor's first dimension in a nested structure, or None if there is no tensor.

    Args:
        data: The structure to search, which may be any object.
    """
    return next((tensor.shape[0] for tensor in _iterate_leaves(data) if tensor.ndim), None)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested structure.

    Args:
        data: Nested containers of tensors.

    Returns:
        The device, or None if the structure contains no tensor.
    """
    return next((tensor.device for tensor in _iterate_leaves(data)), None)


# ---- packing. Loops repeat combinations of shapes and dtypes, so the layout of each is computed only once.

ALIGNMENT = 64
"""The alignment of segments in bytes."""
# Up to this size in bytes, results are views of one buffer, which is 3 times as fast as copying for 50 tensors of 64 x
# 4. Larger results are copies, so that a single result does not keep a large buffer in memory.
_VIEW_LIMIT = 1 << 20
MAX_LAYOUTS = 256
"""The maximum number of layouts to keep. Batches of text have many lengths, and each of them needs its own layout."""


class Segment:
    """The tensors of one dtype in a layout, packed one after another.

    Args:
        dtype: The dtype of all tensors in the segment.
        positions: The indices of the tensors in the list of all tensors.
        shapes: The shapes of the tensors.
        begin: The offset of the segment in a buffer for the whole layout, in bytes.

    Attributes:
        sizes: The number of elements of each tensor.
        count: The total number of elements.
        end: The offset of the segment's end, in bytes.
        same_shape: Whether all tensors have the same shape, so that a single operation can process all of them.
    """

    __slots__ = ("begin", "count", "dtype", "end", "positions", "same_shape", "shapes", "sizes")

    def __init__(self, dtype: torch.dtype, positions: list[int], shapes: list[torch.Size], begin: int) -> None:
        self.dtype, self.positions, self.shapes = dtype, positions, shapes
        self.sizes = [shape.numel() for shape in shapes]
        self.count = sum(self.sizes)
        self.begin, self.end = begin, begin + self.count * dtype.itemsize
        self.same_shape = shapes.count(shapes[0]) == len(shapes)

    def pack(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensors of this segment in a new one-dimensional contiguous tensor.

        Args:
            leaves: All tensors of the layout.
        """
        chosen = [leaves[position] for position in self.positions]
        with torch.no_grad():
            if self.same_shape:
                return torch.stack(chosen).view(-1)
            # DDP's helper takes a third of the time that calling reshape and cat from Python takes.
            packed: torch.Tensor = flatten_dense_tensors(chosen)  # type: ignore[no-untyped-call]
            return packed

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor for the result of `pack` on another rank."""
        return torch.empty(self.count, dtype=self.dtype, device=device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a packed tensor that have the shapes of the original tensors.

        Args:
            flat: A packed tensor of shape (count,), which may have a different dtype.
        """
        if len(self.shapes) == 1:
            return [flat.view(self.shapes[0])]
        if self.same_shape:
            return split_equally(flat, len(self.shapes), self.shapes[0])
        parts = torch.split_with_sizes(flat, self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def unpack(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split a packed tensor into results, which are views of a small tensor, or copies from a large one.

        Args:
            flat: A packed tensor of shape (count,), which may have a different dtype.
        """
        if len(self.shapes) == 1 or is_small(flat.nbytes):
            return self.views(flat)
        return [part.view(shape) for part, shape in zip(_split_copies(flat, self.sizes), self.shapes, strict=True)]

    def joined_shapes(self, ranks: int) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors after a gather.

        Args:
            ranks: The number of ranks.
        """
        return [(ranks * shape[0], *shape[1:]) if shape else (ranks,) for shape in self.shapes]

    def unpack_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Split the packed tensors of all ranks, and join each tensor across ranks, along the first dimension.

        Args:
            rows: One packed tensor per rank, of shape (ranks, count). The results may share its memory.
        """
        joined, many, small = self.joined_shapes(len(rows)), len(self.shapes), is_small(rows.nbytes)
        if many == 1:
            return [rows.reshape(joined[0])]
        if self.same_shape and small:
            by_tensor = rows.view(len(rows), many, self.sizes[0]).transpose(0, 1)
            return split_equally(by_tensor.reshape(-1), many, joined[0])
        parts = torch.split_with_sizes(rows, self.sizes, dim=-1) if small else _split_copies(rows, self.sizes)
        return [part.reshape(shape) for part, shape in zip(parts, joined, strict=True)]


def split_equally(packed: torch.Tensor, count: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return views of a packed tensor that all have the same shape.

    Args:
        packed: A contiguous tensor with as many elements as all views together.
        count: The number of views.
        shape: The shape of each view.
    """
    if not shape:
        return list(packed.view(count).unbind(0))
    # This takes 10% less time than unbind.
    return list(packed.view(count * shape[0], *shape[1:]).split_with_sizes([shape[0]] * count))


def _split_copies(packed: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    # torch's stubs only declare the form that writes to given tensors.
    copies: Any = torch.split_with_sizes_copy(packed, sizes, dim=-1)  # type: ignore[func-returns-value]
    return list(copies)


def is_small(size: int) -> bool:
    """Return whether results from a buffer of `size` bytes are views, which keep the whole buffer in memory."""
    return size <= _VIEW_LIMIT


class Layout:
    """The arrangement of tensors in one buffer, with one segment per dtype.

    Args:
        shapes: The shapes of the tensors.
        dtypes: The dtypes of the tensors.

    Attributes:
        shapes: The shapes of the tensors.
        segments: The segments, in the order of the first tensor of each dtype.
        same_shape: Whether there is only one segment, whose tensors have the same shape.
        bytes: The size of the buffer in bytes.
        fingerprint: A number that is the same on all ranks whose tensors have the same shapes and dtypes.
    """

    __slots__ = ("bytes", "fingerprint", "same_shape", "segments", "shapes")

    def __init__(self, shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        self.shapes = shapes
        groups: dict[torch.dtype, list[int]] = {}
        for position, dtype in enumerate(dtypes):
            groups.setdefault(dtype, []).append(position)
        self.segments: list[Segment] = []
        self.bytes = 0
        for dtype, positions in groups.items():
            begin = -(-self.bytes // ALIGNMENT) * ALIGNMENT
            segment = Segment(dtype, positions, [shapes[position] for position in positions], begin)
            self.segments.append(segment)
            self.bytes = segment.end
        self.same_shape = len(self.segments) == 1 and self.segments[0].same_shape
        # Hash only numbers, because the hashes of strings and of None differ between processes.
        self.fingerprint = hash((shapes, tuple(zlib.crc32(str(dtype).encode()) for dtype in dtypes)))

    def in_order(self, results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return results, which are grouped by segment, in the order of the tensors."""
        if len(results) == 1:
            return results[0]
        found: dict[int, torch.Tensor] = {}
        for segment, tensors in zip(self.segments, results, strict=True):
            found.update(zip(segment.positions, tensors, strict=True))
        return [found[position] for position in range(len(found))]


_layouts: dict[tuple[tuple[torch.Size, ...], tuple[torch.dtype, ...]], Layout] = {}


def layout_of(leaves: list[torch.Tensor]) -> Layout:
    """Return the layout that packs these tensors.

    Args:
        leaves: The tensors to pack.
    """
    key = tuple([leaf.shape for leaf in leaves]), tuple([leaf.dtype for leaf in leaves])
    found = _layouts.get(key)
    if found is None:
        if len(_layouts) >= MAX_LAYOUTS:
            _layouts.clear()
        found = _layouts[key] = Layout(*key)
    return found
