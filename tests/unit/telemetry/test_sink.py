"""A worker's queue of events, which is cheap and ordered, and bounded only for events that may be dropped."""

from __future__ import annotations

import time
from collections.abc import Hashable

import pytest

from notebook_accelerate import telemetry
from notebook_accelerate.telemetry import (
    Channel,
    CheckpointEvent,
    DroppedEvent,
    Event,
    LogEvent,
    MetricEvent,
    Sink,
    StatusEvent,
    current_sink,
    install_sink,
    sink as sink_module,
)
from notebook_accelerate.telemetry.sink import QUEUE_LIMIT, drop_key


def _take(kernel: Channel, least: int) -> list[Event]:
    found: list[Event] = []
    while len(found) < least:
        found += [event for _, event in kernel.receive(5)]
    return found


def test_outside_a_worker_emit_does_nothing() -> None:
    assert current_sink() is None
    telemetry.emit(MetricEvent({"loss": 1.0}))


def test_events_wait_for_the_flush_and_keep_order_and_time(pair: tuple[Channel, Sink]) -> None:
    kernel, sink = pair
    install_sink(sink)
    before = time.time()
    for step in range(100):
        telemetry.emit(MetricEvent({"loss": float(step)}, step))
    after = time.time()
    assert kernel.receive(0.02) == []
    sink.flush()
    found = kernel.receive(5)
    assert [event.step for _, event in found if isinstance(event, MetricEvent)] == list(range(100))
    assert all(before <= stamp <= after for stamp, _ in found)


def test_send_includes_queued_events_and_keeps_the_order(pair: tuple[Channel, Sink]) -> None:
    kernel, sink = pair
    sink.emit(MetricEvent({"a": 1.0}))
    sink.send(StatusEvent("running"))
    assert [type(event) for event in _take(kernel, 2)] == [MetricEvent, StatusEvent]


def test_a_full_queue_drops_droppable_events_and_reports_how_many(pair: tuple[Channel, Sink]) -> None:
    import threading

    kernel, sink = pair
    sink.emit(StatusEvent("never dropped"))
    for step in range(2 * QUEUE_LIMIT):
        sink.emit(MetricEvent({"a": 1.0} if step % 2 else {"b": 1.0}, step))
    sink.emit(StatusEvent("never dropped"))
    lost = 2 * QUEUE_LIMIT + 2 - len(sink._queue)
    assert 0 < lost < 2 * QUEUE_LIMIT
    sender = threading.Thread(target=sink.flush)
    sender.start()
    found = _take(kernel, 2 * QUEUE_LIMIT + 3 - lost)
    sender.join()
    assert [found[0], *found[-2:]] == [StatusEvent("never dropped"), StatusEvent("never dropped"), DroppedEvent(lost)]
    steps = [event.step for event in found if isinstance(event, MetricEvent)]
    assert steps == sorted(set(steps))
    assert steps[-QUEUE_LIMIT // 4 :] == list(range(2 * QUEUE_LIMIT))[-QUEUE_LIMIT // 4 :], "the end keeps every point"
    assert steps[:2] == [0, 1], "the beginning is thinned, but kept"
    older = [step for step in steps if step < QUEUE_LIMIT]
    assert len(older) > 1000
    assert abs(sum(step % 2 for step in older) - len(older) / 2) < len(older) / 10, "both metrics are thinned equally"
    sink.flush()
    assert kernel.receive(0.02) == []  # The loss of events is reported only once.


def test_ten_thousand_events_are_queued_quickly(pair: tuple[Channel, Sink]) -> None:
    _, sink = pair
    install_sink(sink)
    begin = time.thread_time()  # Measure CPU time, because test machines are busy.
    for step in range(10_000):
        telemetry.emit(MetricEvent({"loss": 0.5}, step))
    assert len(sink._queue) == 10_000
    assert time.thread_time() - begin < 5.0  # `make bench ROWS=launch` measures the time.


def test_numbers_of_steps_are_not_urgent_and_lines_are(pair: tuple[Channel, Sink]) -> None:
    _, sink = pair
    sink.emit(MetricEvent({"loss": 0.5}, 1))
    assert not sink.urgent
    sink.emit(LogEvent("stdout", "a line"))
    assert sink.urgent
    sink.flush()
    assert not sink.urgent


@pytest.mark.parametrize(
    ("kept", "names"), [(QUEUE_LIMIT // 2, 1), (0, QUEUE_LIMIT), (QUEUE_LIMIT, 1)], ids=["kept", "names", "only kept"]
)
def test_a_queue_that_thinning_cannot_shorten_drops_the_oldest_at_little_cost(
    pair: tuple[Channel, Sink], monkeypatch: pytest.MonkeyPatch, kept: int, names: int
) -> None:
    _, sink = pair
    looks = 0

    def counted(event: Event) -> Hashable | None:
        nonlocal looks
        looks += 1
        return drop_key(event)

    monkeypatch.setattr(sink_module, "drop_key", counted)
    for number in range(kept):
        sink.emit(CheckpointEvent(str(number), 1.0))
    for step in range(2 * QUEUE_LIMIT):
        sink.emit(MetricEvent({f"loss{step % names}": 1.0}, step))
    assert looks < 20 * QUEUE_LIMIT, "the queue is not thinned for each event"
    assert len(sink._queue) + sink._dropped == kept + 2 * QUEUE_LIMIT
    assert sum(isinstance(event, CheckpointEvent) for _, event in sink._queue) == kept
    if kept < QUEUE_LIMIT:
        last = sink._queue[-1][1]
        assert isinstance(last, MetricEvent)
        assert last.step == 2 * QUEUE_LIMIT - 1, "the newest event is kept"
