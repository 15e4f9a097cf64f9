"""Relays between the ranks of this process and a kernel elsewhere."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.hosts.remote.host_protocol import (
    CapturedStacksEvent,
    CaptureStacksOrder,
    ClockEvent,
    EndedEvent,
    FramesEvent,
    HostFramesEvent,
    LeaveEvent,
    OutputEvent,
    SignalOrder,
    StartedEvent,
)
from notebook_accelerate.telemetry import Channel, Event, Stamped, encode

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.rank_process import RankProcess
    from notebook_accelerate.launch.state.rank_exit import Exit
    from notebook_accelerate.telemetry.store import Record


class Relay(ABC):
    """The ranks' end of the stream to a kernel elsewhere; the kernel's end is a ``HostConnection``.

    Args:
        channel: The stream; owned by the relay.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ranks: dict[int, RankProcess] = {}
        self._left = threading.Event()

    @abstractmethod
    def _send(self, event: Event) -> None:
        """Send an event to the kernel; a lost kernel is no error. Safe from any thread."""

    def _leave(self) -> None:
        """Record that the kernel has left or is lost."""
        self._left.set()

    # ---- from the ranks

    def started(self, process: RankProcess) -> None:
        """Report that a rank has started."""
        self._ranks[process.rank] = process
        self._send(StartedEvent(process.rank, process.pid, process.local_rank))

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        """See ``RankListener.take_output``."""
        self._send(OutputEvent(rank, stream, data))

    def take_frames(self, rank: int, data: bytes) -> None:
        """See ``RankListener.take_frames``."""
        self._send(FramesEvent(rank, data))

    def take_host_frames(self, rank: int, data: bytes) -> None:
        """See ``RankListener.take_host_frames``."""
        self._send(HostFramesEvent(rank, data))

    def sampled(self, records: list[Record]) -> None:
        """Send samples of the ranks' resource use."""
        for record in records:
            self.take_host_frames(record.rank, encode([Stamped(record.time, record.event)]))

    def ended(self, rank: int, end: Exit) -> None:
        """Report that a rank has ended."""
        self._ranks.pop(rank, None)
        self._send(EndedEvent(rank, end.code, end.signal, end.max_rss))

    # ---- from the kernel

    def _listen(self) -> None:
        try:
            while not self._left.is_set():
                for _, event in self._channel.receive():
                    self._handle_order(event)
        except ChannelClosedError:
            self._leave()

    def _handle_order(self, event: Event) -> None:
        if isinstance(event, LeaveEvent):
            self._leave()
        elif isinstance(event, ClockEvent):
            self._send(event)
        elif (order := self._orders.get(type(event))) is not None:
            process = self._ranks.get(event.rank)  # type: ignore[attr-defined]
            if process is not None:
                order(self, process, event)

    def _on_signal(self, process: RankProcess, event: SignalOrder) -> None:
        process.send_signal(event.number, group=event.group)

    def _on_frames(self, process: RankProcess, event: FramesEvent) -> None:
        process.send_frames(event.payload)

    def _on_capture_stacks(self, process: RankProcess, event: CaptureStacksOrder) -> None:
        def capture_stacks() -> None:
            stacks = process.capture_stacks()
            self._send(CapturedStacksEvent(event.number, stacks.dump, list(stacks.native)))

        threading.Thread(target=capture_stacks, name="notebook-accelerate-stacks", daemon=True).start()

    _orders: ClassVar[Mapping[type[Event], Callable[[Any, RankProcess, Any], None]]] = {
        SignalOrder: _on_signal,
        FramesEvent: _on_frames,
        CaptureStacksOrder: _on_capture_stacks,
    }
