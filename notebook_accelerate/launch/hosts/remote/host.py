"""A host: runs ranks on its machine for a kernel on another machine, and relays between them."""

from __future__ import annotations

import selectors
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.hosts.remote.host_protocol import DumpOrder, LeaveEvent
from notebook_accelerate.launch.hosts.remote.relay import Relay
from notebook_accelerate.launch.processes.selecting import DispatchSelector, dispatch
from notebook_accelerate.telemetry import Channel, Event
from notebook_accelerate.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend, RankProcess
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

POLL_SECONDS = 0.1
"""Seconds between polls of the ranks, on systems that cannot notify of the end of a process."""
LEAVE_SECONDS = 10.0
"""Seconds that the kernel has to receive the exit of the last rank, before the host leaves without its reply."""


class Host(Relay):
    """Serves one kernel; a thread receives its orders from construction on.

    Args:
        channel: The stream to the kernel; `close` closes it.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._wake, self._waker = socket.socketpair()
        self._selector = DispatchSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: self._wake.recv(4096))
        # A separate thread receives orders: the main thread may be blocked until the kernel reads what it sends.
        self._listener = threading.Thread(target=self._listen, name="notebook-accelerate-host", daemon=True)
        self._listener.start()

    def serve(self, backend: ProcessBackend, orders: Sequence[WorkerOrder]) -> None:
        """Start the ranks and relay until all have ended; kill them when the kernel leaves or is lost.

        Args:
            backend: Starts the ranks.
            orders: One order for each rank.

        Raises:
            LaunchError: A rank could not be started; the error has been sent to the kernel.
        """
        try:
            self._start(backend, orders)
            sampler = Sampler({rank: process.pid for rank, process in self._ranks.items()}, self.sampled)
            sampler.start()
            try:
                self._relay()
            finally:
                self._kill()
                sampler.stop()
            self._left.wait(LEAVE_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        """Stop serving, and close the stream to the kernel."""
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
            self._send(LeaveEvent(f"{type(error).__name__}: {error}"))
            self._kill()
            raise
        finally:
            backend.close()

    def _begin(self, process: RankProcess) -> None:
        self.started(process)
        process.connect(self._selector, self)

    def _relay(self) -> None:
        while self._ranks and not self._left.is_set():
            polled = [rank for rank, process in self._ranks.items() if process.needs_polling]
            dispatch(self._selector, POLL_SECONDS if polled else None)
            for rank in polled:
                self.take_end(rank)

    # ---- from the ranks: RankListener

    def take_frames(self, rank: int, data: bytes) -> None:
        """See ``RankListener.take_frames``; output that the rank wrote before the frames is sent first."""
        if process := self._ranks.get(rank):
            process.drain(self, channel=False)
        super().take_frames(rank, data)

    def take_end(self, rank: int) -> None:
        """See ``RankListener.take_end``."""
        process = self._ranks.get(rank)
        end = None if process is None else process.poll()
        if process is None or end is None:
            return
        process.drain(self, channel=True)
        process.disconnect(self._selector)
        process.close()
        self.ended(rank, end)

    def _send(self, event: Event) -> None:
        try:
            self._channel.send(event)
        except ChannelClosedError:
            self._leave()

    # ---- from the kernel

    def _leave(self) -> None:
        super()._leave()
        self._waker.send(b"!")

    def _on_dump(self, process: RankProcess, event: DumpOrder) -> None:
        process.open_dump(event.path)

    _orders: ClassVar[Mapping[type[Event], Callable[[Any, RankProcess, Any], None]]] = {
        **Relay._orders,
        DumpOrder: _on_dump,
    }

    def _kill(self) -> None:
        for process in self._ranks.values():
            process.send_signal(signal.SIGKILL, group=True)
            process.await_end(5.0)
            process.disconnect(self._selector)
            process.close()
        self._ranks.clear()
