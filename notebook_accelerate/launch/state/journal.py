"""The journal of a run: every event in one order, folded into a `RunState` and a `Store` as it is appended."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from notebook_accelerate.launch.state.run_events import RUN, RunEvent
from notebook_accelerate.launch.state.run_state import RunState
from notebook_accelerate.telemetry import Store
from notebook_accelerate.telemetry.store import Record

Listener = Callable[[Sequence[Record]], None]


class Journal:
    """The ordered stream of a run's events.

    All events of the run itself are kept. Records of the ranks are kept in the store, within its bounds; listeners
    receive all of them. Any thread may append and read.

    Attributes:
        store: Records of the ranks: metrics, progress, step times, lines of output.
    """

    def __init__(self) -> None:
        self.store = Store()
        self._state = RunState()
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._listeners: tuple[Listener, ...] = ()

    @property
    def state(self) -> RunState:
        """The run after the last event."""
        return self._state

    @property
    def records(self) -> list[Record]:
        """The events of the run itself, in order; their rank is `RUN`."""
        with self._lock:
            return list(self._records)

    def append(self, event: RunEvent, at: float | None = None) -> None:
        """Append an event of the run, ``at`` seconds since the epoch (None: now).

        Raises:
            TransitionError: The event is not allowed now; the journal is unchanged.
        """
        record = Record(RUN, time.time() if at is None else at, event)
        with self._lock:
            self._state = self._state.apply(event, record.time)
            self._records.append(record)
        self._notify([record])

    def add(self, records: Sequence[Record]) -> None:
        """Append records of ranks."""
        if records:
            self.store.add(records)
            self._notify(records)

    def replay(self, records: Iterable[Record]) -> None:
        """Append records of another journal; they keep their times."""
        for record in records:
            if isinstance(record.event, RunEvent):
                self.append(record.event, record.time)
            else:
                self.add([record])

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(records)`` after every append, on the appending thread; return a function to unsubscribe."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return unsubscribe

    def _notify(self, records: Sequence[Record]) -> None:
        for listener in self._listeners:
            try:
                listener(records)
            except Exception as error:  # noqa: BLE001 - a view must never change a run by failing
                with suppress(Warning):  # where warnings are errors
                    warnings.warn(f"a listener failed: {type(error).__name__}: {error}", stacklevel=2)


__all__ = ["Journal", "Listener"]
