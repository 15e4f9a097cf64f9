"""Transfers weights to their device: mapped or read on the CPU, copied on a stream of its own to an accelerator."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

from notebook_accelerate.big_modeling.arena import Unit

_LOG = logging.getLogger(__name__)


class CpuTransfer:
    """Maps large tensors from their files, and reads the others into the arena."""

    def __init__(self) -> None:
        self._mapped: dict[int, list[Any]] = {}
        self._released: deque[Any] = deque()

    def allocate(self, size: int) -> torch.Tensor:
        """Return the arena's memory; the system provides none for the parts of mapped tensors, never written.

        Args:
            size: Bytes.
        """
        return torch.empty(size, dtype=torch.uint8)

    def prepare(self, order: Sequence[Unit], arena: torch.Tensor) -> None:
        """Forget the previous plan's mappings."""
        self._mapped.clear()
        self._released.clear()

    def read(
        self, step: int, unit: Unit, tensors: Sequence[torch.Tensor], begin: int, conflicts: Sequence[int]
    ) -> None:
        """Fill a unit's tensors."""
        mapped = self._mapped[step] = []
        with torch.inference_mode(mode=False):  # tensors made under inference mode cannot be assigned outside of it
            self._unmap()
            for slot, tensor in zip(unit.slots, tensors, strict=True):
                if slot.source.mappable:
                    tensor.data = slot.source.map()
                    mapped.append(tensor)
                else:
                    slot.source.read_into(tensor)

    def _unmap(self) -> None:
        # Here, in the reading thread, and not in `after_use`: it takes about 20 ms per GB.
        while self._released:
            tensor = self._released.popleft()
            tensor.data = torch.empty(0, dtype=tensor.dtype)

    def before_use(self, step: int) -> None:
        """Do nothing: what `read` returned from is in memory."""

    def after_use(self, step: int, outer: bool) -> None:
        """Release the mappings of a step; the next `read` ends them."""
        self._released.extend(self._mapped.pop(step, ()))

    def reset(self, dropped: Collection[int]) -> None:
        """Release the mappings of steps that were read and are not used."""
        for step in dropped:
            self.after_use(step, outer=False)


class StreamTransfer:
    """Copies from pinned memory on a stream of its own; weights on disk are read into pinned memory first.

    Events order two hazards. A part of the arena is written again only after the computation with its old contents:
    the copy's stream waits for an event that the computation's stream records when a unit is released. The same part
    of the pinned memory is written again only after the copy from it: the reading thread itself waits.

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
        self._was_reset = False

    def allocate(self, size: int) -> torch.Tensor:
        """Return the arena's memory.

        Args:
            size: Bytes.
        """
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def prepare(self, order: Sequence[Unit], arena: torch.Tensor) -> None:
        """Pin the weights that are in memory, and staging memory of the arena's size for those on disk."""
        self._stream = self._stream or self._backend.Stream(self._device)
        # Whatever had the arena's memory before, and copies into the previous arena.
        self._backend.synchronize(self._device)
        # The allocator reuses the arena's memory only after the copies on this stream.
        arena.record_stream(self._stream)
        self._copied, self._used, self._last, self._was_reset = {}, {}, None, False
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
        self, step: int, unit: Unit, tensors: Sequence[torch.Tensor], begin: int, conflicts: Sequence[int]
    ) -> None:
        """Fill a unit's tensors, after the steps that it overwrites are done."""
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
            self._stream.synchronize()  # no event marks the end of the copies that were started
            raise
        self._copied[step] = self._last = done

    def _wait_for_staging(self, conflicts: Sequence[int]) -> None:
        events = [self._copied.pop(conflict, None) for conflict in conflicts]
        if self._was_reset:
            self._was_reset = False
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

    def before_use(self, step: int) -> None:
        """Let the computation wait for the copy."""
        self._backend.current_stream(self._device).wait_event(self._copied[step])

    def after_use(self, step: int, outer: bool) -> None:
        """Record how far the computation must be before this part of the arena is written again.

        Args:
            step: The step that was used.
            outer: Later steps were used meanwhile (a module around others): the next step may overwrite this one.
        """
        event = self._record_event()
        self._used[step] = event
        if outer:
            self._barriers.append(event)

    def reset(self, dropped: Collection[int]) -> None:
        """Let the next copies wait for all computation and copies so far: they overwrite other steps than planned."""
        self._barriers.append(self._record_event())
        self._was_reset = True
        self._copied.clear()
        self._used.clear()

    def _record_event(self) -> Any:
        event = self._backend.Event()
        event.record(self._backend.current_stream(self._device))
        return event


def can_prefetch(device: torch.device) -> bool:
    """Return whether weights can be transferred to a device ahead: the CPU, and accelerators with streams.

    Args:
        device: The device.
    """
    backend = getattr(torch, device.type, None)
    return device.type == "cpu" or all(hasattr(backend, name) for name in ("Stream", "Event", "current_stream"))


def transfer_to(device: torch.device) -> CpuTransfer | StreamTransfer:
    """Return the transfer to a device.

    Args:
        device: The device.
    """
    return CpuTransfer() if device.type == "cpu" else StreamTransfer(device)
