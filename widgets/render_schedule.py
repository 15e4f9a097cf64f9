"""Between a run and its views: many changes, few renders.

Views never run on the thread that supervises a run: its events set a flag, and one thread of this room, which lives as
long as there are live views, renders what is due. A view that fails is closed and says so; the run never notices.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_accelerate.telemetry import Store

PERIOD = 0.2
"""Least seconds between two renders of a view: at most five a second."""
IDLE_PERIOD = 1.0
"""Seconds between two renders when nothing happens: clocks and silences go on."""
REST = 9.0
"""A round of renders is followed by so many times its processor time of rest, though by no more than a second."""


class RenderSchedule:
    """Renders a view when one of its stores has changed, at most five times a second.

    Args:
        stores: What is watched; `watch` adds more.
        render: Called with the time, on the views' thread, never twice at once.
        failed: Called once with the error that ended the binding.
        clock: Seconds; a fake one in tests.
    """

    def __init__(
        self,
        stores: Iterable[Store],
        render: Callable[[float], None],
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._render, self._failed, self._clock = render, failed, clock
        self._dirty = True
        self._last = float("-inf")
        self._lock = threading.RLock()
        self.closed = False
        self._leave = [store.subscribe(self.touch) for store in stores]

    def watch(self, store: Store) -> None:
        """Render when ``store`` changes too."""
        with self._lock:
            if not self.closed:
                self._leave.append(store.subscribe(self.touch))

    def touch(self, *_: Any) -> None:
        """Note that something has changed; from any thread, at the price of one assignment."""
        self._dirty = True

    def tick(self) -> bool:
        """Render if it is time to; return whether it was."""
        with self._lock:
            now = self._clock()
            waited = now - self._last
            if self.closed or 0 <= waited < (PERIOD if self._dirty else IDLE_PERIOD) * 0.95:
                return False
            self._dirty = False
            self._last = now
            try:
                self._render(now)
            except Exception as error:  # noqa: BLE001 - a view must never change a run by failing
                self._fail(error)
            return True

    def _fail(self, error: Exception) -> None:
        self.close()
        with suppress(Exception):  # the view is broken already; the warning below tells of it
            self._failed(error)
        text = f"a panel stopped updating: {type(error).__name__}: {error}; the run goes on"
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(text, stacklevel=2)

    def close(self) -> None:
        """Render no more; returns when a render that is under way has ended, unless that is the caller."""
        with self._lock:
            self.closed = True
            leave, self._leave = self._leave, []
            for unsubscribe in leave:
                unsubscribe()


class Ticker:
    """The thread that ticks all open bindings; it exists only while there are some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bindings: list[RenderSchedule] = []
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()

    def add(self, binding: RenderSchedule) -> None:
        """Tick ``binding`` until it is closed or rests."""
        with self._lock:
            if binding not in self._bindings:
                self._bindings.append(binding)
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="notebook-accelerate-panels", daemon=True)
                self._thread.start()

    def remove(self, binding: RenderSchedule) -> None:
        """Close ``binding``; when it was the last one, the thread has ended on return."""
        binding.close()
        self._woken.set()
        with self._lock:
            thread = self._thread if not any(not other.closed for other in self._bindings) else None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)  # it may be rendering another panel's last state

    def rest(self, binding: RenderSchedule) -> None:
        """Tick ``binding`` no more until it is added again; it stays open."""
        with self._lock:
            self._bindings = [other for other in self._bindings if other is not binding]

    def _main(self) -> None:
        while bindings := self._open():
            begin, before = time.monotonic(), time.thread_time()
            for binding in bindings:
                binding.tick()
            # A slow front end or a busy machine gets at least as much rest as a round has taken, and the panels of
            # thousands of ranks take no more than a tenth of a processor.
            spent, worked = time.monotonic() - begin, time.thread_time() - before
            self._woken.wait(max(PERIOD - spent, spent, min(REST * worked, IDLE_PERIOD), 0.01))
            self._woken.clear()

    def _open(self) -> list[RenderSchedule]:
        with self._lock:
            self._bindings = [binding for binding in self._bindings if not binding.closed]
            if not self._bindings:
                self._thread = None
            return list(self._bindings)


ticker = Ticker()


def live_bundle(widget: Any, text: str) -> dict[str, Any]:
    """Return the MIME bundle that shows a live widget."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view, "text/plain": text}


__all__ = ["IDLE_PERIOD", "PERIOD", "RenderSchedule", "Ticker", "live_bundle", "ticker"]
