"""The duplex channel: its framing survives any split of the data, and refuses foreign data."""

from __future__ import annotations

import contextlib
import json
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry import (
    Channel,
    DisplayEvent,
    Event,
    ExceptionInfo,
    FailureEvent,
    FrameInfo,
    InputReply,
    InputRequest,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    ResultEvent,
    StatusEvent,
    channel,
)
from notebook_accelerate.telemetry.channel import MAX_JSON_BYTES, MAX_ROWS, Decoder, Stamped, encode

_HEADER = struct.Struct("!IQ")
_CHAIN = (ExceptionInfo("KeyError", "'x'", (FrameInfo("a.py", 3, "f", "f()"),), "cause"),)
EVENTS: list[Event] = [
    MetricEvent({"loss": 0.5, "acc": 1.0}, 3),
    MetricEvent({"loss": 2.0}),
    ProgressEvent(3, 10, "epoch 1"),
    StatusEvent("running"),
    LogEvent("stderr", "ä ☃ \u2028 \x00 two\nlines"),
    DisplayEvent({"text/html": "<b>x</b>"}, {"isolated": True}, "id-1", True),
    InputRequest("name? ", True),
    InputReply(None),
    ResultEvent(b"\x00\xff" * 500),
    FailureEvent(_CHAIN, 12.5, "exception", "note", b"pickled"),
]


def _frame(text: bytes, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(text), len(payload)) + text + payload


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    kernel, theirs = Channel.pair()
    rank = Channel(theirs)
    yield kernel, rank
    kernel.close()
    rank.close()


def _events(stamped: list[Stamped]) -> list[Event]:
    return [event for _, event in stamped]


@given(st.lists(st.integers(1, 400), max_size=60))
def test_any_split_of_the_bytes_gives_the_same_events(sizes: list[int]) -> None:
    messages = [Stamped(float(number), event) for number, event in enumerate(EVENTS)]
    data = encode(messages)
    decoder, found, position = Decoder(), [], 0
    for size in sizes:
        found += decoder.feed(data[position : position + size])
        position += size
    found += decoder.feed(data[position:])
    assert found == messages


def test_byte_by_byte_no_event_is_complete_before_its_last_byte() -> None:
    data = encode([Stamped(1.0, ResultEvent(b"abc"))])
    decoder = Decoder()
    assert all(decoder.feed(data[index : index + 1]) == [] for index in range(len(data) - 1))
    assert decoder.feed(data[-1:]) == [Stamped(1.0, ResultEvent(b"abc"))]


def test_events_without_payload_share_a_frame_and_a_payload_ends_its_frame() -> None:
    data = encode([Stamped(0.0, event) for event in (EVENTS[0], EVENTS[3], EVENTS[8], EVENTS[3])])
    lengths, position = [], 0
    while position < len(data):
        text, payload = _HEADER.unpack_from(data, position)
        lengths.append((len(json.loads(data[position + 12 : position + 12 + text])), payload))
        position += 12 + text + payload
    assert lengths == [(3, 1000), (1, 0)]


def test_no_frame_occupies_the_reader_for_long() -> None:
    many = [Stamped(float(index), EVENTS[0]) for index in range(2 * MAX_ROWS + 1)]
    data = encode(many)
    assert [stamp for stamp, _ in Decoder().feed(data)] == [stamp for stamp, _ in many]
    text, _ = _HEADER.unpack_from(data)
    assert len(json.loads(data[_HEADER.size : _HEADER.size + text])) == MAX_ROWS


def test_a_hostile_length_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ChannelClosedError, match=f"at most {MAX_JSON_BYTES}"):
        Decoder().feed(_HEADER.pack(MAX_JSON_BYTES + 1, 0))


@pytest.mark.parametrize(
    "text", [b"not json at all", b"\xff\xfe", b"{}", b'{"a": 1}', b"17", b"[17]", b'[["MetricEvent"]]', b"[[[], 1.0]]"]
)
def test_invalid_frames_close_the_channel_and_raise_nothing_else(text: bytes) -> None:
    with contextlib.suppress(ChannelClosedError):
        assert Decoder().feed(_frame(text)) == []


def test_an_event_with_the_wrong_fields_closes_the_channel() -> None:
    with pytest.raises(ChannelClosedError):
        Decoder().feed(_frame(json.dumps([["LogEvent", 1.0]]).encode()))
    with pytest.raises(ChannelClosedError):
        Decoder().feed(_frame(json.dumps([["FailureEvent", 1.0, [["only two", "parts"]], 2.0]]).encode()))


def test_unknown_events_and_fields_of_a_newer_peer_are_skipped() -> None:
    rows = [["FutureEvent", 1.0, 5], ["StatusEvent", 2.0, "running", "", "a field of tomorrow"]]
    assert Decoder().feed(_frame(json.dumps(rows).encode())) == [Stamped(2.0, StatusEvent("running"))]


def test_numbers_that_are_not_plain_become_plain() -> None:
    import torch

    values = {"a": np.float32(0.25), "b": torch.tensor(0.5), "c": float("nan"), "d": float("inf")}
    [(_, event)] = Decoder().feed(encode([Stamped(0.0, MetricEvent(values, step=np.int64(4)))]))  # type: ignore[arg-type]
    assert isinstance(event, MetricEvent)
    assert (event.values["a"], event.values["b"], event.step) == (0.25, 0.5, 4)
    assert np.isnan(event.values["c"])
    assert np.isinf(event.values["d"])


def test_a_value_that_is_not_a_number_ends_nothing() -> None:
    import torch

    values = {"many": torch.ones(2), "object": object(), "good": 1.0}
    [(_, event)] = Decoder().feed(encode([Stamped(0.0, MetricEvent(values, 1))]))  # type: ignore[arg-type]
    assert isinstance(event, MetricEvent)
    assert event.values["good"] == 1.0


def test_a_large_payload_arrives_whole(ends: tuple[Channel, Channel]) -> None:
    kernel, rank = ends
    payload = bytes(range(256)) * (64 << 12)  # The payload is 64 MiB long.
    sender = threading.Thread(target=rank.send, args=(ResultEvent(payload),))
    sender.start()
    found: list[Stamped] = []
    while not found:
        found = kernel.receive(10)
    sender.join()
    assert _events(found) == [ResultEvent(payload)]


def test_both_directions_can_be_used_by_many_threads(ends: tuple[Channel, Channel]) -> None:
    kernel, rank = ends
    threads = [
        threading.Thread(target=lambda n=n: [rank.send(ProgressEvent(i, n, "x" * 500)) for i in range(200)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    kernel.send(InputReply("down"))
    found: list[Event] = []
    while len(found) < 800:
        found += _events(kernel.receive(10))
    for thread in threads:
        thread.join()
    steps: dict[int | None, list[int]] = {n: [] for n in range(4)}
    for event in found:
        assert isinstance(event, ProgressEvent)
        steps[event.total].append(event.step)
    assert all(of_one == list(range(200)) for of_one in steps.values())
    assert _events(rank.receive(10)) == [InputReply("down")]


def test_an_empty_wait_returns_nothing_and_the_end_is_reported_after_the_last_event(
    ends: tuple[Channel, Channel],
) -> None:
    kernel, rank = ends
    assert kernel.receive(0.01) == []
    assert kernel.receive_available() == []
    rank.send(StatusEvent("running"))
    rank.close()
    assert _events(kernel.receive(5)) == [StatusEvent("running")]
    with pytest.raises(ChannelClosedError):
        kernel.receive(5)
    with pytest.raises(ChannelClosedError):
        kernel.send(StatusEvent("x"))


def test_a_closed_end_is_reported(ends: tuple[Channel, Channel]) -> None:
    kernel, _ = ends
    kernel.close()
    kernel.close()
    for use in (lambda: kernel.receive(0), lambda: kernel.send(StatusEvent("x")), kernel.receive_available):
        with pytest.raises(ChannelClosedError):
            use()


def test_a_message_of_any_size_to_a_rank_that_does_not_read_returns_immediately(ends: tuple[Channel, Channel]) -> None:
    kernel, rank = ends
    texts = ["x" * 3_000_000, *map(str, range(5000))]
    sender = threading.Thread(target=lambda: [kernel.send(InputReply(text)) for text in texts], daemon=True)
    sender.start()
    sender.join(60)
    assert not sender.is_alive()
    found: list[Event] = []
    while len(found) < len(texts):
        found += _events(rank.receive(60))
    assert found == [InputReply(text) for text in texts], (
        "the rank must read all of them, in order, when it reads again"
    )


def test_the_queue_for_a_rank_is_bounded(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, rank = ends
    monkeypatch.setattr(channel, "MAX_UNSENT_BYTES", 1_000_000)
    large = InputReply("x" * 3_000_000)
    kernel.send(large)
    with pytest.raises(ChannelClosedError, match="has stopped reading"):
        kernel.send(large)
    kernel.send(InputReply("small"))
    found: list[Event] = []
    while len(found) < 2:
        found += _events(rank.receive(60))
    assert found == [large, InputReply("small")]


@pytest.mark.parametrize("end", [0, 1])
def test_the_queue_for_a_rank_ends_with_the_channel(
    ends: tuple[Channel, Channel], end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "CHECK_CLOSED_SECONDS", 0.05)
    kernel, _ = ends
    kernel.send(InputReply("x" * 3_000_000))
    (sender,) = (thread for thread in threading.enumerate() if thread.name == "notebook-accelerate-send")
    ends[end].close()
    sender.join(60)
    assert not sender.is_alive()
    with pytest.raises(ChannelClosedError):
        kernel.send(InputReply("small"))
