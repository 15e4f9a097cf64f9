"""Limit the size of the events that a rank sends.

Without bounds, a metric's name, a display or an exception's text of 300 MB would fill the kernel's memory, the notebook
and the front end. Anything that exceeds its bound is shortened or omitted, and a note in the rank's output says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from notebook_accelerate.errors import ExceptionInfo, FrameInfo
from notebook_accelerate.telemetry.events import (
    CheckpointEvent,
    DisplayEvent,
    Event,
    FailureEvent,
    InputRequest,
    MetricEvent,
    ProgressEvent,
    StatusEvent,
    TraceEvent,
)

MAX_NAME_CHARS = 500
"""Maximum length of a metric's name, and of a progress bar's label."""
MAX_METRICS = 10_000
"""Maximum number of metrics in one step. A run keeps fewer different metrics; see ``telemetry.store``."""
MAX_TEXT_CHARS = 100_000
"""Maximum length of a prompt's text, and of an exception's message. The first and the last half are kept."""
MAX_CHAIN = 20
"""Maximum number of exceptions in a chain. The first and the last half are kept."""
MAX_DISPLAY_CHARS = 16 << 20
"""Maximum number of characters in the text and pictures of one rich display."""
MAX_EXCEPTION_BYTES = 16 << 20
"""Maximum size of a pickled exception. For a larger one, only the type, message and frames are sent."""
MAX_EVENT_CHARS = 32 << 20
"""Maximum length of any event's JSON. Longer events are omitted."""


def shorten_name(name: str) -> str:
    """Shorten a name to at most ``MAX_NAME_CHARS``. Different names remain different."""
    if len(name) <= MAX_NAME_CHARS:
        return name
    mark = "…" + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]
    return name[: MAX_NAME_CHARS - len(mark)] + mark


def shorten_text(text: str) -> str:
    """Shorten ``text`` to about ``MAX_TEXT_CHARS``: its beginning, the number of omitted characters, and its end."""
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
        note = f"a step has {len(event.values):,} metrics, but only {MAX_METRICS:,} are recorded"
    return MetricEvent({shorten_name(name): value for name, value in kept}, event.step), note


def _progress(event: ProgressEvent) -> tuple[Event, str]:
    if len(event.label) > MAX_NAME_CHARS:
        event.label = shorten_name(event.label)
    return event, ""


def _texts(event: Event) -> tuple[Event, str]:
    """Shorten the strings of an event that are too long."""
    note = ""
    for each in fields(event):
        text = getattr(event, each.name)
        if isinstance(text, str) and len(text) > MAX_TEXT_CHARS:
            setattr(event, each.name, shorten_text(text))
            note = f"a string of {len(text):,} characters is shortened to {MAX_TEXT_CHARS:,}"
    return event, note


def _display(event: DisplayEvent) -> tuple[Event, str]:
    """Replace a display that is too large with a line that gives its size, because a partial picture is useless."""
    size = _text_size(event.data) + _text_size(event.metadata)
    if size <= MAX_DISPLAY_CHARS:
        return event, ""
    text = f"<a display of {size:,} characters is not shown: the limit is {MAX_DISPLAY_CHARS:,}; save it to a file>"
    return replace(event, data={"text/plain": text}, metadata={}), text.strip("<>")


def _text_size(values: dict[Any, Any]) -> int:
    return sum(len(value) for value in values.values() if isinstance(value, (str, bytes)))


def _failure(event: FailureEvent) -> tuple[Event, str]:
    """Shorten the messages of a failure. No note is needed, because shortened messages say so themselves."""
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
"""Functions that return an event within its bounds, and a note about what was shortened or omitted, or ""."""
