"""A rank's end of the channel: the queue of its events, and the thread that sends them.

``emit`` works on any thread, at the cost of one append.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, TypeVar

from notebook_accelerate.errors import ChannelClosedError, ExceptionInfo, FrameInfo
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.channel import Channel, Stamped, encode
from notebook_accelerate.telemetry.events import (
    AgentFailedEvent,
    AnsweredEvent,
    CheckpointEvent,
    DisplayEvent,
    DroppedEvent,
    Event,
    FailureEvent,
    InputReply,
    InputRequest,
    MetricEvent,
    ProgressEvent,
    StatusEvent,
    TraceEvent,
)
from notebook_accelerate.telemetry.tracebacks import describe_error

T = TypeVar("T")
QUEUE_LIMIT = 50_000
"""Most events that wait to be sent; with more, every second droppable one of the older half is dropped."""

FREED_EVENTS = QUEUE_LIMIT // 8
"""Events that are dropped at least when the queue is full, because each time costs the training thread milliseconds."""


class Sink:
    """A queue in front of a channel, which the rank's agent flushes.

    Attributes:
        urgent: Whether the queue has events that the user waits for. The numbers of steps may wait for the next
            repainting of the panel.
        last_step: When the last step ended whose event was sent, in seconds since the epoch; 0 before the first.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.urgent = False
        self.last_step = 0.0
        # Pairs instead of `Stamped`: after a step of training no code is in the processor's caches, and each function
        # that is called costs microseconds.
        self._queue: deque[tuple[float, Event]] = deque()
        self._dropped = 0
        self._full = False
        self._flush_lock, self._take_lock = threading.Lock(), threading.Lock()
        self._noted: set[str] = set()
        self.on_step: Callable[[], None] | None = None
        """Called at every step boundary, on the training thread, while a request waits for one."""

    def emit(self, event: Event) -> None:
        """Queue ``event``; never blocks."""
        if len(self._queue) >= QUEUE_LIMIT and event.droppable and not self._make_room():
            return
        self._queue.append((steady_time.now(), event))
        if not event.boundary:
            self.urgent = True
            return
        on_step = self.on_step  # read once: a signal handler may remove it
        if on_step is not None:
            on_step()

    def _make_room(self) -> bool:
        """Drop older events, and return whether a new one is queued; else it is counted as dropped."""
        if not self._take_lock.acquire(blocking=False):  # this may be a signal handler, or another thread makes room
            return True
        try:
            if not self._full:
                # The end of a curve is worth more: the older half is thinned. Where that frees little, as with a
                # different name each time, the oldest events go, which is not tried again in vain before a flush.
                freed = self._drop(QUEUE_LIMIT // 2, lambda old: thin(old, lambda queued: drop_key(queued[1])))
                if freed < FREED_EVENTS:
                    freed += self._drop(QUEUE_LIMIT, lambda old: _without_oldest(old, FREED_EVENTS))
                self._full = freed < FREED_EVENTS
            self._dropped += self._full
            return not self._full
        finally:
            self._take_lock.release()

    def _drop(self, count: int, keep: Callable[[list[tuple[float, Event]]], list[tuple[float, Event]]]) -> int:
        """Replace the ``count`` oldest events with those that ``keep`` returns; return how many were dropped."""
        old = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        kept = keep(old)
        self._queue.extendleft(reversed(kept))
        dropped = len(old) - len(kept)
        self._dropped += dropped
        return dropped

    def flush(self) -> None:
        """Send what is queued, in order.

        Raises:
            ChannelClosedError: The kernel has ended.
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
            with suppress(Exception):  # of another type than its field: it cannot be encoded either, which is noted
                event, note = bound(event)
                if note:
                    self._note(type(event).__name__, note)
        return Stamped(stamp, event)

    def _encode(self, batch: list[Stamped]) -> bytes:
        """Return the frames of a batch, without the events that cannot be encoded, each kind of which is noted once."""
        try:
            data = encode(batch)
        except Exception:  # noqa: BLE001 - values of the user's raise what they like
            return b"".join(self._encode_one(message) for message in batch)
        if len(data) <= MAX_EVENT_CHARS:
            return data
        return b"".join(self._encode_one(message) for message in batch)

    def _encode_one(self, message: Stamped) -> bytes:
        name = type(message.event).__name__
        try:
            data = encode([message])
        except Exception as error:  # noqa: BLE001 - the same
            self._note(name, f"a {name} cannot be sent to the notebook ({describe_error(error, 200)})")
            return _left_out(message)
        if len(data) > MAX_EVENT_CHARS and not message.event.has_payload:
            size = f"{len(data):,} bytes is not sent to the notebook: at most {MAX_EVENT_CHARS:,} are"
            self._note(name, f"a {name} of {size}")
            return _left_out(message)
        return data

    def _note(self, kind: str, text: str) -> None:
        """Write one line for each kind of event to the rank's output, which needs no channel."""
        if kind not in self._noted:
            self._noted.add(kind)
            with suppress(OSError):  # closed by the function
                os.write(2, f"notebook_accelerate: {text}; further ones are not noted\n".encode(errors="replace"))

    def send(self, event: Event) -> None:
        """Queue ``event`` and send everything now."""
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


def _left_out(message: Stamped) -> bytes:
    """Return what is sent in the place of an event: the rank's streams have marks of each display."""
    mark = message.event.mark if isinstance(message.event, DisplayEvent) else 0
    return encode([Stamped(message.time, DisplayEvent({}, mark=mark))]) if mark else b""


_sink: Sink | None = None


def install_sink(sink: Sink | None) -> None:
    """Make ``emit`` send to ``sink`` in this process; None removes it."""
    global _sink  # noqa: PLW0603 - one worker, one sink
    _sink = sink


def current_sink() -> Sink | None:
    """Return this rank's sink; None outside a launched rank."""
    return _sink


def send_soon() -> None:
    """Have what this rank has queued sent within milliseconds; outside a launched rank, do nothing."""
    if _sink is not None:
        _sink.urgent = True


def emit(event: Event) -> None:
    """Queue ``event`` for the kernel that launched this rank; outside a launched rank, do nothing."""
    if _sink is not None:
        _sink.emit(event)


# ---- bounds of what a rank may send in one event
#
# Without them, a metric's name, a display or an exception's text of 300 MB would fill the kernel's memory, the
# notebook, and the front end. What exceeds its bound is shortened or left out, and a note in the rank's output says so.

MAX_NAME_CHARS = 500
"""Longest name of a metric, and longest label of a progress bar."""
MAX_METRICS = 10_000
"""Most metrics of one step; a run keeps fewer different ones, see ``telemetry.store``."""
MAX_TEXT_CHARS = 100_000
"""Longest text of a prompt, and longest message of one exception: the first and the last half of it stay."""
MAX_CHAIN = 20
"""Most exceptions of a chain: the first and the last half of it stay."""
MAX_DISPLAY_CHARS = 16 << 20
"""Most characters of the texts and pictures of one rich display."""
MAX_EXCEPTION_BYTES = 16 << 20
"""Largest pickled exception; of a larger one only type, message and frames are sent."""
MAX_EVENT_CHARS = 32 << 20
"""Longest event of any kind, as JSON; a longer one is left out."""


def shorten_name(name: str) -> str:
    """Return a name within ``MAX_NAME_CHARS``; different names stay different."""
    if len(name) <= MAX_NAME_CHARS:
        return name
    mark = "…" + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]
    return name[: MAX_NAME_CHARS - len(mark)] + mark


def shorten_text(text: str) -> str:
    """Return a text within about ``MAX_TEXT_CHARS``: its begin and its end, and how much is left out."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"


def _metric(event: MetricEvent) -> tuple[Event, str]:
    if len(event.values) <= MAX_METRICS and max(map(len, event.values), default=0) <= MAX_NAME_CHARS:
        return event, ""
    kept = list(event.values.items())[:MAX_METRICS]
    note = f"the names of metrics are shortened to {MAX_NAME_CHARS} characters"
    if len(kept) < len(event.values):
        note = f"a step has {len(event.values):,} metrics, of which {MAX_METRICS:,} are recorded"
    return MetricEvent({shorten_name(name): value for name, value in kept}, event.step), note


def _progress(event: ProgressEvent) -> tuple[Event, str]:
    if len(event.label) > MAX_NAME_CHARS:
        event.label = shorten_name(event.label)
    return event, ""


def _texts(event: Event) -> tuple[Event, str]:
    """Shorten all texts of an event."""
    note = ""
    for each in fields(event):
        text = getattr(event, each.name)
        if isinstance(text, str) and len(text) > MAX_TEXT_CHARS:
            setattr(event, each.name, shorten_text(text))
            note = f"a text of {len(text):,} characters is shortened to {MAX_TEXT_CHARS:,}"
    return event, note


def _display(event: DisplayEvent) -> tuple[Event, str]:
    """Replace a display that is too large by its size: half a picture cannot be drawn."""
    size = _text_size(event.data) + _text_size(event.metadata)
    if size <= MAX_DISPLAY_CHARS:
        return event, ""
    text = f"<a display of {size:,} characters is not shown: at most {MAX_DISPLAY_CHARS:,} are; save it to a file>"
    return replace(event, data={"text/plain": text}, metadata={}), text.strip("<>")


def _text_size(values: dict[Any, Any]) -> int:
    return sum(len(value) for value in values.values() if isinstance(value, (str, bytes)))


def _failure(event: FailureEvent) -> tuple[Event, str]:
    """Shorten messages, which the failure itself shows: no note is needed."""
    chain = event.chain
    if len(chain) > MAX_CHAIN:
        half = MAX_CHAIN // 2
        left_out = ExceptionInfo(f"… {len(chain) - 2 * half} more exceptions …", "", (), chain[half].link)
        chain = (*chain[:half], left_out, *chain[-half:])
    event.chain = tuple(
        info._replace(
            type=shorten_name(info.type),
            message=shorten_text(info.message),
            frames=tuple(_frame(frame) for frame in info.frames),
        )
        for info in chain
    )
    event.note = shorten_text(event.note)
    if len(event.payload) > MAX_EXCEPTION_BYTES:
        event.note = f"the exception itself is not sent: {len(event.payload):,} bytes, at most {MAX_EXCEPTION_BYTES:,}"
        event.payload = b""
    return event, ""


def _frame(frame: FrameInfo) -> FrameInfo:
    return frame._replace(source=shorten_name(frame.source), function=shorten_name(frame.function))


BOUNDS: dict[type[Event], Callable[[Any], tuple[Event, str]]] = {
    MetricEvent: _metric,
    ProgressEvent: _progress,
    DisplayEvent: _display,
    FailureEvent: _failure,
    InputRequest: _texts,
    StatusEvent: _texts,
    TraceEvent: _texts,
    CheckpointEvent: _texts,
}
"""By kind of event: returns the event within its bounds, and a note about what is shortened or left out, or ""."""


# ---- the agent: the thread of this package in a rank

FLUSH_SECONDS = 0.05
"""Seconds between two flushes of the event queue while it has urgent events."""
_PERIODS_PER_FLUSH = 4
"""Number of periods between two flushes of other events: panels repaint every 0.2 s, and a flush takes 0.2 ms."""
MAX_FAILURES = 5
"""After this many unexpected errors the agent ends."""


class Agent:
    """Flushes ``sink``, and passes events from the kernel to the registered handlers."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._process = os.getpid()
        self._replies: queue.SimpleQueue[InputReply] = queue.SimpleQueue()
        self._prompts = itertools.count(1)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {InputReply: self._replies.put}
        self._ticks: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notebook-accelerate-agent", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is queued. The thread ends with the process: joining it would take up to one period."""
        self._stopping.set()
        self.sink.flush()

    def on(self, kind: type[Event], handler: Callable[[Any], None]) -> None:
        """Call ``handler(event)`` on the agent's thread for every event of ``kind`` from the kernel."""
        self._handlers[kind] = handler

    def every_tick(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on the agent's thread, about 20 times a second."""
        self._ticks.append(callback)

    def ask(self, prompt: str, *, password: bool = False, shown: str = "", kind: str = "input") -> str:
        """Prompt the user in the notebook and return the answer; blocks until then.

        Args:
            prompt: Text before the answer.
            password: Whether to hide the answer.
            shown: Lines to show before the prompt.
            kind: "input" or "debugger".

        Raises:
            EOFError: The notebook cannot prompt; or the caller is a process that the rank has started, such as a worker
                of a DataLoader.
        """
        if os.getpid() != self._process:  # the rank would receive the answer
            raise EOFError("only the rank itself can prompt the user, not a process that it has started")
        number = next(self._prompts)
        try:
            self.sink.send(InputRequest(prompt, password, shown, kind, number))
            while (reply := self._replies.get()).number != number:
                pass  # an answer to an earlier prompt, which an interrupt has ended
        finally:  # an interrupt ends the prompt too
            self.sink.send(AnsweredEvent(number))
        if reply.text is None:
            raise EOFError("the notebook gave no answer")
        return reply.text

    def _run(self) -> None:
        for left in reversed(range(MAX_FAILURES)):
            try:
                self._serve()
                return
            except ChannelClosedError:
                if not self._stopping.is_set():
                    # Without the kernel the run is over: end this rank and the processes that it started.
                    os.kill(0, signal.SIGKILL)
                return
            except BaseException as error:  # noqa: BLE001 - nothing above could handle it, or show it
                self._report(error, ended=left == 0)

    def _serve(self) -> None:
        for turn in itertools.count():
            if self._stopping.is_set():
                return
            for _, event in self.sink.channel.receive(FLUSH_SECONDS):
                self._handle(event)
            for tick in self._ticks:
                tick()
            if self.sink.urgent or turn % _PERIODS_PER_FLUSH == 0:
                self.sink.flush()

    def _report(self, error: BaseException, *, ended: bool) -> None:
        """Report an error of this thread past the queue, which may be its cause."""
        text = describe_error(error, 500)
        with suppress(OSError):  # closed by the function
            os.write(2, "".join(traceback.format_exception(error)).encode(errors="replace"))
        with suppress(Exception):
            self.sink.channel.send(AgentFailedEvent(text, ended))

    def _handle(self, event: Event) -> None:
        """Call the handler of an event; its failure must not end the thread, or the rank would never reply again."""
        handler = self._handlers.get(type(event))
        if handler is None:
            return
        try:
            handler(event)
        except ChannelClosedError:
            raise
        except Exception:  # noqa: BLE001 - shown in the rank's stderr
            traceback.print_exc()
