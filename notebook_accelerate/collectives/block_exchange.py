"""Checks the arguments of a collective on all ranks and transfers small data, in one collective of a known size.

gloo ends the process if ranks send different amounts ("op.preamble.length <= op.nbytes"), or returns uninitialized
memory. Comparing sizes first would cost as much as a small collective itself. So ranks send blocks of equal size: a
header that describes their arguments, then the data. The block size is derived from the previous exchanges, so every
rank knows it; in a loop that sends the same tensors repeatedly, one collective does both.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.collectives import shape_checks
from notebook_accelerate.collectives.buckets import Bucket
from notebook_accelerate.collectives.communicator import TorchCommunicator
from notebook_accelerate.errors import DistributedOperationException
from notebook_accelerate.state import PartialState

OPERATIONS = ("gather", "reduce", "broadcast", "pad_across_processes")
_HEADER = struct.Struct("qqq")  # operation, bytes of data, fingerprint of the structure
_ALIGNMENT = 64
_DATA_OFFSET = _ALIGNMENT
"""Offset of the data in a block; the header is shorter."""
_MIN_BLOCK = 512
_MAX_BLOCK = 1 << 16
_MAX_TOTAL = 1 << 20
"""Largest total size of all ranks' blocks, bytes."""
_HISTORY = 8
"""Number of exchanges that decide the size of the next block: loops alternate between a few collectives."""


class CollectiveCall:
    """The arguments of a collective on this rank.

    Args:
        operation: Name of the collective.
        data: The user's argument, for messages.
        buckets: The tensors.
        free_dim: A dimension whose size may differ between ranks; the buckets then contain its sizes.

    Attributes:
        header: The description sent to the other ranks.
        bytes: Size of the data in a block.
    """

    def __init__(self, operation: str, data: Any, buckets: list[Bucket], free_dim: int | None = None) -> None:
        self.operation, self.data, self.free_dim = operation, data, free_dim
        self.bytes = 0
        self._slices: list[tuple[Bucket, int, int]] = []
        for bucket in buckets:
            begin = -(-self.bytes // _ALIGNMENT) * _ALIGNMENT
            self.bytes = begin + bucket.count * bucket.dtype.itemsize
            self._slices.append((bucket, begin, self.bytes))
        # Numbers only: hashes of strings and of None differ between processes.
        fingerprint = hash((free_dim or 0, *(bucket.fingerprint for bucket in buckets)))
        self.header = (OPERATIONS.index(operation), self.bytes, fingerprint)

    def write(self, data: torch.Tensor) -> None:
        """Write the tensors into a buffer.

        Args:
            data: Bytes, of shape (bytes,).
        """
        for bucket, begin, end in self._slices:
            bucket.pack_into(data[begin:end].view(bucket.dtype))

    def read(self, data: torch.Tensor) -> dict[Bucket, torch.Tensor]:
        """Return the packed tensor of each bucket, of shape (..., count), from the buffers of any rank.

        Args:
            data: Bytes, of shape (..., bytes).
        """
        return {bucket: data[..., begin:end].view(bucket.dtype) for bucket, begin, end in self._slices}


class BlockExchange:
    """Exchanges blocks within one process group; has the memory for this rank's block and for those of all ranks.

    The memory is reused: results must be copied before the next exchange.

    Args:
        group: The group.
        size: Number of its ranks.
    """

    def __init__(self, group: Any, size: int) -> None:
        self.group = group
        self._communicator = TorchCommunicator()
        self._ranks = range(size)
        self._max_block = max(_MIN_BLOCK, min(_MAX_BLOCK, _MAX_TOTAL // size))
        self._recent_sizes: deque[int] = deque([1], maxlen=_HISTORY)
        self._resize(_MIN_BLOCK)

    def gather(self, call: CollectiveCall) -> dict[Bucket, torch.Tensor] | None:
        """Exchange blocks between all ranks; every rank must call this.

        Args:
            call: This rank's arguments.

        Returns:
            For each bucket, a matrix with the packed tensor of each rank as a row; None if the data did not fit.

        Raises:
            DistributedOperationException: Ranks passed different tensors, or called different operations.
        """
        self._write(call)
        self._communicator.all_gather_into(self._rows, self._block)
        length = len(self._block)
        headers = {_HEADER.unpack_from(self._rows_bytes, rank * length) for rank in self._ranks}
        data = self._rows[:, _DATA_OFFSET : _DATA_OFFSET + call.bytes]
        if len(headers) > 1:
            self._adapt_size(max(size for _, size, _ in headers))
            shape_checks.check(call.operation, call.data, PartialState(), call.free_dim)
            raise DistributedOperationException(f"ranks passed different tensors to {call.operation!r}")
        return call.read(data) if self._adapt_size(call.bytes) <= length else None

    def broadcast(self, call: CollectiveCall, source: int, mine: bool) -> dict[Bucket, torch.Tensor] | None:
        """Send one rank's block to all; every rank must call this.

        Args:
            call: This rank's arguments.
            source: The rank to send.
            mine: Whether this rank is the source.

        Returns:
            For each bucket, the source's packed tensor; None if the data did not fit.

        Raises:
            DistributedOperationException: This rank and the source passed different tensors.
        """
        if mine:
            self._write(call)
        self._communicator.broadcast(self._block, source)
        length, header = len(self._block), _HEADER.unpack_from(self._block_bytes)
        data = self._block[_DATA_OFFSET : _DATA_OFFSET + call.bytes]
        needed = self._adapt_size(header[1])
        if header != call.header:
            raise DistributedOperationException(
                f"{call.operation!r} got {shape_checks.describe(call.data)} "
                f"on rank {PartialState().process_index}, at {shape_checks.caller_line()}; rank {source} passed "
                "other tensors. Every rank must pass the same structure, shapes and dtypes "
                "(ACCELERATE_DEBUG_MODE=1 shows those of all ranks)"
            )
        return call.read(data) if needed <= length else None

    def _write(self, call: CollectiveCall) -> None:
        _HEADER.pack_into(self._block_bytes, 0, *call.header)
        if _DATA_OFFSET + call.bytes <= len(self._block):
            call.write(self._block[_DATA_OFFSET : _DATA_OFFSET + call.bytes])

    def _adapt_size(self, size: int) -> int:
        """Set the size of the next block to what the last exchanges needed, the same on every rank.

        Args:
            size: Bytes of data of this exchange, on the rank that had most.

        Returns:
            The block size that this exchange needed.
        """
        needed = _DATA_OFFSET + size
        self._recent_sizes.append(needed if needed <= self._max_block else 1)
        length = max(_MIN_BLOCK, 1 << (max(self._recent_sizes) - 1).bit_length())
        if length != len(self._block):
            self._resize(length)
        return needed

    def _resize(self, length: int) -> None:
        self._block = torch.empty(length, dtype=torch.uint8)
        self._rows = torch.empty(len(self._ranks), length, dtype=torch.uint8)
        self._block_bytes, self._rows_bytes = self._block.numpy().data, self._rows.numpy().data


_exchange: BlockExchange | None = None


def _exchange_for(state: PartialState) -> BlockExchange | None:
    """Return the block exchange of this process's world; None unless ranks are connected by gloo on the CPU.

    Args:
        state: The world.
    """
    global _exchange  # noqa: PLW0603 - one per process group
    if state.communicator != "torch" or state.device.type != "cpu" or "gloo" not in (state.backend or ""):
        return None
    group = dist.group.WORLD
    if _exchange is None or _exchange.group is not group:
        _exchange = BlockExchange(group, state.num_processes)
    return _exchange


def gather_blocks(
    state: PartialState, operation: str, data: Any, buckets: list[Bucket], free_dim: int | None = None
) -> dict[Bucket, torch.Tensor] | None:
    """Exchange blocks between all ranks; every rank must call this. See `BlockExchange.gather`.

    Args:
        state: The world.
        operation: Name of the collective.
        data: The user's argument.
        buckets: The tensors.
        free_dim: A dimension whose size may differ between ranks.
    """
    exchange = _exchange_for(state)
    return exchange.gather(CollectiveCall(operation, data, buckets, free_dim)) if exchange is not None else None


def broadcast_blocks(
    state: PartialState, data: Any, buckets: list[Bucket], source: int
) -> dict[Bucket, torch.Tensor] | None:
    """Send one rank's block to all; every rank must call this. See `BlockExchange.broadcast`.

    Args:
        state: The world.
        data: The user's argument.
        buckets: The tensors.
        source: The rank to send.
    """
    exchange = _exchange_for(state)
    if exchange is None:
        return None
    return exchange.broadcast(CollectiveCall("broadcast", data, buckets), source, state.process_index == source)
