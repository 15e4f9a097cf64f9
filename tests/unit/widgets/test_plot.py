"""The messages of a plot: first all points, and then new points, downsampled by M4."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np

from notebook_accelerate.launch.report.curves import Source
from notebook_accelerate.launch.report.svg_curves import COLOURS
from notebook_accelerate.telemetry import MetricEvent, Store
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.widgets.panel_elements import asset
from notebook_accelerate.widgets.plot import MAX_METRICS, MAX_NEW_POINTS, MAX_SERIES_POINTS, Plot


def _log(store: Store, steps: range, name: str = "loss", rank: int = 0) -> None:
    store.add([Record(rank, 100.0 + step, MetricEvent({name: float(step)}, step)) for step in steps])


def _points(message: dict[str, Any]) -> dict[tuple[str, str], list[list[float]]]:
    data = np.frombuffer(message["data"], dtype="<f8")
    found, at = {}, 0
    for metric, label, count in message["series"]:
        found[metric, label] = [data[at + k * count : at + (k + 1) * count].tolist() for k in range(3)]
        at += 3 * count
    assert at == len(data)
    return found


def _plot(store: Store) -> Plot:
    return Plot([Source(store, 100.0)])


def test_the_first_message_has_everything_and_the_next_the_new_points() -> None:
    store = Store()
    _log(store, range(3))
    plot = _plot(store)
    plot.update(0.0)
    assert _points(plot.full) == {("loss", "rank 0"): [[0, 1, 2], [0, 1, 2], [0, 1, 2]]}
    _log(store, range(3, 5))
    _log(store, range(2), rank=1)
    plot.update(0.2)
    assert _points(plot.delta) == {
        ("loss", "rank 0"): [[3, 4], [3, 4], [3, 4]],
        ("loss", "rank 1"): [[0, 1], [0, 1], [0, 1]],
    }
    assert plot.delta["prev"] == plot.full["seq"]
    before = plot.delta
    plot.update(0.3)
    assert plot.delta is before, "no message without new points"


def test_late_curves_start_with_a_full_message() -> None:
    """While the kernel is busy, a view cannot request the full message that a delta continues."""
    store = Store()
    plot = _plot(store)
    plot.update(0.0)
    plot.update(20.0)  # By now, the plot is older than all ages at which everything is sent again.
    _log(store, range(3))
    plot.update(20.2)
    assert _points(plot.full) == {("loss", "rank 0"): [[0, 1, 2], [0, 1, 2], [0, 1, 2]]}
    _log(store, range(3, 4))
    plot.update(20.4)
    assert plot.delta["prev"] == plot.full["seq"]


def test_an_update_of_one_point_is_a_hundred_bytes() -> None:
    store = Store()
    _log(store, range(20_000))
    plot = _plot(store)
    plot.update(0.0)
    _log(store, range(20_000, 20_001))
    plot.update(0.2)
    assert len(plot.delta["data"]) + len(str(plot.delta["series"])) < 100


def test_a_view_that_missed_a_message_gets_a_full_one() -> None:
    store = Store()
    _log(store, range(3))
    plot = _plot(store)
    plot.update(0.0)
    _log(store, range(3, 6))
    plot._on_message(plot, {"kind": "hello"}, [])
    plot.update(0.2)
    assert len(_points(plot.full)["loss", "rank 0"][0]) == 6
    _log(store, range(6, 7))
    # At a refresh age, everything is sent without a request, because the kernel may have been too busy to receive one.
    plot.update(0.5)
    assert len(_points(plot.full)["loss", "rank 0"][0]) == 7


def test_everything_is_sent_again_when_the_store_has_moved_its_points() -> None:
    store = Store(max_points=100)
    _log(store, range(90))
    plot = _plot(store)
    plot.update(0.0)
    plot.update(20.0)
    seq = plot.full["seq"]
    _log(store, range(90, 110))
    plot.update(20.2)
    assert plot.full["seq"] == seq + 1
    assert _points(plot.full)["loss", "rank 0"][2][-1] == 109


def test_extremes_survive_downsampling() -> None:
    store = Store()
    _log(store, range(40_000))
    store.add([Record(0, 1e5, MetricEvent({"loss": -1e6}, 40_000))])
    _log(store, range(40_001, 45_000))
    plot = _plot(store)
    plot.update(0.0)
    values = _points(plot.full)["loss", "rank 0"][2]
    assert len(values) <= MAX_SERIES_POINTS * 1.25
    assert min(values) == -1e6
    _log(store, range(45_000, 49_000))
    plot.update(0.2)
    assert len(_points(plot.delta)["loss", "rank 0"][2]) <= MAX_NEW_POINTS * 1.25


def test_two_hundred_thousand_points_are_sent_within_a_second() -> None:
    store = Store()
    for rank in range(4):
        _log(store, range(49_900), rank=rank)
    begin = time.thread_time()  # Measure CPU time, because test machines are busy.
    plot = _plot(store)
    plot.update(0.0)
    seconds = time.thread_time() - begin
    print(f"\na plot of 200,000 points: {1000 * seconds:.0f} ms, {len(plot.full['data']) / 1000:.0f} kB")
    assert seconds < 1.0
    assert len(plot.full["data"]) < 400_000


def test_more_metrics_than_are_sent_are_found_by_name() -> None:
    store = Store()
    for index in range(MAX_METRICS + 50):
        _log(store, range(1), name=f"metric {index:03}")
    plot = _plot(store)
    plot.update(0.0)
    assert len(plot.full["series"]) == MAX_METRICS
    assert plot.hidden_metrics == 50
    plot.wanted = "249"
    plot.update(0.2)
    assert [name for name, _, _ in plot.full["series"]] == ["metric 249"]


def test_metrics_without_steps_are_drawn_over_time() -> None:
    store = Store()
    store.add([Record(0, 105.0, MetricEvent({"loss": 1.0}))])
    plot = _plot(store)
    plot.update(0.0)
    assert _points(plot.full)["loss", "rank 0"] == [[5.0], [5.0], [1.0]]


def test_overlaid_runs_have_a_curve_each() -> None:
    stores = [Store(), Store()]
    for store in stores:
        for rank in range(3):
            _log(store, range(2), rank=rank)
    plot = Plot([Source(store, 100.0, f"run {index}", ranks=False) for index, store in enumerate(stores)])
    plot.update(0.0)
    assert set(_points(plot.full)) == {("loss", "run 0"), ("loss", "run 1")}


def test_images_and_live_plots_repeat_their_colours_after_the_same_number_of_curves() -> None:
    palettes = re.findall(r"^  (?:light|dark): \[(.+)\],$", asset("looks.js"), re.MULTILINE)
    assert [len(palette.split(",")) for palette in palettes] == [len(COLOURS)] * 2
