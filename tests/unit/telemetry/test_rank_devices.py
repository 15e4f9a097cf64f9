"""The devices of ranks: the ranks' own counters are joined with the driver's measurements. Nonsense is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accelerate.launch import Run
from notebook_accelerate.launch.report.rank_tables import device_table
from notebook_accelerate.launch.report.run_snapshot import RunWatcher
from notebook_accelerate.telemetry import DeviceMemoryEvent, DeviceUseEvent, Store
from notebook_accelerate.telemetry.rank_devices import MAX_DEVICES, RankDevices
from notebook_accelerate.telemetry.store import Record
from tests.support.runs import START, devices, end, feed, make_run

GIB = 1 << 30


def _device_rows(run: Run) -> list[list[str]]:
    table = device_table(RunWatcher(run).snapshot(START).ranks)
    return [[column.title for column in table.columns], *(list(map(str, row.cells)) for row in table.rows)]


def _memory(device: str = "cuda:0", peak: int = 3 * GIB, **changes: Any) -> DeviceMemoryEvent:
    given = {"allocated": GIB, "reserved": 2 * GIB, "peak": peak, "total": 15 * GIB, "name": "Tesla T4", "uuid": "a"}
    return DeviceMemoryEvent(device, **{**given, **changes})


def test_figures_are_joined_by_the_devices_identity() -> None:
    found = RankDevices()
    found.add_memory(1, _memory())
    found.add_use(DeviceUseEvent("b", 10.0, GIB, 15 * GIB))
    (alone,) = found.of_rank(1)
    assert (alone.percent, alone.used, alone.total) == (None, None, 15 * GIB)
    found.add_use(DeviceUseEvent("a", 90.0, 5 * GIB, 15 * GIB))
    (joined,) = found.of_rank(1)
    assert (joined.percent, joined.used, joined.allocated, joined.peak) == (90.0, 5 * GIB, GIB, 3 * GIB)
    assert found.of_rank(0) == []


def test_a_peak_survives_its_reset_and_a_new_attempt() -> None:
    found = RankDevices()
    for peak in (GIB, 7 * GIB, 2 * GIB):
        found.add_memory(0, _memory(peak=peak))
    assert found.of_rank(0)[0].peak == 7 * GIB


def test_the_ranks_on_a_device_follow_its_identity() -> None:
    found = RankDevices()
    for rank in (0, 1):
        found.add_memory(rank, _memory())
    found.add_memory(0, _memory("cuda:1"))
    found.add_memory(0, _memory(uuid="b"))  # After a restart, the rank may be on another machine.
    assert (found.ranks_on("a"), found.ranks_on("b"), found.ranks_on("c")) == ([0, 1], [0], [])
    found.add_memory(0, _memory("cuda:1", uuid="c"))
    assert (found.ranks_on("a"), found.ranks_on("b"), found.ranks_on("c")) == ([1], [0], [0])
    for index in range(1000):
        found.add_memory(1, _memory(uuid=f"{index}"))
    assert found.ranks_on("a") == []
    assert len(found._on) == 3


def test_devices_are_in_the_order_of_their_numbers() -> None:
    found = RankDevices()
    for index in (10, 2, 0):
        found.add_memory(0, _memory(f"cuda:{index}"))
    assert [device.device for device in found.of_rank(0)] == ["cuda:0", "cuda:2", "cuda:10"]


@pytest.mark.parametrize(
    "event",
    [_memory(allocated="much"), _memory(peak=-1), _memory(reserved=None), _memory(name=3), _memory(total=1 << 70)],
)
def test_nonsense_from_a_rank_is_dropped(event: DeviceMemoryEvent) -> None:
    found = RankDevices()
    found.add_memory(0, event)
    assert found.of_rank(0) == []


def test_a_rank_cannot_fill_the_kernels_memory() -> None:
    found = RankDevices()
    for index in range(10 * MAX_DEVICES):
        found.add_memory(0, _memory(f"cuda:{index}"))
        found.add_use(DeviceUseEvent(str(index), 0.0, 0, 0))
    assert len(found.of_rank(0)) == MAX_DEVICES
    assert len(found._use) <= MAX_DEVICES


def test_measurements_of_a_host_are_not_an_activity_of_a_rank() -> None:
    store = Store()
    store.add([Record(0, 5.0, DeviceUseEvent("a", 1.0, 1, 1))])
    assert store.last_activity == {}


def test_running_and_finished_ranks_have_rows() -> None:
    run = make_run(2)
    feed(run, *devices(0, 45.0, 2 * GIB), rank=0)
    head, row = _device_rows(run)
    assert dict(zip(head, row, strict=True)) == {
        "rank": "0", "device": "cuda:0", "model": "Tesla T4 · 16.1 GB", "use": "45 %", "allocated": "1.07 GB",
        "reserved": "2.15 GB", "peak allocated": "1.07 GB", "in use on the device": "2.42 GB", "uuid": "00000000",
    }  # fmt: skip
    end(run)
    assert _device_rows(run) == [
        ["rank", "device", "model", "peak allocated", "uuid"],
        ["0", "cuda:0", "Tesla T4 · 16.1 GB", "1.07 GB", "00000000"],
    ]


def test_many_ranks_have_a_row_per_node_that_counts_a_shared_device_once() -> None:
    run = make_run(32, host_of=lambda rank: (rank // 16, f"host{rank // 16}"))
    for rank in range(32):
        feed(run, *devices(rank // 2, 40.0 + 20 * (rank >= 16), 2 * GIB), rank=rank)
    rows = _device_rows(run)
    assert [row[:6] for row in rows[1:]] == [
        ["node 0 · host0", "8", "Tesla T4 · 16.1 GB", "40 %", "17.2 GB", "34.4 GB"],
        ["node 1 · host1", "8", "Tesla T4 · 16.1 GB", "60 %", "17.2 GB", "34.4 GB"],
    ]
    assert rows[1][-1] == "19.3 GB", "the sum is over eight devices, not over sixteen ranks"
