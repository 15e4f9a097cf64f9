"""Read offloaded weights before the computation needs them.

The first pass through a model records the order of its modules. A thread then reads their weights ahead in this order,
while all weights that have been read or are in use fit into a window. After two passes in a different order, a new
plan is made. Until then, modules themselves read the weights that were not read ahead.

Users can keep a weight, or anything that shares its memory (a view, an array, a graph), for any length of time:

- Each read allocates or maps new memory, and is complete before `fetch` can take its tensors from `_ready`.
- `fetch` uses the tensors of a step once, and only for the unit that they were read for.
- Afterwards, nothing in this package writes to them: `release` drops references, and memory is never filled twice.

Therefore, only the code that holds a weight can change its memory. Only torch's allocator reuses the memory, once the
last reference to the storage is gone and, on an accelerator, the computations queued with it are complete.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.big_modeling.empty_init import like
from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.files import tensor_sources
from notebook_accelerate.files.tensor_sources import TensorSource
from notebook_accelerate.hardware.detection import machine_memory

_LOG = logging.getLogger(__name__)

_WINDOW = 2
"""The number of blocks of the largest size that fit into the window. One block computes while the next one is read."""
_IDLE = 0.25
"""The number of idle seconds after which the reading thread exits. The next forward pass starts a new thread."""
_EXIT_SECONDS = 2.0
"""The maximum number of seconds that the exiting interpreter waits for a read to complete."""


@dataclass
class _Read:
    """The tensors for a step, the event after their transfer, and the versions of their sources."""

    unit: Unit
    tensors: list[Any]
    done: Any
    versions: list[Any]

    def is_current(self) -> bool:
        """Return whether the sources are still the same as when they were read."""
        return self.versions == _versions(self.unit)


class Prefetcher:
    """Reads the weights of units ahead, in the order of an earlier pass.

    Steps count the uses of units across passes. A step modulo the length of a pass is a position in the pass's order.

    Args:
        device: The device that computes with the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begin()

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[torch.device]]:
        """Only copy the device, because the copy makes its own plan."""
        return Prefetcher, (self.device,)

    def _begin(self) -> None:
        self.reads_ahead = self.waits = 0
        self._process = os.getpid()
        self._transfer = transfer_to(self.device)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._exiting = False
        self._order: list[Unit] = []
        self._last_order: list[Unit] = []
        self._passes_are_marked = False
        self._plan: list[Unit] = []
        self._window = 0
        self._next_use = self._next_read = 0
        self._reading: int | None = None
        self._ready: dict[int, _Read] = {}
        self._in_use: list[Unit] = []
        self._leaving: deque[tuple[Any, int]] = deque()
        self._held = 0  # The bytes that are being read, are ready, or are in use.

    # ---- the methods that hooks call

    def begin_pass(self) -> None:
        """Mark the start of a pass through the model."""
        self._check_process()
        self._passes_are_marked = True
        with self._changed:
            self._held -= sum(unit.nbytes for unit in self._in_use)  # An error in the last pass left these in use.
            self._in_use.clear()
            self._end_pass()
            if self._plan and (late := self._next_use % len(self._plan)):
                self._seek(self._next_use + len(self._plan) - late)

    def fetch(self, unit: Unit) -> list[Any]:
        """Wait until a unit's tensors have been read, and return them on the device, ready for the computation."""
        if torch.is_grad_enabled():
            return self._load(unit)  # Autograd keeps all weights, so a window could not limit the memory.
        self._check_process()
        with self._changed:
            step = self._record(unit)
            read = None if step is None else self._take(step)
            after = self._make_room(unit) if read is None and step is not None else ()
        if step is None:
            return self._load(unit)
        try:
            read = read or self._read(unit, after)
            self._transfer.before_use(read.tensors, read.done)
        except BaseException:
            with self._changed:
                self._held -= unit.nbytes
            raise
        with self._changed:
            self._in_use.append(unit)
        return read.tensors

    def release(self, unit: Unit, tensors: list[Any]) -> None:
        """Drop the tensors of a unit to make room for other units.

        Args:
            unit: The unit whose forward pass is complete.
            tensors: The tensors that `fetch` returned. The list is emptied.
        """
        self._check_process()
        with self._changed:
            if unit not in self._in_use:
                return
            self._in_use.remove(unit)
            self._held -= unit.nbytes
            ends = self._transfer.after_use(tensors)
            if ends is not None:
                self._leaving.append((ends, unit.nbytes))
            self._changed.notify_all()
        self._start_thread()

    def _load(self, unit: Unit) -> list[Any]:
        """Read a unit's tensors now, and return them.

        On the CPU, the computation reads mapped files as it needs them.
        """
        with torch.inference_mode(mode=False):
            return [slot.as_held(slot.source.load(self.device)) for slot in unit.slots]

    def _check_process(self) -> None:
        """Start over in a forked process, which has no reading thread, and may have been forked during a read."""
        if self._process != os.getpid():
            self._begin()

    # ---- the order

    def _record(self, unit: Unit) -> int | None:
        """Add a unit to the order of this pass, and return its step, or None if it is not in the plan."""
        if not self._passes_are_marked and len(self._order) > 1 and unit is self._order[0]:
            self._end_pass()  # Without a hook on the model, a pass ends when its first unit is used again.
        self._order.append(unit)
        order, begin = self._plan, self._next_use
        for step in range(begin, begin + len(order)):
            if order[step % len(order)] is unit:
                if step != begin:
                    self._seek(step)
                return step
        return None

    def _end_pass(self) -> None:
        """Make a plan for the first recorded order, and for another order once it has been recorded twice in a row."""
        order, self._order = self._order, []
        if order:
            if not self._plan or (order == self._last_order and order != self._plan):
                self._make_plan(order)
            self._last_order = order

    def _make_plan(self, order: list[Unit]) -> None:
        self._transfer.prepare(order)
        step = self._next_use + len(self._plan) + 1  # This step follows every step of the previous plan.
        self._seek(step + -step % len(order))
        self._plan, self._window = order, _window_bytes(order)
        self._start_thread()

    def _seek(self, step: int) -> None:
        """Continue from a later step, and drop weights that were read ahead but are no longer needed."""
        for other in [other for other in self._ready if other < step]:
            self._held -= self._ready.pop(other).unit.nbytes
        self._next_use, self._next_read = step, max(step, self._next_read)
        self._changed.notify_all()

    def _take(self, step: int) -> _Read | None:
        """Return the weights that were read ahead for a step, or None if they must be read now."""
        self._next_use = step + 1
        self._next_read = max(self._next_read, self._next_use)
        if step == self._reading:
            self.waits += 1
            self._changed.wait_for(lambda: step != self._reading)
        read = self._ready.pop(step, None)
        if read is not None and not read.is_current():
            self._held -= read.unit.nbytes
            return None
        return read

    def _make_room(self, unit: Unit) -> list[Any]:
        """Count a unit's bytes as held, and return the events after which the device has room for it."""
        self._held += unit.nbytes
        leaving, events = sum(nbytes for _, nbytes in self._leaving), []
        while self._leaving and self._held + leaving > self._window:
            event, nbytes = self._leaving.popleft()
            leaving -= nbytes
            events.append(event)
        return events

    # ---- the thread

    def _start_thread(self) -> None:
        thread = self._thread  # The thread sets this to None when it exits.
        if thread is None or not thread.is_alive():
            self._thread = threading.Thread(target=self._read_ahead, name="weights-ahead", daemon=True)
            self._thread.start()
            _prefetchers.add(self)

    def end_thread(self) -> None:
        """Stop the reading thread. This is called when the interpreter exits."""
        with self._changed:
            self._exiting = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_EXIT_SECONDS)

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._exiting or self._can_read(), timeout=_IDLE)
                if self._exiting or not self._can_read():
                    self._thread = None
                    return
                step = self._reading = self._next_read
                self._next_read += 1
                unit = self._plan[step % len(self._plan)]
                after = self._make_room(unit)
            try:
                read = self._read(unit, after)
            except BaseException:  # noqa: BLE001 - it is raised again when the computation reads the unit itself
                read = None
            self._finish_read(step, unit, read)

    def _can_read(self) -> bool:
        if not self._plan or self._next_read >= self._next_use + len(self._plan):
            return False
        return self._held + self._plan[self._next_read % len(self._plan)].nbytes <= self._window

    def _read(self, unit: Unit, after: Sequence[Any]) -> _Read:
        versions = _versions(unit)  # Get these before reading, so that later changes make the read stale.
        tensors, done = self._transfer.read(unit, after)
        return _Read(unit, tensors, done, versions)

    def _finish_read(self, step: int, unit: Unit, read: _Read | None) -> None:
        """Make the weights available to `fetch`, unless reading failed or the computation no longer needs them."""
        with self._changed:
            self._reading = None
            if read is None or step < self._next_use - 1:
                self._held -= unit.nbytes
            else:
                self._ready[step] = read
                self.reads_ahead += 1
            self._changed.notify_all()


def _versions(unit: Unit) -> list[Any]:
    return [slot.source.version() for slot in unit.slots]


def _window_bytes(order: Sequence[Unit]) -> int:
    """Return the size of the window: `_WINDOW` times the largest block, but at least the largest unit."""
    sizes: dict[str, int] = {}
    for unit in {id(unit): unit for unit in order}.values():
        sizes[unit.block] = sizes.get(unit.block, 0) + unit.nbytes
    return max(max(sizes.values()) * _WINDOW, *(unit.nbytes for unit in order))


_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Stop the reading threads. The process would crash if one were inside torch when the interpreter exits."""
    for prefetcher in list(_prefetchers):
        prefetcher.end_thread()


# ---- transfers. On the CPU, weights are mapped or read. For an accelerator, they are copied on a separate stream.


@dataclass(eq=False)
class Slot:
    """An offloaded tensor of a module.

    Attributes:
        placeholder: The tensor on the meta device that the module has between forward passes.
        source: The source of the weight.
    """

    placeholder: Any
    source: TensorSource

    def as_held(self, tensor: torch.Tensor) -> Any:
        """Return a loaded tensor in the form that its module expects: a parameter like the placeholder, or a buffer."""
        return like(self.placeholder, tensor) if isinstance(self.placeholder, torch.nn.Parameter) else tensor


@dataclass(eq=False)
class Unit:
    """The offloaded tensors of one module, which are loaded and released together.

    Attributes:
        slots: A slot for each tensor.
        block: The name of the repeated block that contains the module. The window is counted in blocks.
        nbytes: The size of the tensors in bytes.
    """

    slots: list[Slot]
    block: str
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(slot.source.nbytes for slot in self.slots)


class CpuTransfer:
    """Maps large tensors from their files, and reads all others."""

    def __init__(self) -> None:
        self._leaving: deque[Any] = deque()

    def prepare(self, order: Sequence[Unit]) -> None:
        """Do nothing, because no memory is kept between reads."""

    def read(self, unit: Unit, after: Sequence[Any]) -> tuple[list[Any], Any]:
        """Map or read a unit's tensors. Return them, and None because there is no pending copy to wait for."""
        # Drop these in the reading thread: if nothing else refers to their mappings, unmapping takes about 20 ms per
        # GB.
        self._leaving.clear()
        with torch.inference_mode(mode=False):  # Inference tensors cannot be assigned outside of inference mode.
            tensors = [slot.source.map() if slot.source.mappable else slot.source.read() for slot in unit.slots]
            return [slot.as_held(tensor) for slot, tensor in zip(unit.slots, tensors, strict=True)], None

    def before_use(self, tensors: Sequence[torch.Tensor], done: Any) -> None:
        """Do nothing, because `read` returns complete tensors."""

    def after_use(self, tensors: list[torch.Tensor]) -> None:
        """Keep a unit's tensors until the next `read`, which drops them in the reading thread."""
        self._leaving.extend(tensors)


class StreamTransfer:
    """Copies weights from pinned memory on a separate stream. Weights on disk are first read into pinned memory.

    The tensors are allocated on that stream, and recorded on the stream that computes with them. The allocator
    therefore reuses their memory only after the last reference is gone and the computations queued until then are
    complete. The class itself only reuses the staging memory, which it never hands out.

    Args:
        device: The accelerator to copy to.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend: Any = getattr(torch, device.type)
        self._device = device
        self._stream: Any = None
        self._reading = threading.Lock()
        self._staging: deque[tuple[torch.Tensor, Any]] = deque()

    def prepare(self, order: Sequence[Unit]) -> None:
        """Pin the weights that are in memory. Staging memory for the other weights is allocated when they are read."""
        with self._reading:
            self._stream = self._stream or self._backend.Stream(self._device)
            sources = [slot.source for unit in order for slot in unit.slots]
            known: dict[int, torch.Tensor] = {}
            try:
                _check_room([source for source in sources if source.pinned is None])
                for source in sources:
                    source.pin(known)
            except RuntimeError as error:
                _LOG.warning("Not all offloaded weights could be pinned (%s): the others take another copy.", error)
            self._stream.synchronize()  # Wait for copies from the staging memory that is replaced here.
            self._staging.clear()

    def read(self, unit: Unit, after: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return a unit's tensors, each in new memory, and an event that follows the copies.

        Args:
            unit: The unit whose tensors are read.
            after: The events of the computations to wait for. The weights that they use make room for these tensors.
        """
        for event in after:
            event.synchronize()
        with self._reading, torch.inference_mode(mode=False), self._backend.stream(self._stream):
            tensors = [slot.as_held(self._copied(slot.source)) for slot in unit.slots]
            done = self._backend.Event()
            done.record(self._stream)
        return tensors, done

    def _copied(self, source: TensorSource) -> torch.Tensor:
        tensor = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        if source.pinned is not None:
            tensor.copy_(source.pinned, non_blocking=True)
            return tensor
        memory, copied = self._staging.popleft() if len(self._staging) == 2 else (None, None)
        if copied is not None:
            copied.synchronize()  # Wait for the last copy out of this memory before it is overwritten.
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
        """Make the computation wait until the copies are complete."""
        stream = self._backend.current_stream(self._device)
        stream.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(stream)

    def after_use(self, tensors: list[torch.Tensor]) -> Any:
        """Drop a unit's tensors, and return an event after the computation that uses them."""
        tensors.clear()  # Clear the list before the event, after which the allocator can reuse the memory.
        event = self._backend.Event()
        event.record(self._backend.current_stream(self._device))
        return event


def _check_room(sources: Sequence[TensorSource]) -> None:
    """Check that CPU memory has room for pinned tensors, whose sizes torch rounds up to a power of two.

    Pinning a tensor that is mapped from a file frees no memory, because the file's pages belong to the page cache.

    Raises:
        RuntimeError: Too little memory is free. Without this check, the system might kill the process instead of
            rejecting the request.
    """
    sizes = {source.address: source.nbytes for source in sources if source.nbytes and source.address is not None}
    is_mapped = tensor_sources.mapped_addresses()
    added = sum((1 << (size - 1).bit_length()) - (0 if is_mapped(address) else size) for address, size in sizes.items())
    added += max(sizes.values(), default=0)
    _, available = machine_memory()
    if added > available // 2:
        raise RuntimeError(
            f"pinning them takes {size_text(added)} more, but at most half of the {size_text(available)} of "
            "free memory may be used"
        )


def can_prefetch(device: torch.device) -> bool:
    """Return whether weights can be transferred to a device ahead of time, as to the CPU or if the device has streams.

    Args:
        device: The device to check.
    """
    backend = getattr(torch, device.type, None)
    return device.type == "cpu" or all(hasattr(backend, name) for name in ("Stream", "Event", "current_stream"))


def transfer_to(device: torch.device) -> CpuTransfer | StreamTransfer:
    """Return a new transfer for a device.

    Args:
        device: The device to transfer weights to.
    """
    return CpuTransfer() if device.type == "cpu" else StreamTransfer(device)
