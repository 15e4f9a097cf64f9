"""Decide when views are rendered.

While a run lasts, its views never run on the thread that supervises it. The thread of `ticker` checks the stores, and
renders the views of those that have changed. It exists while there are live views. A view that fails is closed with a
warning; the run is not affected.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.running_cell import running_kernel
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets.front_end import kernel_state

if TYPE_CHECKING:
    from notebook_accelerate.telemetry import Store
    from notebook_accelerate.widgets.front_end import KernelState

PERIOD = 0.2
"""The shortest time between two renders of a view, in seconds."""
IDLE_PERIOD = 1.0
"""Seconds between two renders without events, because elapsed and silent times still change."""
REST, LONGEST_REST = 24.0, 3.0
"""After a round of renders, the thread sleeps for REST times its CPU time, but at most for LONGEST_REST seconds."""


class RenderSchedule:
    """Renders a view when one of its stores has changed, at most five times a second.

    Args:
        stores: The stores whose changes are rendered. `watch` adds more.
        render: Called with the time, and never on two threads at the same time.
        failed: Called once with the error that closed the schedule.
        clock: Returns the time in seconds. Tests pass a fake clock.
    """

    def __init__(
        self,
        stores: Iterable[Store],
        render: Callable[[float], None],
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = steady_time.now,
    ) -> None:
        self._render, self._failed, self._clock = render, failed, clock
        self._stores = list(stores)
        self._rendered = 0  # The number of the stores' changes that were rendered.
        self._touched = True
        self._last = float("-inf")
        self._lock = threading.RLock()
        self.closed = False

    def watch(self, store: Store) -> None:
        """Also render when ``store`` changes."""
        with self._lock:
            self._stores.append(store)

    def touch(self, *_: Any) -> None:
        """Record a change outside the stores, on any thread. This takes only one assignment."""
        self._touched = True

    def tick(self, *, due: bool = False) -> bool:
        """Render if that is due, and return whether it was.

        Args:
            due: Whether to render in any case.
        """
        with self._lock:
            now = self._clock()
            waited = now - self._last
            changes = sum(store.changes for store in self._stores)
            period = PERIOD if self._touched or changes != self._rendered else IDLE_PERIOD
            if self.closed or (not due and 0 <= waited < period * 0.95):
                return False
            self._touched, self._rendered, self._last = False, changes, now
            try:
                self._render(now)
            except Exception as error:  # noqa: BLE001 - a failing view must not affect the run
                self._fail(error)
            return True

    def _fail(self, error: Exception) -> None:
        self.close()
        with suppress(Exception):  # The warning below reports the first error.
            self._failed(error)
        text = f"a panel stopped updating: {type(error).__name__}: {error}; the run continues"
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(text, stacklevel=2)

    def close(self) -> None:
        """Stop rendering. Wait for a render that is running, unless that render calls this method."""
        with self._lock:
            self.closed = True


class Ticker:
    """The thread that ticks all open schedules. It exists only while there are open schedules."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._schedules: list[RenderSchedule] = []
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()

    def add(self, schedule: RenderSchedule) -> None:
        """Tick ``schedule`` until it is closed or suspended."""
        with self._lock:
            if schedule not in self._schedules:
                self._schedules.append(schedule)
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="notebook-accelerate-panels", daemon=True)
                self._thread.start()

    def remove(self, schedule: RenderSchedule) -> None:
        """Close ``schedule``. If it was the last one, the thread has ended when this returns."""
        schedule.close()
        self.rest(schedule)

    def suspend(self, schedule: RenderSchedule) -> None:
        """Stop ticking ``schedule`` until it is added again. It stays open."""
        with self._lock:
            self._schedules = [other for other in self._schedules if other is not schedule]

    def rest(self, schedule: RenderSchedule) -> None:
        """Suspend ``schedule``. If it was the last one, the thread has ended when this returns."""
        self.suspend(schedule)
        self._woken.set()
        with self._lock:
            thread = self._thread if all(other.closed for other in self._schedules) else None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)  # The thread may still be rendering another panel.

    def _main(self) -> None:
        while schedules := self._open():
            begin, before = time.monotonic(), time.thread_time()
            for schedule in schedules:
                schedule.tick()
            with suppress(Exception):  # This uses private names of ipykernel, which may change.
                _restore_busy_indicator()
            # Sleep at least as long as the round took, for slow front ends and busy machines. The panels of hundreds
            # of ranks then use at most a twentieth of a core.
            spent, worked = time.monotonic() - begin, time.thread_time() - before
            self._woken.wait(max(PERIOD - spent, spent, min(REST * worked, LONGEST_REST), 0.01))
            self._woken.clear()

    def _open(self) -> list[RenderSchedule]:
        with self._lock:
            self._schedules = [schedule for schedule in self._schedules if not schedule.closed]
            # Stop when the process exits. pyzmq then refuses large messages, and static forms replace the views.
            if not self._schedules or not threading.main_thread().is_alive():
                self._thread = None
                return []
            return list(self._schedules)


ticker = Ticker()


def _restore_busy_indicator() -> None:
    """Report "busy" again if a cell blocks the kernel and a front end has opened a subshell.

    ipykernel 7 handles the messages of widgets on subshells, and reports "idle" after each, which front ends show for
    the whole kernel. Otherwise a notebook with a live view would be shown as idle while a cell blocks.
    """
    kernel, state = running_kernel(), kernel_state()
    if kernel is None or not _is_misreported(state):
        return
    cell = kernel.get_parent()
    _report(kernel, "busy", cell)
    if not _is_misreported(kernel_state()):  # The cell's own "idle" may have been sent before "busy".
        _report(kernel, "idle", cell)


def _is_misreported(state: KernelState | None) -> bool:
    return state is not None and state.blocked and state.subshell


def _report(kernel: Any, state: str, cell: Any) -> None:
    content = {"execution_state": state}
    kernel.session.send(kernel.iopub_socket, "status", content, parent=cell, ident=b"kernel.status")
