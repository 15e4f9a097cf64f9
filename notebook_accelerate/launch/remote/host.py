"""A host: it has ranks on its machine for a kernel on another one, and relays between them and it."""

from __future__ import annotations

import selectors
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.remote.protocol import (
    AsideEvent,
    ClockEvent,
    DumpOrder,
    EndedEvent,
    FarewellEvent,
    FramesEvent,
    LookAnswer,
    LookOrder,
    OutputEvent,
    SignalOrder,
    StartedEvent,
)
from notebook_accelerate.launch.supervisor import dispatch
from notebook_accelerate.telemetry import Channel, Event, Stamped, encode
from notebook_accelerate.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from notebook_accelerate.launch.backends.base import ProcessBackend, RankProcess
    from notebook_accelerate.launch.worker import WorkerOrder
    from notebook_accelerate.telemetry.store import Record

ASK_SECONDS = 0.1
"""How often ranks are looked at on systems that cannot tell when a process ends."""
FAREWELL_SECONDS = 10.0
"""How long the kernel may take to hear the last rank's end, before the host leaves by itself."""


class Host:
    """Serves one kernel: hears its orders on a thread of its own from now on.

    Args:
        channel: The stream to the kernel; closed at the end.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ranks: dict[int, RankProcess] = {}
        self._left = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: self._wake.recv(4096))
        # Orders are heard on a thread of their own: the other one may be waiting for the kernel to take something in.
        self._listener = threading.Thread(target=self._listen, name="notebook-accelerate-host", daemon=True)
        self._listener.start()

    def serve(self, backend: ProcessBackend, orders: Sequence[WorkerOrder]) -> None:
        """Start the ranks and relay until all have ended; they are killed when the kernel leaves or is gone.

        Args:
            backend: Starts them.
            orders: One for each rank.

        Raises:
            LaunchError: One could not be started; the kernel has been told.
        """
        try:
            self._start(backend, orders)
            sampler = Sampler({rank: process.pid for rank, process in self._ranks.items()}, self._sample)
            sampler.start()
            try:
                self._relay()
            finally:
                self._kill()
                sampler.stop()
            self._left.wait(FAREWELL_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        """Leave the kernel."""
        self._left.set()
        self._channel.shut()
        self._listener.join()
        self._channel.close()
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def _start(self, backend: ProcessBackend, orders: Sequence[WorkerOrder]) -> None:
        try:
            backend.start_ranks(orders, self._begin)
        except BaseException as error:
            self._tell(FarewellEvent(f"{type(error).__name__}: {error}"))
            self._kill()
            raise
        finally:
            backend.close()

    def _begin(self, process: RankProcess) -> None:
        self._ranks[process.rank] = process
        self._tell(StartedEvent(process.rank, process.pid, process.local_rank))
        process.connect(self._selector, self)

    def _relay(self) -> None:
        while self._ranks and not self._left.is_set():
            asked = [rank for rank, process in self._ranks.items() if process.must_be_asked]
            dispatch(self._selector, ASK_SECONDS if asked else None)
            for rank in asked:
                self.take_end(rank)

    # ---- from the ranks: Hearing

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        """See ``Hearing.take_output``."""
        self._tell(OutputEvent(rank, stream, data))

    def take_frames(self, rank: int, data: bytes) -> None:
        """See ``Hearing.take_frames``; what the rank wrote before it said something goes before."""
        if process := self._ranks.get(rank):
            process.drain(self, channel=False)
        self._tell(FramesEvent(rank, data))

    def take_aside(self, rank: int, data: bytes) -> None:
        """See ``Hearing.take_aside``."""
        self._tell(AsideEvent(rank, data))

    def take_end(self, rank: int) -> None:
        """See ``Hearing.take_end``."""
        process = self._ranks.get(rank)
        end = None if process is None else process.poll()
        if process is None or end is None:
            return
        process.drain(self, channel=True)
        process.disconnect(self._selector)
        process.close()
        del self._ranks[rank]
        self._tell(EndedEvent(rank, end.code, end.signal, end.max_rss))

    def _sample(self, records: list[Record]) -> None:
        for record in records:
            self.take_aside(record.rank, encode([Stamped(record.time, record.event)]))

    def _tell(self, event: Event) -> None:
        try:
            self._channel.send(event)
        except ChannelClosedError:
            self._leave()

    # ---- from the kernel

    def _listen(self) -> None:
        try:
            while not self._left.is_set():
                for _, event in self._channel.receive():
                    self._obey(event)
        except ChannelClosedError:
            self._leave()

    def _obey(self, event: Event) -> None:
        if isinstance(event, FarewellEvent):
            self._leave()
        elif isinstance(event, ClockEvent):
            self._tell(event)
        elif (order := _ORDERS.get(type(event))) is not None:
            process = self._ranks.get(event.rank)  # type: ignore[attr-defined]
            if process is not None:
                order(self, process, event)

    def _leave(self) -> None:
        self._left.set()
        self._waker.send(b"!")

    def _on_signal(self, process: RankProcess, event: SignalOrder) -> None:
        process.send_signal(event.number, group=event.group)

    def _on_frames(self, process: RankProcess, event: FramesEvent) -> None:
        process.pass_on(event.payload)

    def _on_dump(self, process: RankProcess, event: DumpOrder) -> None:
        process.open_dump(event.path)

    def _on_look(self, process: RankProcess, event: LookOrder) -> None:
        def look() -> None:
            seen = process.look()
            self._tell(LookAnswer(event.rank, event.number, seen.dump, list(seen.native)))

        threading.Thread(target=look, name="notebook-accelerate-look", daemon=True).start()

    def _kill(self) -> None:
        for process in self._ranks.values():
            process.send_signal(signal.SIGKILL, group=True)
            process.send_signal(signal.SIGKILL)
            process.await_end(5.0)
            process.disconnect(self._selector)
            process.close()
        self._ranks.clear()


_ORDERS: dict[type[Event], Callable[[Host, RankProcess, Any], None]] = {
    SignalOrder: Host._on_signal,
    FramesEvent: Host._on_frames,
    DumpOrder: Host._on_dump,
    LookOrder: Host._on_look,
}

__all__ = ["Host"]
