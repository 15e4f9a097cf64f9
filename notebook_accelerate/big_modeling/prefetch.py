"""Reads offloaded weights ahead of the computation, into an arena of limited size.

The first pass through a model records the order in which its modules need their weights. From that order every module
gets a fixed place in the arena, which is used as a ring, so that the parameters made once serve every later pass: no
allocation per tensor and forward. A thread reads ahead as far as places are free. Two passes in another order make a
new plan; until then, what is not in the arena in time is read separately.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from notebook_accelerate.big_modeling.arena import Unit, arena_bytes, assign_offsets
from notebook_accelerate.big_modeling.empty_init import like
from notebook_accelerate.big_modeling.weight_transfer import transfer_to
from notebook_accelerate.collectives import recursively_apply

_WINDOW = 2
"""How many of the largest blocks the arena holds: one computes while the next is read."""
_IDLE = 0.25
"""Seconds without anything to read after which the thread ends; the next forward starts another."""


@dataclass
class _Plan:
    """Where each position of a pass is in the arena, and which steps back must be released before it is read."""

    order: list[Unit]
    offsets: list[int]
    conflicts: list[tuple[int, ...]]
    parameters: list[list[Any]]

    def range(self, step: int) -> tuple[int, int]:
        """Return the begin and end of a step in the arena."""
        position = step % len(self.order)
        return self.offsets[position], self.offsets[position] + self.order[position].nbytes


class Prefetcher:
    """Reads the weights of units ahead, in the order of the last pass.

    A step counts the uses of units over all passes: step modulo the length of a pass is a position in its order.

    Args:
        device: Where the weights are computed with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reads_ahead = self.waits = 0
        self._transfer = transfer_to(device)
        self._order: list[Unit] = []
        self._last_order: list[Unit] = []
        self._passes_are_marked = False
        self._plan: _Plan | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._clear()

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[torch.device]]:
        """Copy only the device: the copy makes its own plan."""
        return Prefetcher, (self.device,)

    def _clear(self) -> None:
        self._next_use = self._next_read = 0
        self._reading: int | None = None
        self._seeking = False
        self._failure: BaseException | None = None
        self._occupied: set[int] = set()
        self._ready: set[int] = set()
        self._in_use: dict[int, list[int]] = {}

    # ---- what hooks call

    def begin_pass(self) -> None:
        """Mark the begin of a pass through the model."""
        self._passes_are_marked = True
        with self._changed:
            if self._in_use:  # after an error in the last forward: its units were never released
                self._occupied -= self._steps_in_use()
                self._in_use.clear()
                self._transfer.reset(())
        self._end_pass()
        if self._plan is not None:
            with self._changed:
                if late := self._next_use % len(self._plan.order):
                    self._seek(self._next_use + len(self._plan.order) - late)

    def fetch(self, unit: Unit) -> list[Any]:
        """Return a unit's tensors on the device, ready to compute with; wait until they are read."""
        if torch.is_grad_enabled():
            return self._load(unit)  # autograd keeps what it computes with: the arena must not change under it
        if not self._passes_are_marked and len(self._order) > 1 and unit is self._order[0]:
            self._end_pass()  # without the model's own hook, a pass ends where its first unit is used again
        self._order.append(unit)
        plan = self._plan
        if plan is None:
            return self._load(unit)
        with self._changed:
            step = self._find(unit)
            is_read = step is not None and self._wait_for(step)
        if step is None or not is_read:
            return self._load(unit)
        self._transfer.before_use(step)
        return plan.parameters[step % len(plan.order)]

    def clone_weights(self, unit: Unit, output: Any) -> Any:
        """Return a module's output with copies of its weights, where it contains one or a view of one.

        Args:
            unit: The module's weights.
            output: The module's output; tensors in tuples, lists and dictionaries count.
        """
        plan, steps = self._plan, self._in_use.get(id(unit), ())
        if plan is None:
            return output
        weights = [tensor for step in steps for tensor in plan.parameters[step % len(plan.order)]]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in weights}

        def cloned(tensor: torch.Tensor) -> torch.Tensor:
            shared = tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() in addresses
            return tensor.clone() if shared else tensor

        return cloned(output) if isinstance(output, torch.Tensor) else recursively_apply(cloned, output)

    def release(self, unit: Unit) -> None:
        """Free the place of a unit for others."""
        with self._changed:
            steps = self._in_use.get(id(unit))
            if not steps:
                return
            step = steps.pop()
            if not steps:
                del self._in_use[id(unit)]
            self._transfer.after_use(step, outer=step + 1 < self._next_use)
            self._occupied.discard(step)
            self._changed.notify_all()
        self._start_thread()

    def _load(self, unit: Unit) -> list[Any]:
        """Return a unit's tensors in memory outside the arena."""
        return _as_parameters(unit, [slot.source.load(self.device) for slot in unit.slots])

    # ---- the order

    def _end_pass(self) -> None:
        """Plan for the first order that was recorded, and for any other that was recorded twice."""
        order, self._order = self._order, []
        if order:
            if self._plan is None or (order == self._last_order and order != self._plan.order):
                self._make_plan(order)
            self._last_order = order

    def _make_plan(self, order: list[Unit]) -> None:
        self._stop_reading()
        size = arena_bytes(order, _WINDOW)
        offsets, conflicts = assign_offsets(order, size)
        with torch.inference_mode(mode=False):  # these tensors are written again outside of it
            arena = self._transfer.allocate(size)
            self._transfer.prepare(order, arena)
            parameters = [
                _as_parameters(unit, unit.views(arena, offset)) for unit, offset in zip(order, offsets, strict=True)
            ]
        self._plan = _Plan(order, offsets, conflicts, parameters)
        with self._changed:
            self._clear()
        self._start_thread()

    def _find(self, unit: Unit) -> int | None:
        """Return the next step of a unit; None where it is not in the order."""
        assert self._plan is not None
        order, begin = self._plan.order, self._next_use
        for step in range(begin, begin + len(order)):
            if order[step % len(order)] is unit:
                if step != begin:
                    self._seek(step)
                return step
        return None

    def _seek(self, step: int) -> None:
        """Continue from another step: what was read ahead and is not needed is dropped."""
        self._seeking = True  # or the thread would begin its next read before this one has woken up
        try:
            while self._reading is not None:
                self._changed.wait()
        finally:
            self._seeking = False
        self._transfer.reset(self._ready)
        self._occupied, self._ready = self._steps_in_use(), set()
        self._next_use = self._next_read = step
        self._changed.notify_all()

    def _steps_in_use(self) -> set[int]:
        return {step for steps in self._in_use.values() for step in steps}

    def _wait_for(self, step: int) -> bool:
        """Wait until a step is read; return False where a module around this one uses its place."""
        assert self._plan is not None
        unit = self._plan.order[step % len(self._plan.order)]
        self._next_use = step + 1
        if step not in self._ready and step != self._reading:
            if self._next_read <= step and self._overlaps_use(step):
                self._next_read = step + 1
                return False
            if self._reading is None and self._next_read == step and self._can_read():
                self._read_here()
            else:
                self._changed.notify_all()
                self._start_thread()
        if step not in self._ready:
            self.waits += 1
        while step not in self._ready:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            self._changed.wait(1.0)
            self._start_thread()
        self._ready.discard(step)
        self._in_use.setdefault(id(unit), []).append(step)
        return True

    def _overlaps_use(self, step: int) -> bool:
        """Return whether a step's place is in use: by a module that computes around others, until it returns."""
        plan = self._plan
        assert plan is not None
        begin, end = plan.range(step)
        ranges = (plan.range(other) for other in self._steps_in_use())
        return any(first < end and begin < last for first, last in ranges)

    # ---- the thread

    def _start_thread(self) -> None:
        thread = self._thread  # which sets this to None when it ends
        if thread is None or not thread.is_alive():
            self._thread = threading.Thread(target=self._read_ahead, name="weights-ahead", daemon=True)
            self._thread.start()

    def _stop_reading(self) -> None:
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
                plan, step = self._begin_read()
            failure = self._read(plan, step)
            with self._changed:
                self._finish_read(step, failure)

    def _begin_read(self) -> tuple[_Plan, int]:
        """Take the next step to be read."""
        assert self._plan is not None
        step = self._reading = self._next_read
        self._next_read += 1
        self._occupied.add(step)
        return self._plan, step

    def _finish_read(self, step: int, failure: BaseException | None) -> None:
        """Record that a step was read, or could not be."""
        self._reading = None
        if failure is None:
            self._ready.add(step)
            self.reads_ahead += 1
        else:
            self._failure = failure
            self._occupied.discard(step)
            self._next_read = step
        self._changed.notify_all()

    def _read_here(self) -> None:
        """Read the next step in the computing thread, where the reading thread is late: the machine is busy."""
        plan, step = self._begin_read()
        self._changed.release()
        try:
            failure = self._read(plan, step)
        finally:
            self._changed.acquire()
        self._finish_read(step, failure)

    def _can_read(self) -> bool:
        plan = self._plan
        if self._seeking or self._reading is not None:  # what changes the plan or the step waits for one read only
            return False
        if plan is None or self._failure is not None or self._next_read >= self._next_use + len(plan.order):
            return False
        position = self._next_read % len(plan.order)
        if any(self._next_read - back in self._occupied for back in plan.conflicts[position]):
            return False
        return not self._overlaps_use(self._next_read)

    def _read(self, plan: _Plan, step: int) -> BaseException | None:
        position = step % len(plan.order)
        try:
            conflicts = [step - back for back in plan.conflicts[position]]
            unit, offset = plan.order[position], plan.offsets[position]
            self._transfer.read(step, unit, plan.parameters[position], offset, conflicts)
        except BaseException as failure:  # noqa: BLE001 - raised in the thread that waits for the weights
            return failure
        return None


def _as_parameters(unit: Unit, tensors: list[torch.Tensor]) -> list[Any]:
    """Return the tensors as their module holds them: parameters like the placeholders, buffers as they are."""
    return [
        like(slot.placeholder, tensor) if isinstance(slot.placeholder, torch.nn.Parameter) else tensor
        for slot, tensor in zip(unit.slots, tensors, strict=True)
    ]
