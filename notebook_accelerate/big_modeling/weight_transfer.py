"""Transfers weights to their device: mapped or read on the CPU, copied on a stream of its own to an accelerator."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.big_modeling import file_mapping
from notebook_accelerate.big_modeling.empty_init import like
from notebook_accelerate.big_modeling.tensor_sources import Source
from notebook_accelerate.config.plain_values import convert_bytes
from notebook_accelerate.telemetry.sampler import machine_memory

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Slot:
    """One offloaded tensor of a module.

    Attributes:
        placeholder: The tensor on the meta device that is in the module between forwards.
        source: Where the weight is read from.
    """

    placeholder: Any
    source: Source

    def as_held(self, tensor: torch.Tensor) -> Any:
        """Return a loaded tensor as its module holds it: a parameter like the placeholder, or a buffer as it is."""
        return like(self.placeholder, tensor) if isinstance(self.placeholder, torch.nn.Parameter) else tensor


@dataclass(eq=False)
class Unit:
    """The offloaded tensors of one module, loaded and released together.

    Attributes:
        slots: The tensors.
        block: Name of the repeated block that contains the module; the window is counted in blocks.
        nbytes: Their bytes.
    """

    slots: list[Slot]
    block: str
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(slot.source.nbytes for slot in self.slots)


class CpuTransfer:
    """Maps large tensors from their files, and reads the others."""

    def __init__(self) -> None:
        self._leaving: deque[Any] = deque()

    def prepare(self, order: Sequence[Unit]) -> None:
        """Do nothing: no memory is kept between reads."""

    def read(self, unit: Unit, after: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return a unit's tensors, each in new memory, and None: they are complete."""
        # Dropped in the reading thread: if no one else has these mappings, ending them takes about 20 ms per GB.
        self._leaving.clear()
        with torch.inference_mode(mode=False):  # tensors made under inference mode cannot be assigned outside of it
            tensors = [slot.source.map() if slot.source.mappable else slot.source.read() for slot in unit.slots]
            return [slot.as_held(tensor) for slot, tensor in zip(unit.slots, tensors, strict=True)], None

    def before_use(self, tensors: Sequence[torch.Tensor], done: Any) -> None:
        """Do nothing: `read` returns complete tensors."""

    def after_use(self, tensors: list[torch.Tensor]) -> None:
        """Drop a unit's tensors: mapped ones at the next `read`."""
        self._leaving.extend(tensors)


class StreamTransfer:
    """Copies from pinned memory on a stream of its own; weights on disk are read into pinned memory first.

    The tensors come from the allocator's memory of that stream, and are recorded on the stream that computes with them:
    the allocator reuses their memory after the last reference is gone, and after the computations queued until then.
    Only the staging memory is written again by this class, which never gives it to others.

    Args:
        device: The accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend: Any = getattr(torch, device.type)
        self._device = device
        self._stream: Any = None
        self._reading = threading.Lock()
        self._staging: deque[tuple[torch.Tensor, Any]] = deque()

    def prepare(self, order: Sequence[Unit]) -> None:
        """Pin the weights that are in memory, and staging memory for two of the others."""
        with self._reading:
            self._stream = self._stream or self._backend.Stream(self._device)
            sources = [slot.source for unit in order for slot in unit.slots]
            known: dict[int, torch.Tensor] = {}
            try:
                _check_room([source for source in sources if source.pinned is None])
                for source in sources:
                    source.pin(known)
            except RuntimeError as error:
                _LOG.warning("Not all offloaded weights could be pinned (%s): the others take one copy more.", error)
            self._stream.synchronize()  # copies from the staging memory that is replaced here
            self._staging.clear()

    def read(self, unit: Unit, after: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return a unit's tensors, each in new memory, and the event that ends their copies.

        Args:
            unit: The unit.
            after: Events of computations to wait for: their weights leave room for these.
        """
        for event in after:
            event.synchronize()
        with self._reading, torch.inference_mode(mode=False), self._backend.stream(self._stream):
            tensors = [slot.as_held(self._copied(slot.source)) for slot in unit.slots]
            done = self._backend.Event()
            done.record(self._stream)
        return tensors, done

    def _copied(self, source: Source) -> torch.Tensor:
        tensor = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        if source.pinned is not None:
            tensor.copy_(source.pinned, non_blocking=True)
            return tensor
        memory, copied = self._staging.popleft() if len(self._staging) == 2 else (None, None)
        if copied is not None:
            copied.synchronize()  # the last copy from this memory, which is written again now
        if memory is None or memory.numel() < source.nbytes:
            memory = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        stage = memory[: source.nbytes].view(source.dtype).view(source.shape)
        source.read_into(stage)
        tensor.copy_(stage, non_blocking=True)
        copied = self._backend.Event()
        copied.record(self._stream)
        self._staging.append((memory, copied))
        return tensor

    def before_use(self, tensors: Sequence[torch.Tensor], done: Any) -> None:
        """Let the computation wait for the copies."""
        stream = self._backend.current_stream(self._device)
        stream.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(stream)

    def after_use(self, tensors: list[torch.Tensor]) -> Any:
        """Drop a unit's tensors, and return the event that ends the computation with them."""
        tensors.clear()  # before the event: after it, the allocator can reuse what no one else has
        event = self._backend.Event()
        event.record(self._backend.current_stream(self._device))
        return event


def _check_room(sources: Sequence[Source]) -> None:
    """Check that main memory has room for what pinning adds: torch rounds each pinned tensor up to a power of two.

    Pinning a tensor that is mapped from a file frees no memory: its pages belong to the system's cache of the file.

    Raises:
        RuntimeError: Too little memory is free. The system would kill the process instead of refusing the request.
    """
    sizes = {source.address: source.nbytes for source in sources if source.nbytes and source.address is not None}
    is_mapped = file_mapping.mapped_addresses()
    added = sum((1 << (size - 1).bit_length()) - (0 if is_mapped(address) else size) for address, size in sizes.items())
    added += max(sizes.values(), default=0)
    _, available = machine_memory()
    if added > available // 2:
        raise RuntimeError(f"that takes {convert_bytes(added)} more, and {convert_bytes(available)} are free")


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
