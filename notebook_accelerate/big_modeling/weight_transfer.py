"""How weights come into the arena: mapped or read on the CPU, copied on a stream of their own to an accelerator."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from notebook_accelerate.big_modeling import file_mapping
from notebook_accelerate.big_modeling.arena import Unit

_LOG = logging.getLogger(__name__)


class CpuTransfer:
    """Maps files into the arena, or reads them into it."""

    def reserve(self, size: int) -> torch.Tensor:
        """Return the memory of the arena.

        Args:
            size: Bytes.
        """
        return file_mapping.reserve(size) if file_mapping.supported() else torch.empty(size, dtype=torch.uint8)

    def prepare(self, order: Sequence[Unit], arena: torch.Tensor) -> None:
        """Nothing to prepare."""

    def read(
        self, number: int, unit: Unit, tensors: Sequence[torch.Tensor], begin: int, conflicts: Sequence[int]
    ) -> None:
        """Fill a unit's tensors."""
        for slot, tensor in zip(unit.slots, tensors, strict=True):
            if slot.maps:
                path: Any = getattr(slot.source, "path", None)
                file_mapping.map_into(tensor, path, slot.source.offset)
            else:
                slot.source.read_into(tensor)

    def before_use(self, number: int) -> None:
        """Nothing to wait for."""

    def after_use(self, number: int, around: bool) -> None:
        """Nothing to note."""

    def jump(self) -> None:
        """Nothing to wait for."""


class StreamTransfer:
    """Copies from pinned memory on a stream of its own; what is on disk is read into pinned memory first.

    Two hazards are ordered by events. A place of the arena is written again only after the computation with what was
    there: the copy's stream waits for an event that the computation's stream records when a unit is given back. The
    same place of the pinned memory is written again only after the copy from there: the reading thread waits itself.

    Args:
        device: The accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend: Any = getattr(torch, device.type)
        self._device = device
        self._stream: Any = None
        self._staging: torch.Tensor | None = None
        self._copied: dict[int, Any] = {}
        self._used: dict[int, Any] = {}
        self._barriers: deque[Any] = deque()
        self._last: Any = None
        self._jumped = False

    def reserve(self, size: int) -> torch.Tensor:
        """Return the memory of the arena.

        Args:
            size: Bytes.
        """
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def prepare(self, order: Sequence[Unit], arena: torch.Tensor) -> None:
        """Pin the weights that are in memory, and as much memory as the arena has for those that are not."""
        self._stream = self._stream or self._backend.Stream(self._device)
        # Whatever had the arena's memory before, and copies into the last arena.
        self._backend.synchronize(self._device)
        # The allocator gives the arena's memory to others only after the copies on this stream.
        arena.record_stream(self._stream)
        self._copied, self._used, self._last, self._jumped = {}, {}, None, False
        self._barriers.clear()
        sources = [slot.source for unit in order for slot in unit.slots]
        known: dict[int, torch.Tensor] = {}
        try:
            for source in sources:
                source.pin(known)
        except RuntimeError as error:
            _LOG.warning("Not all offloaded weights could be pinned (%s): the others take one copy more.", error)
        self._staging = None
        if any(source.pinned is None for source in sources):
            self._staging = torch.empty(arena.numel(), dtype=torch.uint8, pin_memory=True)

    def read(
        self, number: int, unit: Unit, tensors: Sequence[torch.Tensor], begin: int, conflicts: Sequence[int]
    ) -> None:
        """Fill a unit's tensors, after those who used their place are done."""
        self._wait_for_staging(conflicts)
        staged = unit.views(self._staging, begin) if self._staging is not None else [None] * len(tensors)
        try:
            with self._backend.stream(self._stream):
                self._wait_for_computation(conflicts)
                for slot, tensor, stage in zip(unit.slots, tensors, staged, strict=True):
                    source = slot.source.pinned
                    if source is None:
                        assert stage is not None
                        slot.source.read_into(stage)
                        source = stage
                    tensor.data.copy_(source, non_blocking=True)
                done = self._backend.Event()
                done.record(self._stream)
        except BaseException:
            self._stream.synchronize()  # no event tells when what was staged so far is copied
            raise
        self._copied[number] = self._last = done

    def _wait_for_staging(self, conflicts: Sequence[int]) -> None:
        events = [self._copied.pop(conflict, None) for conflict in conflicts]
        if self._jumped:
            self._jumped = False
            events.append(self._last)  # the copies of one stream end in their order
        for event in events:
            if event is not None and self._staging is not None:
                event.synchronize()

    def _wait_for_computation(self, conflicts: Sequence[int]) -> None:
        while self._barriers:
            self._stream.wait_event(self._barriers.popleft())
        for conflict in conflicts:
            if (event := self._used.pop(conflict, None)) is not None:
                self._stream.wait_event(event)

    def before_use(self, number: int) -> None:
        """Let the computation wait for the copy."""
        self._backend.current_stream(self._device).wait_event(self._copied[number])

    def after_use(self, number: int, around: bool) -> None:
        """Note how far the computation must be before the place is written again.

        Args:
            number: What was used.
            around: It was in use while others came and went: whoever comes next may be in its place.
        """
        event = self._now()
        self._used[number] = event
        if around:
            self._barriers.append(event)

    def jump(self) -> None:
        """Let the next copies wait for all that was computed and copied: after a jump, others are in their places."""
        self._barriers.append(self._now())
        self._jumped = True
        self._copied.clear()
        self._used.clear()

    def _now(self) -> Any:
        event = self._backend.Event()
        event.record(self._backend.current_stream(self._device))
        return event


def has_lane(device: torch.device) -> bool:
    """Tell whether weights can be brought to a device ahead: the CPU, and accelerators with streams.

    Args:
        device: The device.
    """
    backend = getattr(torch, device.type, None)
    return device.type == "cpu" or all(hasattr(backend, name) for name in ("Stream", "Event", "current_stream"))


def lane_to(device: torch.device) -> CpuTransfer | StreamTransfer:
    """Return the way to a device.

    Args:
        device: The device.
    """
    return CpuTransfer() if device.type == "cpu" else StreamTransfer(device)
