"""In the other notebooks: mirrors everything their ranks send to the first notebook."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.hosts.remote.relay import Relay
from notebook_accelerate.launch.hosts.rendezvous.peer_cells import CellsEvent, own_cells
from notebook_accelerate.launch.hosts.rendezvous.rendezvous_protocol import NewsEvent
from notebook_accelerate.telemetry import Channel, Event

MAX_QUEUED = 64 << 20
"""Maximum bytes queued for the first notebook; if it stops reading, this notebook's ranks must not block."""
LEAVE_SECONDS = 5.0


class RankMirror(Relay):
    """Mirrors the ranks of one attempt to the first notebook.

    Args:
        channel: The channel to the first notebook; owned by the mirror.
        note: Called with a line for the user, on a thread of the mirror.
    """

    def __init__(self, channel: Channel, note: Callable[[str], None]) -> None:
        super().__init__(channel)
        self._note = note
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._bytes, self._count_lock = 0, threading.Lock()
        self._cut = False
        self._threads = [
            threading.Thread(target=call, name="notebook-accelerate-mirror", daemon=True)
            for call in (self._send_queued, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        self._cells: dict[str, list[str]] = {}
        self.send_cells()

    # ---- from this notebook

    def stopping(self, node: int, kind: str, text: str) -> None:
        """Report that this notebook stops its ranks; the first one receives it before their exits."""
        self._send(NewsEvent(kind, node, text))

    def send_cells(self) -> None:
        """Send the cells that this notebook has run since the last call."""
        new = {filename: cell for filename, cell in own_cells().items() if self._cells.get(filename) != cell}
        if new:
            self._cells |= new
            self._send(CellsEvent(new))

    def close(self) -> None:
        """Send everything that is queued, then leave."""
        self._queue.put(None)
        self._threads[0].join(LEAVE_SECONDS)
        self._left.wait(LEAVE_SECONDS)
        self._channel.shut()
        self._threads[1].join()
        self._channel.close()

    # ---- to the first notebook

    def _send(self, event: Event) -> None:
        self._count(len(getattr(event, "payload", b"")))
        if self._cut or self._left.is_set():
            return
        if self._bytes > MAX_QUEUED:
            self._cut = True
            self._note("the first node reads too slowly; it no longer shows the ranks of this one")
            self._channel.shut()
            return
        self._queue.put(event)

    def _send_queued(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._channel.send(event)
            except ChannelClosedError:
                self._leave()
                return
            self._count(-len(getattr(event, "payload", b"")))

    def _count(self, size: int) -> None:
        with self._count_lock:  # used by the run, its sampler and the sending threads
            self._bytes += size
