"""One memory of limited size for weights that come and go, used ring-wise: which tensor is at which place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.big_modeling.file_mapping import PAGE
from notebook_accelerate.big_modeling.tensor_sources import Source

_ALIGNMENT = 256
"""Bytes: what CUDA copies and CPU vector instructions like; allocators give no less, so kernels choose alike."""


@dataclass(eq=False)
class Slot:
    """One tensor of a module that comes and goes.

    Attributes:
        held: The dictionary of the module that it is in.
        key: Its name there.
        absent: What is there while it is away, on the meta device.
        source: Where it is read from.
        maps: Its file is mapped into the arena, rather than copied.
    """

    held: dict[str, Any]
    key: str
    absent: Any
    source: Source
    maps: bool = False


@dataclass(eq=False)
class Unit:
    """The tensors of one module that come and go together.

    Attributes:
        slots: The tensors.
        block: Name of the block it belongs to: blocks measure the window.
        offsets: Where each tensor begins, in bytes from the unit's place in the arena.
        nbytes: Bytes in the arena.
        alignment: What the unit's place must be a multiple of.
    """

    slots: list[Slot]
    block: str
    offsets: list[int] = field(init=False, default_factory=list)
    nbytes: int = field(init=False)
    alignment: int = field(init=False)

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            # A mapped tensor has its pages to itself, and begins as far into its first page as in the file.
            begin = _up(end, PAGE) + slot.source.offset % PAGE if slot.maps else _up(end, _ALIGNMENT)
            self.offsets.append(begin)
            end = begin + slot.source.nbytes
            end = _up(end, PAGE) if slot.maps else end
        self.alignment = PAGE if any(slot.maps for slot in self.slots) else _ALIGNMENT
        self.nbytes = _up(end, self.alignment)

    def views(self, memory: torch.Tensor, begin: int) -> list[torch.Tensor]:
        """Return the tensors at a place of a memory.

        Args:
            memory: The arena, or another memory as large.
            begin: The place.
        """
        found = []
        for slot, offset in zip(self.slots, self.offsets, strict=True):
            part = memory[begin + offset : begin + offset + slot.source.nbytes]
            found.append(part.view(slot.source.dtype).view(slot.source.shape))
        return found


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def places(order: Sequence[Unit], size: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Give each position of a pass its place; every pass starts at the beginning of the arena.

    Args:
        order: The units of a pass.
        size: Bytes of the arena: as large as the largest unit at least.

    Returns:
        Offsets, and how many positions back those are that were in the same place.
    """
    offsets, end = [], 0
    for unit in order:
        begin = _up(end, unit.alignment)
        begin = 0 if begin + unit.nbytes > size else begin
        offsets.append(begin)
        end = begin + unit.nbytes
    conflicts: list[tuple[int, ...]] = []
    live: list[tuple[int, int, int]] = []
    for number in range(2 * len(order)):
        position = number % len(order)
        begin, end = offsets[position], offsets[position] + order[position].nbytes
        over = [entry for entry in live if entry[1] < end and begin < entry[2]]
        live = [entry for entry in live if entry not in over] + [(number, begin, end)]
        if number >= len(order):
            conflicts.append(tuple(number - entry[0] for entry in over))
    return offsets, conflicts


def window_bytes(order: Sequence[Unit], blocks: int) -> int:
    """Return the bytes of so many largest blocks, and of the largest unit at least.

    Args:
        order: The units of a pass.
        blocks: Number of blocks.
    """
    found: dict[str, int] = {}
    alignment = max(unit.alignment for unit in order)
    for unit in {id(unit): unit for unit in order}.values():
        found[unit.block] = found.get(unit.block, 0) + _up(unit.nbytes, alignment)
    return max(max(found.values()) * blocks, *(unit.nbytes for unit in order))
