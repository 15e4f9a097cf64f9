"""The bounds on events: long texts are shortened, displays are replaced with their size, and a note says so."""

from __future__ import annotations

import os
import tempfile

from notebook_accelerate.telemetry import (
    Channel,
    DisplayEvent,
    Event,
    ExceptionInfo,
    FailureEvent,
    FrameInfo,
    InputRequest,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    Sink,
    StatusEvent,
)
from notebook_accelerate.telemetry.event_bounds import (
    MAX_CHAIN,
    MAX_DISPLAY_CHARS,
    MAX_EVENT_CHARS,
    MAX_EXCEPTION_BYTES,
    MAX_METRICS,
    MAX_NAME_CHARS,
    MAX_TEXT_CHARS,
)


def _sent(pair: tuple[Channel, Sink], *events: Event) -> tuple[list[Event], str]:
    """Send events. Return those that arrive, and the notes in the rank's stderr."""
    kernel, sink = pair
    with tempfile.TemporaryFile() as notes:
        stderr = os.dup(2)
        os.dup2(notes.fileno(), 2)
        try:
            for event in events:
                sink.emit(event)
            sink.send(StatusEvent("last"))
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        notes.seek(0)
        text = notes.read().decode()
    found: list[Event] = []
    while not found or not isinstance(found[-1], StatusEvent):
        found += [event for _, event in kernel.receive(5)]
    return found[:-1], text


def test_events_within_the_bounds_are_unchanged(pair: tuple[Channel, Sink]) -> None:
    events: list[Event] = [
        MetricEvent({"x" * MAX_NAME_CHARS: 1.0}, 1),
        ProgressEvent(1, 2, "y" * MAX_NAME_CHARS),
        DisplayEvent({"text/plain": "small"}),
        InputRequest("z" * MAX_TEXT_CHARS),
        FailureEvent((ExceptionInfo("E", "m" * MAX_TEXT_CHARS, (), ""),), 1.0, payload=b"pickled"),
    ]
    assert _sent(pair, *events) == (events, "")


def test_long_names_stay_different(pair: tuple[Channel, Sink]) -> None:
    [found], notes = _sent(pair, MetricEvent({"x" * 100_000 + end: 1.0 for end in "ab"}, 1))
    assert isinstance(found, MetricEvent)
    assert [len(name) for name in found.values] == [MAX_NAME_CHARS] * 2
    assert "shortened to 500 characters" in notes


def test_a_step_with_too_many_metrics_is_truncated(pair: tuple[Channel, Sink]) -> None:
    [found], notes = _sent(pair, MetricEvent({str(n): 1.0 for n in range(MAX_METRICS + 5)}, 1))
    assert isinstance(found, MetricEvent)
    assert len(found.values) == MAX_METRICS
    assert "a step has 10,005 metrics" in notes


def test_a_display_over_the_bound_is_replaced_with_its_size(pair: tuple[Channel, Sink]) -> None:
    size = MAX_DISPLAY_CHARS + 1
    [found], notes = _sent(pair, DisplayEvent({"text/html": "x" * size}, {"a": 1}, "id", True))
    assert isinstance(found, DisplayEvent)
    assert f"a display of {size:,} characters is not shown" in found.data["text/plain"]
    assert (found.display_id, found.update) == ("id", True)
    assert f"a display of {size:,} characters" in notes


def test_long_messages_keep_both_ends(pair: tuple[Channel, Sink]) -> None:
    frame = FrameInfo("a.py", 1, "f", "s" * 10_000)
    info = ExceptionInfo("E", "begin" + "x" * 1_000_000 + "end", (frame,), "")
    [found], _ = _sent(pair, FailureEvent((info,), 1.0, payload=b"x" * (MAX_EXCEPTION_BYTES + 1)))
    assert isinstance(found, FailureEvent)
    [kept] = found.chain
    assert kept.message.startswith("begin")
    assert kept.message.endswith("end")
    assert "900,008 characters left out" in kept.message
    assert len(kept.frames[0].source) == MAX_NAME_CHARS
    assert found.payload == b""
    assert "the exception itself is not sent" in found.note


def test_a_long_chain_keeps_both_ends(pair: tuple[Channel, Sink]) -> None:
    chain = tuple(ExceptionInfo(f"E{n}", "", (), "context") for n in range(1000))
    [found], _ = _sent(pair, FailureEvent(chain, 1.0))
    assert isinstance(found, FailureEvent)
    assert len(found.chain) == MAX_CHAIN + 1
    assert (found.chain[0].type, found.chain[-1].type) == ("E0", "E999")
    assert "980 more exceptions" in found.chain[MAX_CHAIN // 2].type


def test_an_event_of_any_kind_over_the_bound_is_dropped_and_the_others_arrive(pair: tuple[Channel, Sink]) -> None:
    events: list[Event] = [
        LogEvent("stdout", "first"),
        LogEvent("stdout", "x" * MAX_EVENT_CHARS),
        MetricEvent({"a": 1.0}),
    ]
    found, notes = _sent(pair, *events)
    assert found == [events[0], events[2]]
    assert "a LogEvent of 33,5" in notes


def test_events_that_cannot_be_encoded_are_noted_once_for_each_kind(pair: tuple[Channel, Sink]) -> None:
    bad = [MetricEvent({("a", 1): 1.0}), MetricEvent({b"b": 1.0}), DisplayEvent({("a",): "x"})]  # type: ignore[dict-item]
    good = MetricEvent({"a": 1.0})
    found, notes = _sent(pair, bad[0], good, bad[1], bad[2], good)
    assert found == [good, good]
    assert notes.count("a MetricEvent cannot be sent") == 1
    assert notes.count("a DisplayEvent cannot be sent") == 1


def test_a_failure_does_not_lift_the_bound_of_earlier_events(pair: tuple[Channel, Sink]) -> None:
    display = DisplayEvent({"application/json": {"text": "x" * MAX_EVENT_CHARS}})
    failure = FailureEvent((ExceptionInfo("E", "reason", (), ""),), 1.0, payload=b"p")
    found, notes = _sent(pair, display, failure)
    assert [type(event) for event in found] == [FailureEvent]
    assert "a DisplayEvent of" in notes
