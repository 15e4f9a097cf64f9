"""In the other notebooks: a copy of what their ranks say and do, sent to the first one."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.remote.protocol import (
    AsideEvent,
    ClockEvent,
    EndedEvent,
    FarewellEvent,
    FramesEvent,
    LookAnswer,
    LookOrder,
    OutputEvent,
    SignalOrder,
    StartedEvent,
)
from notebook_accelerate.launch.rendezvous.cells import CellsEvent, own_cells
from notebook_accelerate.launch.rendezvous.messages import NewsEvent
from notebook_accelerate.telemetry import Channel, Event, Stamped, encode

if TYPE_CHECKING:
    from notebook_accelerate.launch.backends.base import Exit, RankProcess
    from notebook_accelerate.telemetry.store import Record

MAX_WAITING = 64 << 20
"""Bytes that may wait for the first notebook: one that has stopped reading must not hold up this one's ranks."""
FAREWELL_SECONDS = 5.0


class Tap:
    """The stream to the first notebook, for one attempt.

    Args:
        channel: To it; owned from now on.
        note: Called with a line for the user, on a thread of the tap.
    """

    def __init__(self, channel: Channel, note: Callable[[str], None]) -> None:
        self._channel, self._note = channel, note
        self._ranks: dict[int, RankProcess] = {}
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._bytes = 0
        self._cut = False
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=call, name="notebook-accelerate-tap", daemon=True)
            for call in (self._send, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        self._cells: dict[str, list[str]] = {}
        self.tell_cells()

    # ---- from the group, on the run's thread

    def started(self, process: RankProcess) -> None:
        """A rank has started."""
        self._ranks[process.rank] = process
        self._tell(StartedEvent(process.rank, process.pid, process.local_rank))

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        """A rank has written something."""
        self._tell(OutputEvent(rank, stream, data))

    def take_frames(self, rank: int, data: bytes) -> None:
        """A rank has said something."""
        self._tell(FramesEvent(rank, data))

    def sampled(self, records: list[Record]) -> None:
        """Something was measured of ranks."""
        for record in records:
            self._tell(AsideEvent(record.rank, encode([Stamped(record.time, record.event)])))

    def ended(self, rank: int, end: Exit) -> None:
        """A rank has ended."""
        self._ranks.pop(rank, None)
        self._tell(EndedEvent(rank, end.code, end.signal, end.max_rss))

    def stopping(self, node: int, kind: str, text: str) -> None:
        """This notebook stops its ranks; the first one hears it before it hears them end."""
        self._tell(NewsEvent(kind, node, text))

    def tell_cells(self) -> None:
        """Tell of the cells that this notebook has run since it last told of them."""
        new = {filename: cell for filename, cell in own_cells().items() if self._cells.get(filename) != cell}
        if new:
            self._cells |= new
            self._tell(CellsEvent(new))

    def close(self) -> None:
        """Let the first notebook hear everything, then leave."""
        self._waiting.put(None)
        self._threads[0].join(FAREWELL_SECONDS)
        self._over.wait(FAREWELL_SECONDS)
        self._channel.shut()
        self._threads[1].join()
        self._channel.close()

    # ---- to the first notebook

    def _tell(self, event: Event) -> None:
        self._bytes += len(getattr(event, "payload", b""))
        if self._cut or self._over.is_set():
            return
        if self._bytes > MAX_WAITING:
            self._cut = True
            self._note("the first notebook does not take in what the ranks of this one say; it shows them no longer")
            self._channel.shut()
            return
        self._waiting.put(event)

    def _send(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                self._channel.send(event)
            except ChannelClosedError:
                self._over.set()
                return
            self._bytes -= len(getattr(event, "payload", b""))

    # ---- from the first notebook

    def _listen(self) -> None:
        with suppress(ChannelClosedError):
            while not self._over.is_set():
                for _, event in self._channel.receive():
                    self._obey(event)
        self._over.set()

    def _obey(self, event: Event) -> None:
        if isinstance(event, ClockEvent):
            self._waiting.put(event)
        elif isinstance(event, FarewellEvent):
            self._over.set()
        elif process := self._ranks.get(getattr(event, "rank", -1)):
            order = _ORDERS.get(type(event))
            if order is not None:
                order(self, process, event)

    def _on_signal(self, process: RankProcess, event: SignalOrder) -> None:
        process.send_signal(event.number, group=event.group)

    def _on_frames(self, process: RankProcess, event: FramesEvent) -> None:
        process.pass_on(event.payload)

    def _on_look(self, process: RankProcess, event: LookOrder) -> None:
        def look() -> None:
            seen = process.look()
            self._waiting.put(LookAnswer(event.rank, event.number, seen.dump, list(seen.native)))

        threading.Thread(target=look, name="notebook-accelerate-look", daemon=True).start()


_ORDERS: dict[type[Event], Callable[[Tap, RankProcess, Any], None]] = {
    SignalOrder: Tap._on_signal,
    FramesEvent: Tap._on_frames,
    LookOrder: Tap._on_look,
}
LADDER = (signal.SIGINT, signal.SIGTERM)
"""Signals with which every notebook stops its own ranks."""

__all__ = ["LADDER", "Tap"]
