"""The queue of a rank's events: ``emit`` works on any thread, at the cost of one append."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from notebook_accelerate.telemetry.channel import Channel, Stamped
from notebook_accelerate.telemetry.events import DroppedEvent

if TYPE_CHECKING:
    from notebook_accelerate.telemetry.events import Event

QUEUE_LIMIT = 50_000
"""Events waiting to be sent before droppable ones are dropped."""


class Sink:
    """A queue in front of a channel, which the rank's agent flushes.

    Attributes:
        urgent: Whether the queue has events that the user waits for. The numbers of steps may wait for the next
            repainting of the panel.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.urgent = False
        # Pairs instead of `Stamped`: after a step of training no code is in the processor's caches, and each function
        # that is called costs microseconds.
        self._queue: deque[tuple[float, Event]] = deque()
        self._dropped = 0
        self._flush_lock = threading.Lock()
        self.on_step: Callable[[], None] | None = None
        """Called at every step boundary, on the training thread, while a request waits for one."""

    def emit(self, event: Event) -> None:
        """Queue ``event``; never blocks."""
        if len(self._queue) >= QUEUE_LIMIT and event.droppable:
            self._dropped += 1
            return
        self._queue.append((time.time(), event))
        if not event.boundary:
            self.urgent = True
            return
        on_step = self.on_step  # read once: a signal handler may remove it
        if on_step is not None:
            on_step()

    def flush(self) -> None:
        """Send what is queued, in order.

        Raises:
            ChannelClosedError: The kernel has ended.
        """
        with self._flush_lock:
            self.urgent = False
            batch = [Stamped(*self._queue.popleft()) for _ in range(len(self._queue))]
            if self._dropped:
                batch.append(Stamped(time.time(), DroppedEvent(self._dropped)))
                self._dropped = 0
            if batch:
                self.channel.send_stamped(batch)

    def send(self, event: Event) -> None:
        """Queue ``event`` and send everything now."""
        self._queue.append((time.time(), event))
        self.flush()


_sink: Sink | None = None


def install_sink(sink: Sink | None) -> None:
    """Make ``emit`` send to ``sink`` in this process; None removes it."""
    global _sink  # noqa: PLW0603 - one worker, one sink
    _sink = sink


def current_sink() -> Sink | None:
    """Return this rank's sink; None outside a launched rank."""
    return _sink


def emit(event: Event) -> None:
    """Queue ``event`` for the kernel that launched this rank; outside a launched rank, do nothing."""
    if _sink is not None:
        _sink.emit(event)
