"""Offloaded weights are read ahead of the computation, into a few buffers that are used again and again.

The first pass through a model notes the order in which its modules ask for their weights. From that order every
module gets a fixed place in one arena of limited size, ring-wise, so that the parameters made once on these places
serve every later pass: no allocation per tensor and forward. A thread reads ahead as far as places are free.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.big_modeling.empty import like
from notebook_accelerate.big_modeling.sources import Source

WINDOW = 2
"""How many of the largest blocks the arena holds: one computes while the next is read."""
_ALIGNMENT = 256
"""Bytes: what CUDA copies and CPU vector instructions like; allocators give no less, so kernels choose alike."""
_IDLE = 0.25
"""Seconds after which the thread ends when there is nothing to read; the next forward starts another."""


@dataclass
class Slot:
    """One tensor of a module that comes and goes.

    Attributes:
        held: The dictionary of the module that it is in.
        key: Its name there.
        absent: What is there while it is away, on the meta device.
        source: Where it is read from.
    """

    held: dict[str, Any]
    key: str
    absent: Any
    source: Source


@dataclass
class Unit:
    """The tensors of one module that come and go together.

    Attributes:
        slots: The tensors.
        block: Name of the block it belongs to: blocks measure the window.
        nbytes: Bytes in the arena.
    """

    slots: list[Slot]
    block: str
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(_aligned(slot.source.nbytes) for slot in self.slots)


@dataclass
class _Plan:
    """Where each position of a pass is in the arena, and what must be released before it can be read."""

    order: list[Unit]
    offsets: list[int]
    conflicts: list[tuple[int, ...]]
    tensors: list[list[torch.Tensor]]
    parameters: list[list[Any]]

    def range(self, number: int) -> tuple[int, int]:
        """Return where a number's place begins and ends."""
        position = number % len(self.order)
        return self.offsets[position], self.offsets[position] + self.order[position].nbytes


class Prefetcher:
    """Reads the weights of units ahead, in the order of the last pass.

    Args:
        device: Where the weights are computed with.
        window: Size of the arena, in largest blocks.
    """

    def __init__(self, device: torch.device, window: int = WINDOW) -> None:
        self.device, self.window = device, window
        self.reads_ahead = self.waits = 0
        self._lane = _lane(device)
        self._units: list[Unit] = []
        self._seen: list[Unit] = []
        self._bounded = self._stale = False
        self._plan: _Plan | None = None
        self._arena: torch.Tensor | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._clear()

    def _clear(self) -> None:
        self._next_use = self._next_read = 0
        self._reading: int | None = None
        self._failure: BaseException | None = None
        self._taken: set[int] = set()
        self._ready: set[int] = set()
        self._in_use: dict[int, list[int]] = {}

    # ---- what hooks call

    def add(self, unit: Unit) -> None:
        """Take a unit in."""
        self._units.append(unit)

    def begin(self) -> None:
        """Note that a pass through the model begins."""
        self._bounded = True
        with self._changed:
            # After an error in the last forward some units were never given back.
            self._taken -= {number for numbers in self._in_use.values() for number in numbers}
            self._in_use.clear()
        if self._plan is not None and not self._stale:
            with self._changed:
                if late := self._next_use % len(self._plan.order):
                    self._seek(self._next_use + len(self._plan.order) - late)
            return
        if self._seen:
            self._make_plan()

    def bring(self, unit: Unit) -> list[Any]:
        """Return a unit's tensors on the device, ready to compute with; wait for them where they are not there yet."""
        if torch.is_grad_enabled():
            return self.fresh(unit)  # autograd keeps what it computes with: buffers must not change under it
        if self._plan is None or self._stale:
            self._note(unit)
        if self._plan is None or self._stale:
            return self.fresh(unit)
        with self._changed:
            position = self._position(unit)
            if position is None:
                self._stale, self._seen = True, []
                return self.fresh(unit)
            number = self._wait_for(position)
        if number is None:
            return self.fresh(unit)
        self._lane.before_use(number)
        return self._plan.parameters[number % len(self._plan.order)]

    def give_back(self, unit: Unit) -> None:
        """Let the place of a unit be used for others."""
        with self._changed:
            numbers = self._in_use.get(id(unit))
            if not numbers:
                return
            number = numbers.pop()
            self._lane.after_use(number, around=number + 1 < self._next_use)
            self._taken.discard(number)
            self._changed.notify_all()
        self._start()

    def fresh(self, unit: Unit) -> list[Any]:
        """Return a unit's tensors in memory of their own."""
        return [
            like(slot.absent, slot.source.load(self.device))
            if isinstance(slot.absent, torch.nn.Parameter)
            else slot.source.load(self.device)
            for slot in unit.slots
        ]

    # ---- the order

    def _note(self, unit: Unit) -> None:
        """Note who asks; without a model's own hook a pass ends where its first unit comes again."""
        if not self._bounded and len(self._seen) > 1 and unit is self._seen[0]:
            self._make_plan()
            return
        self._seen.append(unit)

    def _make_plan(self) -> None:
        order, self._seen = self._seen, []
        self._stop()
        size = max(self._block_bytes(order) * self.window, *(unit.nbytes for unit in order))
        offsets, conflicts = _places(order, size)
        if self._arena is None or self._arena.numel() < size:
            self._arena = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._lane.prepare(order, size)
        tensors = [_views(self._arena, unit, offset) for unit, offset in zip(order, offsets, strict=True)]
        parameters = [
            [
                like(slot.absent, view) if isinstance(slot.absent, torch.nn.Parameter) else view
                for slot, view in zip(unit.slots, views, strict=True)
            ]
            for unit, views in zip(order, tensors, strict=True)
        ]
        self._plan = _Plan(order, offsets, conflicts, tensors, parameters)
        self._stale = False
        with self._changed:
            self._clear()
        self._start()

    @staticmethod
    def _block_bytes(order: Sequence[Unit]) -> int:
        blocks: dict[str, int] = {}
        for unit in {id(unit): unit for unit in order}.values():
            blocks[unit.block] = blocks.get(unit.block, 0) + unit.nbytes
        return max(blocks.values())

    def _position(self, unit: Unit) -> int | None:
        """Return the number under which a unit comes next; None where it is not in the order."""
        assert self._plan is not None
        order, begin = self._plan.order, self._next_use
        for number in range(begin, begin + len(order)):
            if order[number % len(order)] is unit:
                if number != begin:
                    self._seek(number)
                return number
        return None

    def _seek(self, number: int) -> None:
        """Go on from another place: what was read ahead and is not asked for is dropped."""
        while self._reading is not None:
            self._changed.wait()
        kept = {number for numbers in self._in_use.values() for number in numbers}
        for dropped in self._taken - kept:
            self._lane.after_use(dropped, around=True)
        self._taken, self._ready = kept, set()
        self._next_use = self._next_read = number
        self._changed.notify_all()

    def _wait_for(self, number: int) -> int | None:
        """Wait until a number is read; None where its place is in use by what is around it."""
        assert self._plan is not None
        unit = self._plan.order[number % len(self._plan.order)]
        self._next_use = number + 1
        if number not in self._ready and number != self._reading:
            if self._next_read <= number and self._blocked(number):
                self._next_read = number + 1
                return None
            self._changed.notify_all()
            self._start()
        if number not in self._ready:
            self.waits += 1
        while number not in self._ready:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            self._changed.wait(1.0)
            self._start()
        self._ready.discard(number)
        self._in_use.setdefault(id(unit), []).append(number)
        return number

    def _blocked(self, number: int) -> bool:
        """Tell whether a place is in use: by a module that computes around others, for the whole of their time."""
        plan = self._plan
        assert plan is not None
        begin, end = plan.range(number)
        ranges = (plan.range(other) for numbers in self._in_use.values() for other in numbers)
        return any(first < end and begin < last for first, last in ranges)

    # ---- the thread

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read_ahead, name="weights-ahead", daemon=True)
            self._thread.start()

    def _stop(self) -> None:
        """Wait until the thread does not read any more; it ends by itself."""
        with self._changed:
            self._plan = None
            while self._reading is not None:
                self._changed.wait()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(self._can_read, timeout=_IDLE):
                    self._thread = None
                    return
                assert self._plan is not None
                plan, number = self._plan, self._next_read
                self._reading = number
                self._next_read += 1
                self._taken.add(number)
            failure = self._read(plan, number)
            with self._changed:
                self._reading = None
                if failure is None:
                    self._ready.add(number)
                    self.reads_ahead += 1
                else:
                    self._failure = failure
                    self._taken.discard(number)
                    self._next_read = number
                self._changed.notify_all()

    def _can_read(self) -> bool:
        plan = self._plan
        if plan is None or self._failure is not None or self._next_read >= self._next_use + len(plan.order):
            return False
        position = self._next_read % len(plan.order)
        if any(self._next_read - back in self._taken for back in plan.conflicts[position]):
            return False
        return not self._blocked(self._next_read)

    def _read(self, plan: _Plan, number: int) -> BaseException | None:
        position = number % len(plan.order)
        try:
            conflicts = [number - back for back in plan.conflicts[position]]
            unit, offset = plan.order[position], plan.offsets[position]
            self._lane.read(number, unit, plan.tensors[position], offset, conflicts)
        except BaseException as failure:  # noqa: BLE001 - it is raised where the weights are waited for
            return failure
        return None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(arena: torch.Tensor, unit: Unit, offset: int) -> list[torch.Tensor]:
    """Return the tensors of a unit at its place in the arena."""
    views = []
    for slot in unit.slots:
        part = arena[offset : offset + slot.source.nbytes]
        views.append(part.view(slot.source.dtype).view(slot.source.shape))
        offset += _aligned(slot.source.nbytes)
    return views


def _places(order: Sequence[Unit], size: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Give each position of a pass its place; every pass starts at the beginning of the arena.

    Returns:
        Offsets, and how many positions back those are that were in the same place.
    """
    offsets, end = [], 0
    for unit in order:
        if end + unit.nbytes > size:
            end = 0
        offsets.append(end)
        end += unit.nbytes
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


class _CpuLane:
    """Reads straight into the arena."""

    def prepare(self, order: Sequence[Unit], size: int) -> None:
        """Nothing to prepare."""

    def read(
        self, number: int, unit: Unit, tensors: Sequence[torch.Tensor], offset: int, conflicts: Sequence[int]
    ) -> None:
        """Fill a unit's tensors."""
        for slot, tensor in zip(unit.slots, tensors, strict=True):
            slot.source.read_into(tensor)

    def before_use(self, number: int) -> None:
        """Nothing to wait for."""

    def after_use(self, number: int, around: bool) -> None:
        """Nothing to note."""


class _StreamLane:
    """Copies from pinned memory on a stream of its own; what is on disk is read into pinned memory first."""

    def __init__(self, device: torch.device) -> None:
        self._backend: Any = getattr(torch, device.type)
        self._device = device
        self._stream: Any = None
        self._pinned: torch.Tensor | None = None
        self._copied: dict[int, Any] = {}
        self._used: dict[int, Any] = {}
        self._barriers: list[Any] = []

    def prepare(self, order: Sequence[Unit], size: int) -> None:
        """Pin the weights that are in memory, and as much memory as the arena has for those that are not."""
        self._stream = self._stream or self._backend.Stream(self._device)
        self._backend.synchronize(self._device)
        self._copied, self._used, self._barriers = {}, {}, []
        sources = [slot.source for unit in order for slot in unit.slots]
        for source in sources:
            source.pin()
        if any(source.pinned is None for source in sources):
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def read(
        self, number: int, unit: Unit, tensors: Sequence[torch.Tensor], offset: int, conflicts: Sequence[int]
    ) -> None:
        """Fill a unit's tensors, after those who used their place are done."""
        staged: list[torch.Tensor] = []
        for conflict in conflicts:
            if (event := self._copied.pop(conflict, None)) is not None:
                event.synchronize()  # the pinned memory at this place has been copied from
        if self._pinned is not None:
            staged = _views(self._pinned, unit, offset)
        with self._backend.stream(self._stream):
            barriers, self._barriers = self._barriers, []
            for event in [*barriers, *(self._used.pop(conflict, None) for conflict in conflicts)]:
                if event is not None:
                    self._stream.wait_event(event)
            for index, (slot, tensor) in enumerate(zip(unit.slots, tensors, strict=True)):
                source = slot.source.pinned
                if source is None:
                    slot.source.read_into(staged[index])
                    source = staged[index]
                tensor.data.copy_(source, non_blocking=True)
            done = self._backend.Event()
            done.record(self._stream)
        self._copied[number] = done

    def before_use(self, number: int) -> None:
        """Let the computation wait for the copy."""
        self._backend.current_stream(self._device).wait_event(self._copied[number])

    def after_use(self, number: int, around: bool) -> None:
        """Note how far the computation must be before the place is written again.

        Args:
            number: What was used.
            around: It was in use while others came and went: whoever comes next may be in its place.
        """
        event = self._backend.Event()
        event.record(self._backend.current_stream(self._device))
        self._used[number] = event
        if around:
            self._barriers.append(event)


def _lane(device: torch.device) -> Any:
    return _CpuLane() if device.type == "cpu" else _StreamLane(device)


__all__ = ["Prefetcher", "Slot", "Unit"]
