"""Ranks' shard reports are sent and stored, and nonsense is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accelerate.telemetry import Channel, Store
from notebook_accelerate.telemetry.events import ShardingEvent
from notebook_accelerate.telemetry.sharding import ShardReport, ShardSizes, to_report
from notebook_accelerate.telemetry.store import Record
from tests.support.shard_reports import hybrid, megatron


@pytest.mark.parametrize("ranks", [hybrid(), megatron()], ids=["hybrid", "megatron"])
def test_a_report_arrives_unchanged(ranks: dict[int, ShardReport]) -> None:
    ours, socket = Channel.pair()
    theirs, store = Channel(socket), Store()
    try:
        for rank, one in ranks.items():
            theirs.send(one.event())
            (stamped,) = ours.receive(10)
            store.add([Record(rank, stamped.time, stamped.event)])
    finally:
        ours.close()
        theirs.close()
    assert store.shard_reports == ranks


def test_the_latest_report_of_a_rank_counts() -> None:
    store, (first, second) = Store(), list(hybrid().values())[:2]
    store.add([Record(0, 0.0, first.event()), Record(0, 1.0, second.event())])
    assert store.shard_reports == {0: second}


def _event(**changes: Any) -> ShardingEvent:
    held = {"parameters": {"whole": 8, "here": 4, "sharded": ["dp"], "offloaded": "", "note": ""}}
    return ShardingEvent(
        **{"strategy": "x", "variant": "", "axes": {"dp": 2}, "place": {"dp": 1}, "held": held, **changes}
    )


def test_unknown_values_remain_unknown() -> None:
    found = to_report(
        _event(held={"parameters": {"whole": None, "here": None, "sharded": [], "offloaded": "", "note": ""}})
    )
    assert found is not None
    assert found.held == {"parameters": ShardSizes(None, None)}


@pytest.mark.parametrize(
    "changes",
    [
        {"axes": None},
        {"axes": {"dp": "two"}},
        {"place": {}},
        {"place": {"dp": 2}},
        {"place": {"dp": -1}},
        {"held": {"parameters": 7}},
        {"held": {"parameters": {"whole": "much", "here": 1, "sharded": [], "offloaded": "", "note": ""}}},
        {"units": "many"},
    ],
)
def test_nonsense_is_dropped(changes: dict[str, Any]) -> None:
    store = Store()
    store.add([Record(0, 0.0, _event(**changes))])
    assert store.shard_reports == {}
    assert to_report(_event()) is not None
