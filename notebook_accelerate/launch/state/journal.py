"""The journal of a run. Each event is folded into a `RunState` or a `Store` when it is appended."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from notebook_accelerate.launch.state.run_events import RUN, RankReturned, RunEvent
from notebook_accelerate.launch.state.run_state import RunState, without_result
from notebook_accelerate.telemetry import Store, steady_time
from notebook_accelerate.telemetry.store import Record

Listener = Callable[[Sequence[Record]], None]


class Journal:
    """The ordered stream of a run's events.

    All of the run's own events are kept. Records of the ranks are kept in the store, within its bounds, but listeners
    receive all of them. Any thread may append and read.

    Args:
        store: The store of another journal, which the two then share. If None, a new store is created.

    Attributes:
        store: The records of the ranks: metrics, progress, step times and lines of output.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.store = Store() if store is None else store
        self._state = RunState()
        self._lock = threading.RLock()
        self._records: list[Record] = []
        self._listeners: tuple[Listener, ...] = ()
        self._ordered: tuple[Listener, ...] = ()

    @property
    def state(self) -> RunState:
        """The run's state after the last event."""
        return self._state

    @property
    def records(self) -> list[Record]:
        """The run's own events, in order. Their rank is `RUN`."""
        with self._lock:
            return list(self._records)

    @property
    def last_time(self) -> float:
        """The time of the last event in the journal, in seconds since the epoch."""
        with self._lock:
            last = self._records[-1].time if self._records else 0.0
        return max(last, *self.store.last_activity.values(), 0.0)

    def append(self, event: RunEvent, at: float | None = None) -> None:
        """Append an event of the run. ``at`` is its time in seconds since the epoch. None means now.

        Raises:
            TransitionError: The event is not allowed in the current state. The journal is unchanged.
        """
        record = Record(RUN, steady_time.now() if at is None else at, event)
        with self._lock:
            self._state = self._state.apply(event, record.time)
            self._records.append(record)
            self._pass_on([record])
        self._notify([record])

    def add(self, records: Sequence[Record]) -> None:
        """Append records of ranks to the store, and pass them on to the listeners."""
        if records:
            with self._lock:
                self.store.add(records)
                self._pass_on(records)
            self._notify(records)

    def replay(self, records: Iterable[Record]) -> None:
        """Append records of another journal with their original times."""
        for record in records:
            if isinstance(record.event, RunEvent):
                self.append(record.event, record.time)
            else:
                self.add([record])

    def free_old_results(self) -> None:
        """Free the results of earlier attempts and of ranks that were stopped, which the state no longer refers to."""
        with self._lock:
            kept = {id(info.returned) for info in self._state.ranks}
            found = [record.event.result for record in self._records if isinstance(record.event, RankReturned)]
        for result in found:
            if id(result) not in kept:
                result.free("the results of an attempt that did not succeed were freed")

    def without_results(self, why: str) -> Journal:
        """Return a copy without the ranks' results and exception objects. The copy shares the store.

        Args:
            why: The reason to give when someone reads a missing result.
        """
        copied = Journal(self.store)
        with self._lock:
            copied._state = self._state.without_results(why)
            copied._records = [record._replace(event=without_result(record.event, why)) for record in self._records]
        return copied

    def subscribe(self, listener: Listener, *, ordered: bool = False) -> Callable[[], None]:
        """Call ``listener(records)`` after every append, on the appending thread.

        Args:
            listener: The function to call with the appended records.
            ordered: Whether the listener must receive the records in order even if several threads append. The journal
                is then locked during each call, so the listener must return quickly and must not fail.

        Returns:
            A function that ends the calls.
        """
        with self._lock:
            if ordered:
                self._ordered = (*self._ordered, listener)
            else:
                self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)
                self._ordered = tuple(each for each in self._ordered if each is not listener)

        return unsubscribe

    def locked(self) -> AbstractContextManager[Any]:
        """Return a context manager that blocks appends by other threads, so that the journal does not change."""
        return self._lock

    def _pass_on(self, records: Sequence[Record]) -> None:
        for listener in self._ordered:
            listener(records)

    def _notify(self, records: Sequence[Record]) -> None:
        for listener in self._listeners:
            try:
                listener(records)
            except Exception as error:  # noqa: BLE001 - a failing view must never change a run
                with suppress(Warning):  # Warnings may be configured to raise errors.
                    warnings.warn(f"a listener failed: {type(error).__name__}: {error}", stacklevel=2)
