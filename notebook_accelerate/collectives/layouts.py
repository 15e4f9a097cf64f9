"""Packs tensors by dtype into flat buffers, so that each dtype costs one collective.

A layout is derived once for each combination of shapes and dtypes: loops send the same structures repeatedly.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from notebook_accelerate.torch_internals import flatten_dense_tensors

ALIGNMENT = 64
"""Segments start at multiples of this many bytes."""
# Up to this size (bytes) results are views of one buffer, which is 3 times as fast as copies for 50 tensors of 64 x 4.
# Above it they are copies, so that a small result does not keep a large buffer in memory.
_VIEW_LIMIT = 1 << 20
MAX_LAYOUTS = 256
"""Number of layouts that are kept: batches of text differ in length."""


class Segment:
    """The tensors of one dtype in a layout, packed one after the other.

    Args:
        dtype: The dtype.
        positions: Indexes of the tensors in the list of all.
        shapes: Their shapes.
        begin: Offset of the segment in a buffer for the whole layout, bytes.

    Attributes:
        sizes: Number of elements of each tensor.
        count: Total number of elements.
        end: Offset of the segment's end, bytes.
        same_shape: Whether all tensors have the same shape, which makes every step a single operation.
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
            # DDP's helper takes a third of the time of reshape and cat from Python.
            packed: torch.Tensor = flatten_dense_tensors(chosen)  # type: ignore[no-untyped-call]
            return packed

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor for the result of `pack` on another rank."""
        return torch.empty(self.count, dtype=self.dtype, device=device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a packed tensor, with the tensors' shapes.

        Args:
            flat: A packed tensor of shape (count,); its dtype may differ.
        """
        if len(self.shapes) == 1:
            return [flat.view(self.shapes[0])]
        if self.same_shape:
            return split_equally(flat, len(self.shapes), self.shapes[0])
        parts = torch.split_with_sizes(flat, self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def unpack(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Split a packed tensor into results: views of a small one, copies of a large one.

        Args:
            flat: A packed tensor of shape (count,); its dtype may differ.
        """
        if len(self.shapes) == 1 or is_small(flat.nbytes):
            return self.views(flat)
        return [part.view(shape) for part, shape in zip(_split_copies(flat, self.sizes), self.shapes, strict=True)]

    def joined_shapes(self, ranks: int) -> list[tuple[int, ...]]:
        """Return the tensors' shapes after a gather.

        Args:
            ranks: Number of ranks.
        """
        return [(ranks * shape[0], *shape[1:]) if shape else (ranks,) for shape in self.shapes]

    def unpack_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Split the packed tensors of all ranks, and join each tensor over ranks along its first dimension.

        Args:
            rows: One packed tensor per rank, of shape (ranks, count); its memory becomes that of the results.
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
    """Return views of a packed tensor that have one shape.

    Args:
        packed: A contiguous tensor with as many elements as the views.
        count: Number of views.
        shape: Shape of each.
    """
    if not shape:
        return list(packed.view(count).unbind(0))
    # Takes 0.9 times as long as unbind.
    return list(packed.view(count * shape[0], *shape[1:]).split_with_sizes([shape[0]] * count))


def _split_copies(packed: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    # torch's stubs declare only the form that writes into given tensors.
    copies: Any = torch.split_with_sizes_copy(packed, sizes, dim=-1)  # type: ignore[func-returns-value]
    return list(copies)


def is_small(size: int) -> bool:
    """Tell whether results in a buffer of `size` bytes are views of it, which keep all of it in memory."""
    return size <= _VIEW_LIMIT


class Layout:
    """Where tensors lie in a buffer for all of them: one segment per dtype.

    Args:
        shapes: Shapes of the tensors.
        dtypes: Their dtypes.

    Attributes:
        shapes: As above.
        segments: The segments, in the order in which dtypes first appear.
        same_shape: Whether there is one segment, of tensors with the same shape.
        bytes: Size of the buffer.
        fingerprint: A number that is equal on ranks with equal number, shapes and dtypes of tensors.
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
        # Numbers only: hashes of strings and of None differ between processes.
        self.fingerprint = hash((shapes, tuple(zlib.crc32(str(dtype).encode()) for dtype in dtypes)))

    def in_order(self, results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the results for the tensors of each segment, in the order of the tensors."""
        if len(results) == 1:
            return results[0]
        found: dict[int, torch.Tensor] = {}
        for segment, tensors in zip(self.segments, results, strict=True):
            found.update(zip(segment.positions, tensors, strict=True))
        return [found[position] for position in range(len(found))]


_layouts: dict[tuple[tuple[torch.Size, ...], tuple[torch.dtype, ...]], Layout] = {}


def layout_of(leaves: list[torch.Tensor]) -> Layout:
    """Return the layout of tensors.

    Args:
        leaves: The tensors.
    """
    key = tuple([leaf.shape for leaf in leaves]), tuple([leaf.dtype for leaf in leaves])
    found = _layouts.get(key)
    if found is None:
        if len(_layouts) >= MAX_LAYOUTS:
            _layouts.clear()
        found = _layouts[key] = Layout(*key)
    return found
