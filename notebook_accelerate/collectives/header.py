"""One collective of a size that every rank knows, which tells what each rank passed and carries it where it fits.

gloo ends the process where ranks send different amounts ("op.preamble.length <= op.nbytes"), or hands out what was in
memory. Asking first would cost as much as a small collective itself. So ranks send blocks of equal size: a header with
what they were called with, then the data. The block's size follows from what all ranks have sent before, so that it is
known without asking; in a loop that sends the same again and again, one collective does both.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.collectives import shape_checks
from notebook_accelerate.collectives.communicator import TorchCommunicator
from notebook_accelerate.collectives.fused import Bundle
from notebook_accelerate.errors import DistributedOperationException
from notebook_accelerate.state import PartialState

OPERATIONS = ("gather", "reduce", "broadcast", "pad_across_processes")
_HEADER = struct.Struct("qqq")  # operation, bytes of data, fingerprint of the structure
_ALIGNED = 64
_START = _ALIGNED
"""Where data begins in a block; the header is shorter."""
_SMALLEST = 512
_LARGEST = 1 << 16
_ALL_RANKS = 1 << 20
"""Bytes that all ranks' blocks have together at most."""
_REMEMBERED = 8
"""So many exchanges decide on the size of the next block: loops alternate between a few."""


class Call:
    """What a rank passed to a collective.

    Args:
        operation: Its name.
        data: What the user passed, for messages.
        bundles: The tensors.
        free_dim: A dimension whose size may differ between ranks; the bundles hold what tells its sizes.

    Attributes:
        header: What is told to the other ranks.
        bytes: Size of the data in a block.
    """

    def __init__(self, operation: str, data: Any, bundles: list[Bundle], free_dim: int | None = None) -> None:
        self.operation, self.data, self.free_dim = operation, data, free_dim
        self.bytes = 0
        self._places: list[tuple[Bundle, int, int]] = []
        for bundle in bundles:
            begin = -(-self.bytes // _ALIGNED) * _ALIGNED
            self.bytes = begin + bundle.count * bundle.dtype.itemsize
            self._places.append((bundle, begin, self.bytes))
        # Numbers only: hashes of texts, and of None, differ between processes.
        fingerprint = hash((free_dim or 0, *(bundle.fingerprint for bundle in bundles)))
        self.header = (OPERATIONS.index(operation), self.bytes, fingerprint)

    def write(self, data: torch.Tensor) -> None:
        """Lay the tensors into bytes.

        Args:
            data: The bytes, of shape (bytes,).
        """
        for bundle, begin, end in self._places:
            bundle.pack_into(data[begin:end].view(bundle.dtype))

    def read(self, data: torch.Tensor) -> dict[Bundle, torch.Tensor]:
        """Take apart what was written, on whichever rank.

        Args:
            data: Bytes, of shape (..., bytes).

        Returns:
            What was packed of each bundle, of shape (..., count).
        """
        return {bundle: data[..., begin:end].view(bundle.dtype) for bundle, begin, end in self._places}


class Blocks:
    """The blocks of one process group: this rank's own, and room for those of all ranks.

    The memory is used again and again; what is read from it has to be copied before the next exchange.

    Args:
        group: The group.
        size: Number of its ranks.
    """

    def __init__(self, group: Any, size: int) -> None:
        self.group = group
        self._row = TorchCommunicator()
        self._ranks = range(size)
        self._largest = max(_SMALLEST, min(_LARGEST, _ALL_RANKS // size))
        self._needed: deque[int] = deque([1], maxlen=_REMEMBERED)
        self._resize(_SMALLEST)

    def gather(self, call: Call) -> dict[Bundle, torch.Tensor] | None:
        """Exchange blocks between all ranks; every rank must call this.

        Args:
            call: What this rank passed.

        Returns:
            For each bundle, what the ranks packed as rows of one matrix; None where it did not fit.

        Raises:
            DistributedOperationException: Ranks passed different things, or called different operations.
        """
        self._write(call)
        self._row.all_gather_into(self._rows, self._block)
        length = len(self._block)
        told = {_HEADER.unpack_from(self._rows_bytes, rank * length) for rank in self._ranks}
        data = self._rows[:, _START : _START + call.bytes]
        if len(told) > 1:
            self._remember(max(size for _, size, _ in told))
            shape_checks.check(call.operation, call.data, PartialState(), call.free_dim)
            raise DistributedOperationException(f"ranks passed different tensors to {call.operation!r}")
        return call.read(data) if self._remember(call.bytes) <= length else None

    def broadcast(self, call: Call, source: int, mine: bool) -> dict[Bundle, torch.Tensor] | None:
        """Send one rank's block to all; every rank must call this.

        Args:
            call: What this rank passed.
            source: Whose block.
            mine: Whether this rank is that one.

        Returns:
            For each bundle, what the source packed; None where it did not fit.

        Raises:
            DistributedOperationException: This rank passed something else than the source did.
        """
        if mine:
            self._write(call)
        self._row.broadcast(self._block, source)
        length, told = len(self._block), _HEADER.unpack_from(self._block_bytes)
        data = self._block[_START : _START + call.bytes]
        needed = self._remember(told[1])
        if told != call.header:
            raise DistributedOperationException(
                f"{call.operation!r} was given {shape_checks.described(call.data)} "
                f"on rank {PartialState().process_index}, at {shape_checks.call_line()}; rank {source} passed "
                "other tensors. Every rank must pass the same structure, shapes and dtypes "
                "(ACCELERATE_DEBUG_MODE=1 shows those of all ranks)"
            )
        return call.read(data) if needed <= length else None

    def _write(self, call: Call) -> None:
        _HEADER.pack_into(self._block_bytes, 0, *call.header)
        if _START + call.bytes <= len(self._block):
            call.write(self._block[_START : _START + call.bytes])

    def _remember(self, size: int) -> int:
        """Make the next blocks as large as the last exchanges needed, the same on every rank.

        Args:
            size: Bytes of data of this exchange: of the rank that had most.

        Returns:
            How large a block had to be.
        """
        needed = _START + size
        self._needed.append(needed if needed <= self._largest else 1)
        length = max(_SMALLEST, 1 << (max(self._needed) - 1).bit_length())
        if length != len(self._block):
            self._resize(length)
        return needed

    def _resize(self, length: int) -> None:
        self._block = torch.empty(length, dtype=torch.uint8)
        self._rows = torch.empty(len(self._ranks), length, dtype=torch.uint8)
        self._block_bytes, self._rows_bytes = self._block.numpy().data, self._rows.numpy().data


_blocks: Blocks | None = None


def blocks_of(state: PartialState) -> Blocks | None:
    """Return the blocks of this process's world.

    Args:
        state: The world.

    Returns:
        The blocks; None where ranks are connected by anything else than gloo on the CPU, or alone.
    """
    global _blocks  # noqa: PLW0603 - one per process group
    if state.communicator != "torch" or state.device.type != "cpu" or "gloo" not in (state.backend or ""):
        return None
    group = dist.group.WORLD
    if _blocks is None or _blocks.group is not group:
        _blocks = Blocks(group, state.num_processes)
    return _blocks
