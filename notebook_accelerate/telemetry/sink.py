"""The queue of a rank's events in front of the rank's end of the channel.

``emit`` works on any thread and costs one append.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.channel import Channel, Stamped, encode
from notebook_accelerate.telemetry.event_bounds import BOUNDS, MAX_EVENT_CHARS
from notebook_accelerate.telemetry.events import (
    DisplayEvent,
    DroppedEvent,
    Event,
)
from notebook_accelerate.telemetry.tracebacks import describe_error

T = TypeVar("T")
QUEUE_LIMIT = 50_000
"""Maximum number of queued events. Beyond it, every second droppable event in the older half is dropped."""

FREED_EVENTS = QUEUE_LIMIT // 8
"""Minimum number of events to drop each time the queue is full, because making room takes milliseconds."""


class Sink:
    """A queue in front of a channel, flushed by the rank's agent.

    Attributes:
        urgent: Whether the queue has events that the user waits for. Events at step boundaries are not urgent, because
            panels do not show them before the next repaint.
        last_step: The time of the latest step event that was sent, in seconds since the epoch, or 0 before the first.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.urgent = False
        self.last_step = 0.0
        # Queue pairs instead of `Stamped` tuples, because creating one is a function call, which costs microseconds
        # after a training step, when no code is in the CPU's caches.
        self._queue: deque[tuple[float, Event]] = deque()
        self._dropped = 0
        self._full = False
        self._flush_lock, self._take_lock = threading.Lock(), threading.Lock()
        self._noted: set[str] = set()
        self.on_step: Callable[[], None] | None = None
        """Called at every step boundary, on the training thread, while a request waits for one."""

    def emit(self, event: Event) -> None:
        """Queue ``event``. Never blocks."""
        if len(self._queue) >= QUEUE_LIMIT and event.droppable and not self._make_room():
            return
        self._queue.append((steady_time.now(), event))
        if not event.boundary:
            self.urgent = True
            return
        on_step = self.on_step  # Read the attribute only once, because a signal handler may set it to None.
        if on_step is not None:
            on_step()

    def _make_room(self) -> bool:
        """Drop older events, and return whether to queue the new one. Otherwise, the new one counts as dropped."""
        # Don't wait for the lock: this may run in a signal handler, and another thread may be making room.
        if not self._take_lock.acquire(blocking=False):
            return True
        try:
            if not self._full:
                # The end of a curve is more valuable, so thin the older half. If that frees too little, because every
                # event has a different name, drop the oldest events. If that fails too, don't try again before the
                # next flush.
                freed = self._drop(QUEUE_LIMIT // 2, lambda old: thin(old, lambda queued: drop_key(queued[1])))
                if freed < FREED_EVENTS:
                    freed += self._drop(QUEUE_LIMIT, lambda old: _without_oldest(old, FREED_EVENTS))
                self._full = freed < FREED_EVENTS
            self._dropped += self._full
            return not self._full
        finally:
            self._take_lock.release()

    def _drop(self, count: int, keep: Callable[[list[tuple[float, Event]]], list[tuple[float, Event]]]) -> int:
        """Replace the ``count`` oldest events with the result of ``keep``. Return how many were dropped."""
        old = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        kept = keep(old)
        self._queue.extendleft(reversed(kept))
        dropped = len(old) - len(kept)
        self._dropped += dropped
        return dropped

    def flush(self) -> None:
        """Send the queued events, in order.

        Raises:
            ChannelClosedError: The kernel has exited.
        """
        with self._flush_lock:
            self.urgent = False
            with self._take_lock:
                queued = [self._queue.popleft() for _ in range(len(self._queue))]
                dropped, self._dropped, self._full = self._dropped, 0, False
            batch = [self._within_bounds(stamp, event) for stamp, event in queued]
            if dropped:
                batch.append(Stamped(steady_time.now(), DroppedEvent(dropped)))
            if batch:
                self.channel.send_bytes(self._encode(batch))

    def _within_bounds(self, stamp: float, event: Event) -> Stamped:
        if event.boundary:
            self.last_step = stamp
        bound = BOUNDS.get(type(event))
        if bound is not None:
            # A value may not have its field's type. `_encode` omits such an event and writes a note.
            with suppress(Exception):
                event, note = bound(event)
                if note:
                    self._note(type(event).__name__, note)
        return Stamped(stamp, event)

    def _encode(self, batch: list[Stamped]) -> bytes:
        """Return a batch's frames, without events that cannot be encoded. Write one note per kind of omitted event."""
        try:
            data = encode(batch)
        except Exception:  # noqa: BLE001 - the user's values may raise any error
            return b"".join(self._encode_one(message) for message in batch)
        if len(data) <= MAX_EVENT_CHARS:
            return data
        return b"".join(self._encode_one(message) for message in batch)

    def _encode_one(self, message: Stamped) -> bytes:
        name = type(message.event).__name__
        try:
            data = encode([message])
        except Exception as error:  # noqa: BLE001 - the user's values may raise any error
            self._note(name, f"a {name} cannot be sent to the notebook ({describe_error(error, 200)})")
            return _substitute_for(message)
        if len(data) > MAX_EVENT_CHARS and not message.event.has_payload:
            size = f"{len(data):,} bytes is not sent to the notebook: the limit is {MAX_EVENT_CHARS:,}"
            self._note(name, f"a {name} of {size}")
            return _substitute_for(message)
        return data

    def _note(self, kind: str, text: str) -> None:
        """Write a note about an event to the rank's output, once per kind. This works without the channel."""
        if kind not in self._noted:
            self._noted.add(kind)
            with suppress(OSError):  # The user's function may have closed the descriptor.
                os.write(2, f"notebook_accelerate: {text}; further ones are not reported\n".encode(errors="replace"))

    def send(self, event: Event) -> None:
        """Queue ``event``, and send everything in the queue now."""
        self._queue.append((steady_time.now(), event))
        self.flush()

    def send_with(self, descriptors: Sequence[int], event: Event) -> None:
        """Send everything that is queued, then ``event`` with copies of ``descriptors``."""
        self.flush()
        self.channel.send_bytes(encode([Stamped(steady_time.now(), event)]), descriptors)


def drop_key(event: Event) -> Hashable | None:
    """Return a key shared by similar events, half of which may be dropped, or None to keep the event."""
    if not event.droppable:
        return None
    values = getattr(event, "values", None)
    return type(event), tuple(values) if isinstance(values, dict) else ()


def thin(items: Iterable[T], key: Callable[[T], Hashable | None]) -> list[T]:
    """Drop every second item of each key. Items whose key is None are kept."""
    kept: list[T] = []
    odd: set[Hashable] = set()
    for item in items:
        name = key(item)
        if name is not None and name in odd:
            odd.remove(name)
            continue
        if name is not None:
            odd.add(name)
        kept.append(item)
    return kept


def _without_oldest(queued: list[tuple[float, Event]], count: int) -> list[tuple[float, Event]]:
    """Return the events without the ``count`` oldest ones that may be dropped."""
    kept = []
    for each in queued:
        if count > 0 and each[1].droppable:
            count -= 1
        else:
            kept.append(each)
    return kept


def _substitute_for(message: Stamped) -> bytes:
    """Return the frame to send instead of an event. A display needs one, because a stream contains its mark."""
    mark = message.event.mark if isinstance(message.event, DisplayEvent) else 0
    return encode([Stamped(message.time, DisplayEvent({}, mark=mark))]) if mark else b""


_sink: Sink | None = None


def install_sink(sink: Sink | None) -> None:
    """Make ``emit`` send events to ``sink`` in this process. If None, remove the current sink."""
    global _sink  # noqa: PLW0603 - one sink per worker
    _sink = sink


def current_sink() -> Sink | None:
    """Return this rank's sink, or None outside a launched rank."""
    return _sink


def require_sink() -> Sink:
    """Return this rank's sink, or raise an error outside a launched rank."""
    sink = current_sink()
    assert sink is not None, "a rank is connected before it runs"
    return sink


def send_soon() -> None:
    """Send the queued events within milliseconds. Do nothing outside a launched rank."""
    if _sink is not None:
        _sink.urgent = True


def emit(event: Event) -> None:
    """Queue ``event`` for the kernel that launched this rank. Do nothing outside a launched rank."""
    if _sink is not None:
        _sink.emit(event)
