"""RankLayout of the arena: memory of limited size, used as a ring, into which offloaded weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.big_modeling.tensor_sources import Source

_ALIGNMENT = 256
"""Bytes, as allocators align: CUDA copies and CPU vector instructions need it, and kernels choose by alignment."""


@dataclass(eq=False)
class Slot:
    """One offloaded tensor of a module.

    Attributes:
        placeholder: The tensor on the meta device that is in the module between forwards.
        source: Where the weight is read from.
    """

    placeholder: Any
    source: Source


@dataclass(eq=False)
class Unit:
    """The offloaded tensors of one module, loaded and released together.

    Attributes:
        slots: The tensors.
        block: Name of the repeated block that contains the module; the arena's size is counted in blocks.
        offsets: Offset of each tensor within the unit, in bytes.
        nbytes: Bytes in the arena.
    """

    slots: list[Slot]
    block: str
    offsets: list[int] = field(init=False, default_factory=list)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = 0
        for slot in self.slots:
            self.offsets.append(self.nbytes)
            self.nbytes += -(-slot.source.nbytes // _ALIGNMENT) * _ALIGNMENT

    def views(self, memory: torch.Tensor, begin: int) -> list[torch.Tensor]:
        """Return the unit's tensors as views of memory.

        Args:
            memory: The arena, or other memory of its size.
            begin: The unit's offset in it.
        """
        found = []
        for slot, offset in zip(self.slots, self.offsets, strict=True):
            part = memory[begin + offset : begin + offset + slot.source.nbytes]
            found.append(part.view(slot.source.dtype).view(slot.source.shape))
        return found


def assign_offsets(order: Sequence[Unit], size: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Assign each position of a pass its offset in the arena; every pass starts at 0.

    Args:
        order: The units of a pass.
        size: Bytes of the arena; at least those of the largest unit.

    Returns:
        The offset of each position, and for each position the distances back to the positions it overwrites.
    """
    offsets, end = [], 0
    for unit in order:
        begin = 0 if end + unit.nbytes > size else end
        offsets.append(begin)
        end = begin + unit.nbytes
    conflicts: list[tuple[int, ...]] = []
    live: list[tuple[int, int, int]] = []
    for step in range(2 * len(order)):
        position = step % len(order)
        begin, end = offsets[position], offsets[position] + order[position].nbytes
        overwritten = [entry for entry in live if entry[1] < end and begin < entry[2]]
        live = [entry for entry in live if entry not in overwritten] + [(step, begin, end)]
        if step >= len(order):
            conflicts.append(tuple(step - entry[0] for entry in overwritten))
    return offsets, conflicts


def arena_bytes(order: Sequence[Unit], blocks: int) -> int:
    """Return the size of an arena for the largest block times ``blocks``, and at least for the largest unit.

    Args:
        order: The units of a pass.
        blocks: Number of blocks.
    """
    sizes: dict[str, int] = {}
    for unit in {id(unit): unit for unit in order}.values():
        sizes[unit.block] = sizes.get(unit.block, 0) + unit.nbytes
    return max(max(sizes.values()) * blocks, *(unit.nbytes for unit in order))
