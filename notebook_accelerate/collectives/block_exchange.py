"""Compare the arguments of a collective across ranks, and transfer small data, in one collective of a known size.

If ranks send different amounts, gloo kills the process ("op.preamble.length <= op.nbytes") or returns uninitialized
memory. Comparing sizes first would take as long as a small collective itself. Ranks therefore send blocks of equal
size: a header that describes their arguments, followed by the data. Every rank knows the size of blocks, because it is
derived from the previous exchanges. In a loop that sends the same tensors repeatedly, one collective compares the
arguments and transfers the data.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.collectives.communicator import COMMUNICATORS, Result, TorchCommunicator
from notebook_accelerate.collectives.layouts import (
    ALIGNMENT,
    MAX_LAYOUTS,
    Layout,
    children_of,
    is_torch_tensor,
    layout_of,
    recursively_apply,
    split_equally,
)
from notebook_accelerate.errors import DistributedOperationException
from notebook_accelerate.state import PartialState
from notebook_accelerate.state.warn_once import user_frame
from notebook_accelerate.torch_internals import foreach_copy

OPERATIONS = {"gather": 0, "reduce": 1, "broadcast": 2, "pad_across_processes": 3}
_HEADER = struct.Struct("qqq")  # The operation, the size of the data in bytes, and the fingerprint of the structure.
_DATA_OFFSET = ALIGNMENT
"""The offset of the data in a block, which leaves room for the header."""
_MIN_BLOCK = 512
_MAX_BLOCK = 1 << 16
_MAX_TOTAL = 1 << 20
"""The maximum size in bytes of all ranks' blocks together."""
_HISTORY = 8
"""The number of past exchanges that determine the size of the next block, because loops may alternate collectives."""


class BlockViews:
    """Views of an exchange's memory, for one layout.

    Args:
        layout: The layout of the tensors.
        block: This rank's block, as bytes of shape (block size,).
        rows: The blocks of all ranks, as bytes of shape (ranks, block size).

    Attributes:
        rows: For each segment, the packed tensors of all ranks, of shape (ranks, count).
    """

    def __init__(self, layout: Layout, block: torch.Tensor, rows: torch.Tensor) -> None:
        self._layout = layout
        block, rows = block[_DATA_OFFSET:], rows[:, _DATA_OFFSET:]
        self._own = [block[part.begin : part.end].view(part.dtype) for part in layout.segments]
        self.rows = [rows[:, part.begin : part.end].view(part.dtype) for part in layout.segments]
        self._stacked = self._own[0].view(-1, *layout.shapes[0]) if layout.same_shape and layout.bytes else None

    @cached_property
    def by_rank(self) -> list[tuple[torch.Tensor, ...]]:
        """For each rank, the packed tensors of each segment."""
        with torch.inference_mode(mode=False):
            return [rows.unbind(0) for rows in self.rows]

    @cached_property
    def leaves(self) -> list[torch.Tensor]:
        """Views of this rank's block that have the shapes of the tensors."""
        with torch.inference_mode(mode=False):
            own = zip(self._layout.segments, self._own, strict=True)
            return self._layout.in_order([part.views(flat) for part, flat in own])

    @cached_property
    def _gather_sources(self) -> list[list[torch.Tensor]]:
        """For each segment, the views of the rows that a gather copies."""
        found = []
        with torch.inference_mode(mode=False):
            for part, rows in zip(self._layout.segments, self.rows, strict=True):
                if part.same_shape:  # One copy suffices for all tensors.
                    found.append([rows.view(len(rows), len(part.shapes), part.sizes[0]).transpose(0, 1)])
                else:
                    found.append(list(rows.split_with_sizes(part.sizes, dim=1)))
        return found

    def write(self, leaves: list[torch.Tensor]) -> None:
        """Write the tensors into this rank's block.

        Args:
            leaves: The tensors to write, in the order of the layout.
        """
        with torch.no_grad():
            if self._stacked is not None:
                torch.stack(leaves, out=self._stacked)
            elif leaves:
                foreach_copy(self.leaves, leaves)

    def allocate_joined(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return new memory for `join`, and the results of the gather, which are views of that memory."""
        targets, results = [], []
        for part, sources, rows in zip(self._layout.segments, self._gather_sources, self.rows, strict=True):
            memory = [torch.empty(source.shape, dtype=part.dtype, device="cpu") for source in sources]
            shapes = part.joined_shapes(len(rows))
            if part.same_shape:
                results.append(split_equally(memory[0], len(shapes), shapes[0]))
            else:
                results.append([flat.view(shape) for flat, shape in zip(memory, shapes, strict=True)])
            targets += memory
        return targets, self._layout.in_order(results)

    def join(self, targets: list[torch.Tensor]) -> None:
        """Join the tensors of all ranks along the first dimension.

        Args:
            targets: The memory that `allocate_joined` returned.
        """
        if targets:
            foreach_copy(targets, list(chain.from_iterable(self._gather_sources)))


class CollectiveCall:
    """The arguments of a collective on this rank.

    Args:
        operation: The name of the collective.
        data: The user's argument, for messages.
        leaves: The tensors to send, on the rank's device.
        free_dim: A dimension whose size may differ between ranks. If given, these sizes are sent instead of the
            tensors.

    Attributes:
        layout: The layout of the tensors.
        header: The description that is sent to the other ranks.
    """

    __slots__ = ("data", "free_dim", "header", "layout", "leaves", "operation")

    def __init__(self, operation: str, data: Any, leaves: list[torch.Tensor], free_dim: int | None = None) -> None:
        self.operation, self.data, self.leaves, self.free_dim = operation, data, leaves, free_dim
        self.layout = layout_of(leaves)
        fingerprint = self.layout.fingerprint if free_dim is None else hash((free_dim, self.layout.fingerprint))
        self.header = (OPERATIONS[operation], self.layout.bytes, fingerprint)


class BlockExchange:
    """Exchanges blocks within a process group, in memory that it owns.

    Because the memory is reused, results must be copied before the next exchange.

    Args:
        group: The process group whose ranks exchange blocks.
        size: The number of ranks in the group.
    """

    def __init__(self, group: Any, size: int) -> None:
        self.group = group
        self._communicator = TorchCommunicator()
        self._ranks = range(size)
        self._max_block = max(_MIN_BLOCK, min(_MAX_BLOCK, _MAX_TOTAL // size))
        self._recent_sizes: deque[int] = deque([1], maxlen=_HISTORY)
        self._resize(_MIN_BLOCK)

    def gather(self, call: CollectiveCall, prepare: Callable[[BlockViews], Result]) -> tuple[BlockViews, Result] | None:
        """Exchange blocks between all ranks; every rank must call this.

        Args:
            call: This rank's arguments.
            prepare: A function that is called with the views while the data is in transit, if the data fits.

        Returns:
            Views of all ranks' tensors and the result of `prepare`, or None if the data did not fit into the block.

        Raises:
            DistributedOperationException: Ranks passed different tensors, or called different operations.
        """
        views, length = self._write(call), self._length
        prepared = self._communicator.all_gather_into(
            self.group, self._all_rows, self._block, lambda: None if views is None else (views, prepare(views))
        )
        headers = {_HEADER.unpack_from(self._rows_bytes, rank * length) for rank in self._ranks}
        if len(headers) > 1:
            self._adapt_size(max(size for _, size, _ in headers))
            check_arguments(call.operation, call.data, PartialState(), call.free_dim)
            raise DistributedOperationException(f"ranks passed different tensors to {call.operation!r}")
        self._adapt_size(call.layout.bytes)
        return prepared

    def send(self, call: CollectiveCall, source: int, prepare: Callable[[], Result]) -> tuple[bool, Result]:
        """Send this rank's block to all other ranks, which must call `receive`.

        Args:
            call: This rank's arguments.
            source: This process's rank.
            prepare: A function that is called while the data is in transit.

        Returns:
            Whether the data fit into the block, and the result of `prepare`.
        """
        views = self._write(call)
        prepared = self._communicator.broadcast_in(self.group, self._block, source, prepare)
        self._adapt_size(call.layout.bytes)
        return views is not None, prepared

    def receive(
        self, source: int, prepare: Callable[[], tuple[CollectiveCall, Result]]
    ) -> tuple[BlockViews | None, tuple[CollectiveCall, Result]]:
        """Receive the block of the rank that calls `send`; all other ranks must call this.

        Args:
            source: The rank that sends its block.
            prepare: A function that is called while the data is in transit. It returns this rank's arguments and any
                other result.

        Returns:
            Views of the source's tensors, or None if the data did not fit into the block, and the results of `prepare`.

        Raises:
            DistributedOperationException: This rank and the source passed different tensors.
        """
        call, prepared = self._communicator.broadcast_in(self.group, self._block, source, prepare)
        views = self._views_for(call.layout)
        header = _HEADER.unpack_from(self._block_bytes)
        self._adapt_size(header[1])
        if header != call.header:
            raise DistributedOperationException(
                f"{call.operation!r} got {describe_tensors(call.data)} "
                f"on rank {PartialState().process_index}, at {caller_line()}; rank {source} passed "
                "other tensors. Every rank must pass the same structure, shapes and dtypes "
                "(ACCELERATE_DEBUG_MODE=1 shows the tensors of all ranks)"
            )
        return views, (call, prepared)

    def _write(self, call: CollectiveCall) -> BlockViews | None:
        _HEADER.pack_into(self._block_bytes, 0, *call.header)
        views = self._views_for(call.layout)
        if views is not None:
            views.write(call.leaves)
        return views

    def _views_for(self, layout: Layout) -> BlockViews | None:
        """Return the views of the current memory for a layout, or None if the layout does not fit."""
        if _DATA_OFFSET + layout.bytes > self._length:
            return None
        views = self._views.get(layout)
        if views is None:
            if len(self._views) >= MAX_LAYOUTS:
                self._views.clear()
            # The views may be reused after an evaluation, so they must not be inference tensors.
            with torch.inference_mode(mode=False):
                views = self._views[layout] = BlockViews(layout, self._block, self._rows)
        return views

    def _adapt_size(self, size: int) -> None:
        """Set the size of the next block to the largest that a recent exchange needed, which is the same on every rank.

        Args:
            size: The size of the data in this exchange in bytes, on the rank that had the most data.
        """
        needed = _DATA_OFFSET + size
        self._recent_sizes.append(needed if needed <= self._max_block else 1)
        if self._length < 2 * needed and needed <= self._length:  # The largest recent size needs this length, too.
            return
        length = max(_MIN_BLOCK, 1 << (max(self._recent_sizes) - 1).bit_length())
        if length != self._length:
            self._resize(length)

    def _resize(self, length: int) -> None:
        self._length = length
        self._views: dict[Layout, BlockViews] = {}
        with torch.inference_mode(mode=False):
            self._block = torch.empty(length, dtype=torch.uint8, device="cpu")
            self._all_rows = torch.empty(len(self._ranks) * length, dtype=torch.uint8, device="cpu")
            self._rows = self._all_rows.view(len(self._ranks), length)
        self._block_bytes, self._rows_bytes = self._block.numpy().data, self._all_rows.numpy().data


_exchange: BlockExchange | None = None


def exchange_for(state: PartialState) -> BlockExchange | None:
    """Return the block exchange for the ranks, or None if they are not connected by gloo on the CPU.

    Args:
        state: The state with the ranks to connect.
    """
    global _exchange  # noqa: PLW0603 - there is one exchange per process group
    if state.communicator != "torch" or state.device.type != "cpu" or "gloo" not in (state.backend or ""):
        return None
    group = dist.group.WORLD
    if _exchange is None or _exchange.group is not group:
        _exchange = BlockExchange(group, state.num_processes)
    return _exchange


def gather_blocks(
    state: PartialState, call: CollectiveCall, prepare: Callable[[BlockViews], Result]
) -> tuple[BlockViews, Result] | None:
    """Exchange blocks between all ranks; every rank must call this. See `BlockExchange.gather`.

    Args:
        state: The state with the ranks that exchange blocks.
        call: This rank's arguments.
        prepare: A function that is called with the views while the data is in transit.
    """
    exchange = exchange_for(state)
    return exchange.gather(call, prepare) if exchange is not None else None


# ---- messages about ranks that pass different arguments


def check_arguments(operation: str, data: Any, state: PartialState, free_dim: int | None = None) -> None:
    """Check that all ranks call the same operation with matching tensors; every rank must call this.

    Args:
        operation: The name of the collective.
        data: This rank's argument.
        state: The state with the ranks to compare.
        free_dim: A dimension whose size may differ between ranks.

    Raises:
        DistributedOperationException: The calls do not match. The message shows each rank's tensors and line of code.
    """
    mine = (operation, describe_tensors(data), describe_tensors(data, free_dim), caller_line())
    reports = COMMUNICATORS[state.communicator].all_gather_object(mine, state.num_processes)
    if all((name, compared) == (operation, mine[2]) for name, _, compared, _ in reports):
        return
    rows = [(f"rank {rank}", name, shown, where) for rank, (name, shown, _, where) in enumerate(reports)]
    raise DistributedOperationException(
        f"ranks passed different tensors to {operation!r}; they must have the same structure, shapes and dtypes on "
        f"every rank (pad_across_processes makes sizes equal):\n{_table(('rank', 'operation', 'passed', 'at'), rows)}"
    )


def describe_tensors(data: Any, free_dim: int | None = None) -> str:
    """Describe the shapes and dtypes of a nested structure.

    Args:
        data: Nested containers of tensors.
        free_dim: A dimension whose size is shown as "*".

    Returns:
        The description, such as ``{'x': float32[2, 4]}``.
    """

    def format_tensor(tensor: Any) -> _Unquoted:
        sizes = [str(size) for size in tensor.shape]
        if free_dim is not None and -len(sizes) <= free_dim < len(sizes):
            sizes[free_dim] = "*"
        return _Unquoted(f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]")

    if not is_torch_tensor(data) and not list(children_of(data)):
        return repr(data)
    return repr(recursively_apply(format_tensor, data))


class _Unquoted(str):
    """A string whose `repr` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def caller_line() -> str:
    """Return the file, line and source of the innermost frame outside of this package."""
    import linecache

    _, frame = user_frame()
    name, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(name, line, frame.f_globals).strip()
    return f"{name}, line {line}{f': {source}' if source else ''}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
