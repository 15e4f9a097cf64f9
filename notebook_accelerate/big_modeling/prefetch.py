"""Offloaded weights are read ahead of the computation, into a few buffers that are used again and again.

The first pass through a model notes the order in which its modules ask for their weights. From that order every
module gets a fixed place in one arena of limited size, ring-wise, so that the parameters made once on these places
serve every later pass: no allocation per tensor and forward. A thread reads ahead as far as places are free. Two passes
in another order make a new plan; what is not where it should be meanwhile is read for itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from notebook_accelerate.big_modeling.arena import Slot, Unit, places, window_bytes
from notebook_accelerate.big_modeling.empty_init import like
from notebook_accelerate.big_modeling.weight_transfer import lane_to
from notebook_accelerate.collectives import recursively_apply

WINDOW = 2
"""How many of the largest blocks the arena holds: one computes while the next is read."""
_IDLE = 0.25
"""Seconds after which the thread ends when there is nothing to read; the next forward starts another."""


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
        self._lane = lane_to(device)
        self._seen: list[Unit] = []
        self._last: list[Unit] = []
        self._bounded = False
        self._plan: _Plan | None = None
        self._arena: torch.Tensor | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: it makes its own plan."""
        return {"device": self.device, "window": self.window}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _clear(self) -> None:
        self._next_use = self._next_read = 0
        self._reading: int | None = None
        self._failure: BaseException | None = None
        self._taken: set[int] = set()
        self._ready: set[int] = set()
        self._in_use: dict[int, list[int]] = {}

    # ---- what hooks call

    def begin(self) -> None:
        """Note that a pass through the model begins."""
        self._bounded = True
        with self._changed:
            if self._in_use:  # after an error in the last forward: its units were never given back
                self._taken -= self._numbers_in_use()
                self._in_use.clear()
                self._lane.jump()
        self._end_pass()
        if self._plan is not None:
            with self._changed:
                if late := self._next_use % len(self._plan.order):
                    self._seek(self._next_use + len(self._plan.order) - late)

    def bring(self, unit: Unit) -> list[Any]:
        """Return a unit's tensors on the device, ready to compute with; wait for them where they are not there yet."""
        if torch.is_grad_enabled():
            return self.fresh(unit)  # autograd keeps what it computes with: buffers must not change under it
        if not self._bounded and len(self._seen) > 1 and unit is self._seen[0]:
            self._end_pass()  # without a model's own hook a pass ends where its first unit comes again
        self._seen.append(unit)
        plan = self._plan
        if plan is None:
            return self.fresh(unit)
        with self._changed:
            position = self._position(unit)
            number = None if position is None else self._wait_for(position)
        if number is None:
            return self.fresh(unit)
        self._lane.before_use(number)
        return plan.parameters[number % len(plan.order)]

    def own(self, output: Any) -> Any:
        """Return a module's output in memory of its own, where it is a weight itself or a view of one.

        Args:
            output: What the module gave; tensors in tuples, lists and dictionaries count.
        """
        if self._arena is None:
            return output
        address = self._arena.untyped_storage().data_ptr()

        def cloned(tensor: torch.Tensor) -> torch.Tensor:
            shared = tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() == address
            return tensor.clone() if shared else tensor

        return cloned(output) if isinstance(output, torch.Tensor) else recursively_apply(cloned, output)

    def give_back(self, unit: Unit) -> None:
        """Let the place of a unit be used for others."""
        with self._changed:
            numbers = self._in_use.get(id(unit))
            if not numbers:
                return
            number = numbers.pop()
            if not numbers:
                del self._in_use[id(unit)]
            self._lane.after_use(number, around=number + 1 < self._next_use)
            self._taken.discard(number)
            self._changed.notify_all()
        self._start()

    def fresh(self, unit: Unit) -> list[Any]:
        """Return a unit's tensors in memory that nothing else is read into.

        Args:
            unit: The unit.
        """
        return _in_modules(unit, [slot.source.load(self.device) for slot in unit.slots])

    # ---- the order

    def _end_pass(self) -> None:
        """Plan the first order that was seen, and any other one that was seen twice."""
        order, self._seen = self._seen, []
        if order:
            if self._plan is None or (order == self._last and order != self._plan.order):
                self._make_plan(order)
            self._last = order

    def _make_plan(self, order: list[Unit]) -> None:
        self._stop()
        size = window_bytes(order, self.window)
        offsets, conflicts = places(order, size)
        with torch.inference_mode(mode=False):  # these tensors are written again outside of it
            arena = self._lane.reserve(size)
            self._lane.prepare(order, arena)
            tensors = [unit.views(arena, offset) for unit, offset in zip(order, offsets, strict=True)]
            parameters = [_in_modules(unit, views) for unit, views in zip(order, tensors, strict=True)]
        self._arena = arena
        self._plan = _Plan(order, offsets, conflicts, tensors, parameters)
        with self._changed:
            self._clear()
        self._start()

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
        self._lane.jump()
        self._taken, self._ready = self._numbers_in_use(), set()
        self._next_use = self._next_read = number
        self._changed.notify_all()

    def _numbers_in_use(self) -> set[int]:
        return {number for numbers in self._in_use.values() for number in numbers}

    def _wait_for(self, number: int) -> int | None:
        """Wait until a number is read; None where its place is in use by what is around it."""
        assert self._plan is not None
        unit = self._plan.order[number % len(self._plan.order)]
        self._next_use = number + 1
        if number not in self._ready and number != self._reading:
            if self._next_read <= number and self._blocked(number):
                self._next_read = number + 1
                return None
            if self._reading is None and self._next_read == number and self._can_read():
                self._read_here()
            else:
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
        thread = self._thread  # which takes itself away when it ends
        if thread is None or not thread.is_alive():
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
                plan, number = self._claim()
            failure = self._read(plan, number)
            with self._changed:
                self._settle(number, failure)

    def _claim(self) -> tuple[_Plan, int]:
        """Take the next number to be read."""
        assert self._plan is not None
        number = self._reading = self._next_read
        self._next_read += 1
        self._taken.add(number)
        return self._plan, number

    def _settle(self, number: int, failure: BaseException | None) -> None:
        """Note that a number was read, or could not be."""
        self._reading = None
        if failure is None:
            self._ready.add(number)
            self.reads_ahead += 1
        else:
            self._failure = failure
            self._taken.discard(number)
            self._next_read = number
        self._changed.notify_all()

    def _read_here(self) -> None:
        """Read the next number in this thread, where the other has not come to it: the machine is busy."""
        plan, number = self._claim()
        self._changed.release()
        try:
            failure = self._read(plan, number)
        finally:
            self._changed.acquire()
        self._settle(number, failure)

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


def _in_modules(unit: Unit, tensors: list[torch.Tensor]) -> list[Any]:
    """Return what stands in the module for each tensor: a parameter like the one that is away, or the tensor."""
    return [
        like(slot.absent, tensor) if isinstance(slot.absent, torch.nn.Parameter) else tensor
        for slot, tensor in zip(unit.slots, tensors, strict=True)
    ]


__all__ = ["Prefetcher", "Slot", "Unit"]
