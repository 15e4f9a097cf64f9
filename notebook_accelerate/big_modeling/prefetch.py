"""Reads offloaded weights ahead of the computation.

The first pass through a model records the order of its modules. A thread reads their weights ahead in that order, while
all that were read or are in use fit into a window. Two passes in another order make a new plan; until then, modules
themselves read the weights that were not read ahead.

Users can keep a weight, or anything that shares its memory (a view, an array, a graph), without limit of time:

- Each read allocates or maps new memory. It is complete before `fetch` can take its tensors from `_ready`.
- `fetch` takes the tensors of a step once, and only for the unit that they were read for.
- After that nothing in this package writes to them: `release` drops references, and no memory is filled a second time.

So only the holder of a weight changes its memory. Only torch's allocator reuses it, after the last reference to its
storage is gone, and on an accelerator after the computations that were queued with it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from notebook_accelerate.big_modeling.weight_transfer import Unit, transfer_to

_WINDOW = 2
"""How many of the largest blocks the window holds: one computes while the next is read."""
_IDLE = 0.25
"""Seconds without anything to read after which the thread ends; the next forward starts another."""
_EXIT_SECONDS = 2.0
"""How long an exiting interpreter waits for a read."""


@dataclass
class _Read:
    """The tensors of a step, the event that ends their transfer, and the versions of their sources."""

    unit: Unit
    tensors: list[Any]
    done: Any
    versions: list[Any]

    def is_current(self) -> bool:
        """Return whether the sources are the same as at the read."""
        return self.versions == _versions(self.unit)


class Prefetcher:
    """Reads the weights of units ahead, in the order of the last pass.

    A step counts the uses of units over all passes: step modulo the length of a pass is a position in its order.

    Args:
        device: Where the weights are computed with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begin()

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[torch.device]]:
        """Copy only the device: the copy makes its own plan."""
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
        self._held = 0  # bytes that are being read, ready, or in use

    # ---- what hooks call

    def begin_pass(self) -> None:
        """Mark the begin of a pass through the model."""
        self._check_process()
        self._passes_are_marked = True
        with self._changed:
            self._held -= sum(unit.nbytes for unit in self._in_use)  # after an error in the last forward
            self._in_use.clear()
            self._end_pass()
            if self._plan and (late := self._next_use % len(self._plan)):
                self._seek(self._next_use + len(self._plan) - late)

    def fetch(self, unit: Unit) -> list[Any]:
        """Return a unit's tensors on the device, ready to compute with; wait until they are read."""
        if torch.is_grad_enabled():
            return self._load(unit)  # autograd keeps all weights: a window would limit nothing
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
        """Make room for other units.

        Args:
            unit: The unit, after its forward.
            tensors: The tensors that the module held; the list is emptied.
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
        """Return a unit's tensors, read now; on the CPU their files are read as the computation needs them."""
        with torch.inference_mode(mode=False):
            return [slot.as_held(slot.source.load(self.device)) for slot in unit.slots]

    def _check_process(self) -> None:
        """Begin anew in a fork: the reading thread is not in it, and could have been in the middle of a read."""
        if self._process != os.getpid():
            self._begin()

    # ---- the order

    def _record(self, unit: Unit) -> int | None:
        """Add a unit to the order of this pass, and return its step; None if it is not in the plan."""
        if not self._passes_are_marked and len(self._order) > 1 and unit is self._order[0]:
            self._end_pass()  # without the model's own hook, a pass ends where its first unit is used again
        self._order.append(unit)
        order, begin = self._plan, self._next_use
        for step in range(begin, begin + len(order)):
            if order[step % len(order)] is unit:
                if step != begin:
                    self._seek(step)
                return step
        return None

    def _end_pass(self) -> None:
        """Plan for the first order that was recorded, and for any other that was recorded twice."""
        order, self._order = self._order, []
        if order:
            if not self._plan or (order == self._last_order and order != self._plan):
                self._make_plan(order)
            self._last_order = order

    def _make_plan(self, order: list[Unit]) -> None:
        self._transfer.prepare(order)
        step = self._next_use + len(self._plan) + 1  # behind every step of the previous plan
        self._seek(step + -step % len(order))
        self._plan, self._window = order, _window_bytes(order)
        self._start_thread()

    def _seek(self, step: int) -> None:
        """Continue from a later step: drop what was read ahead and is not needed."""
        for other in [other for other in self._ready if other < step]:
            self._held -= self._ready.pop(other).unit.nbytes
        self._next_use, self._next_read = step, max(step, self._next_read)
        self._changed.notify_all()

    def _take(self, step: int) -> _Read | None:
        """Return what was read ahead for a step; None if it is to be read now."""
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
        """Count a unit as held, and return the events after which the device has room for it."""
        self._held += unit.nbytes
        leaving, events = sum(nbytes for _, nbytes in self._leaving), []
        while self._leaving and self._held + leaving > self._window:
            event, nbytes = self._leaving.popleft()
            leaving -= nbytes
            events.append(event)
        return events

    # ---- the thread

    def _start_thread(self) -> None:
        thread = self._thread  # which sets this to None when it ends
        if thread is None or not thread.is_alive():
            self._thread = threading.Thread(target=self._read_ahead, name="weights-ahead", daemon=True)
            self._thread.start()
            _prefetchers.add(self)

    def end_thread(self) -> None:
        """End the reading thread; called when the interpreter exits."""
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
            except BaseException:  # noqa: BLE001 - raised where the computation reads the unit itself
                read = None
            self._finish_read(step, unit, read)

    def _can_read(self) -> bool:
        if not self._plan or self._next_read >= self._next_use + len(self._plan):
            return False
        return self._held + self._plan[self._next_read % len(self._plan)].nbytes <= self._window

    def _read(self, unit: Unit, after: Sequence[Any]) -> _Read:
        versions = _versions(unit)  # before the read: a later change makes it out of date
        tensors, done = self._transfer.read(unit, after)
        return _Read(unit, tensors, done, versions)

    def _finish_read(self, step: int, unit: Unit, read: _Read | None) -> None:
        """Publish what was read, unless it failed or the computation has moved behind it."""
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
    """Return the size of the window: the largest block times `_WINDOW`, and at least the largest unit."""
    sizes: dict[str, int] = {}
    for unit in {id(unit): unit for unit in order}.values():
        sizes[unit.block] = sizes.get(unit.block, 0) + unit.nbytes
    return max(max(sizes.values()) * _WINDOW, *(unit.nbytes for unit in order))


_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the reading threads: one that is inside torch when the interpreter exits terminates the process."""
    for prefetcher in list(_prefetchers):
        prefetcher.end_thread()
