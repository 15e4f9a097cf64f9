"""The bounded store: its contents, thinning and notifications."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from notebook_accelerate.telemetry import (
    DroppedEvent,
    Event,
    LogEvent,
    MetricEvent,
    Metrics,
    ProgressEvent,
    ResourceEvent,
    Store,
    store as store_module,
)
from notebook_accelerate.telemetry.store import Record


def _feed(store: Store, *events: Event, rank: int = 0, start: float = 0.0) -> None:
    store.add([Record(rank, start + index, event) for index, event in enumerate(events)])


def _metrics(values: list[float], name: str = "loss") -> list[Event]:
    return [MetricEvent({name: value}, step) for step, value in enumerate(values)]


def test_a_series_has_all_ranks_in_order_of_time() -> None:
    store = Store()
    _feed(store, *_metrics([1.0, 2.0]), rank=1, start=10.0)
    _feed(store, *_metrics([5.0, 6.0]), rank=0, start=10.5)
    series = Metrics(store)["loss"]
    assert series.values.tolist() == [1.0, 5.0, 2.0, 6.0]
    assert series.ranks.tolist() == [1, 0, 1, 0]
    assert series.steps.tolist() == [0, 0, 1, 1]
    assert series.rank(0).values.tolist() == [5.0, 6.0]
    assert not series.thinned
    assert (series.steps.dtype, series.values.dtype) == (np.int64, np.float64)


def test_thinning_keeps_bounds_extremes_and_nan() -> None:
    store = Store(max_points=400)
    values = [math.sin(step / 7) for step in range(10_000)]
    values[1234], values[5678], values[4321] = 1e9, -1e9, math.nan
    _feed(store, *_metrics(values))
    series = store.series("loss")
    assert series.thinned
    assert len(series.values) <= 400
    assert np.nanmax(series.values) == 1e9
    assert np.nanmin(series.values) == -1e9
    assert np.isnan(series.values).any()
    assert 1234 in series.steps
    assert 4321 in series.steps
    assert series.steps.tolist() == sorted(series.steps.tolist())
    assert series.values[-1] == values[-1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_series_without_finite_values_stays_within_its_bound(value: float) -> None:
    store = Store(max_points=64)
    _feed(store, *_metrics([value] * 5000))
    series = store.series("loss")
    assert len(series.values) <= 64
    assert np.isclose(series.values[0], value, equal_nan=True)


def test_all_series_together_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_TOTAL_POINTS", 10_000)
    store = Store()
    for name in range(100):  # On arrival, each curve has more points than the final limit allows.
        for step in range(2_000):
            _feed(store, MetricEvent({f"m{name}": math.nan if step % 3 else float(step)}, step))
        kept = [len(store.series(each).values) for each in store.metric_names()]
        assert sum(kept) == store._points_count <= 10_000
    assert min(kept) > 10


def test_infinities_among_nan_survive() -> None:
    store = Store(max_points=64)
    values = [math.nan] * 1000
    values[77], values[78] = math.inf, -math.inf
    _feed(store, *_metrics(values))
    kept = store.series("loss").values
    assert np.isposinf(kept).any()
    assert np.isneginf(kept).any()


def test_all_points_with_the_same_value_are_thinned() -> None:
    store = Store(max_points=16)
    _feed(store, *_metrics([1.0] * 1000))
    assert 0 < len(store.series("loss").values) <= 16


def test_too_many_names_are_counted_as_dropped() -> None:
    store = Store(max_series=3)
    _feed(store, MetricEvent({f"m{index}": 1.0 for index in range(5)}, 0))
    assert store.metric_names() == ["m0", "m1", "m2"]
    assert store.dropped == {0: 2}
    _feed(store, DroppedEvent(4))
    assert store.dropped == {0: 6}


def test_a_missing_step_continues_the_last_one() -> None:
    store = Store()
    _feed(store, MetricEvent({"a": 1.0}), MetricEvent({"a": 1.0}, 7), MetricEvent({"a": 2.0}))
    assert store.series("a").steps.tolist() == [-1, 7, 7]
    assert store.last_step == {0: 7}


def test_values_that_are_not_numbers_do_not_break_the_store() -> None:
    """Messages from a rank must never end the supervision of the run."""
    store = Store()
    _feed(store, MetricEvent({"text": "hello", "none": None, "good": 1.0}, 0))  # type: ignore[dict-item]
    assert store.series("good").values.tolist() == [1.0]
    _feed(store, MetricEvent({"good": 2.0}, "not a step"))  # type: ignore[arg-type]
    _feed(store, MetricEvent({"good": 3.0}, 2**70))
    _feed(store, MetricEvent({"good": 4.0}, 5))
    assert store.series("good").values.tolist() == [1.0, 4.0]
    assert store.dropped == {0: 4}
    assert store.last_step == {0: 5}


def test_an_unknown_metric_lists_the_known_ones() -> None:
    store = Store()
    with pytest.raises(KeyError, match="no metric has been logged yet"):
        store.series("loss")
    _feed(store, *_metrics([1.0], "accuracy"))
    with pytest.raises(KeyError, match="accuracy"):
        Metrics(store)["loss"]


def test_logs_keep_the_end_within_the_bound() -> None:
    store = Store(max_log_bytes=10_000)
    for number in range(100):
        _feed(store, LogEvent("stdout", f"line {number}\n{'x' * 100}"), start=float(number))
    lines = store.log_lines(0)
    assert sum(len(line.text) + 64 for line in lines) <= 10_000
    assert lines[-2].text == "line 99"
    assert lines[-1].stream == "stdout"
    assert store.log_lines(5) == []


def test_one_line_beyond_the_bound_is_kept_alone() -> None:
    store = Store(max_log_bytes=100)
    _feed(store, LogEvent("stdout", "a"), LogEvent("stdout", "b" * 10_000))
    assert [len(line.text) for line in store.log_lines(0)] == [10_000]


def test_progress_resources_and_heartbeats_are_stored() -> None:
    store = Store()
    _feed(store, ProgressEvent(3, 10), start=5.0)
    _feed(store, ResourceEvent(10.0, 500), ResourceEvent(20.0, 300), start=100.0)
    assert store.last_step == {0: 3}
    assert store.peak_memory == {0: 500}
    assert store.resources[0].memory_bytes == 300
    assert store.last_activity == {0: 5.0}, "a sample is not a heartbeat of the rank"


def test_additions_count_as_changes() -> None:
    store = Store()
    before = store.changes
    _feed(store, *_metrics([1.0]))
    assert store.changes > before
    added, before = Store(), store.changes
    added.add_points("loss", 0, store.tail("loss", 0))
    assert added.changes == 1
    assert store.changes == before, "reading is not a change"


def test_many_threads_may_read_and_write() -> None:
    store, problems = Store(max_points=100), []

    def write(rank: int) -> None:
        for step in range(3000):
            store.add([Record(rank, float(step), MetricEvent({"loss": 1.0, f"own {rank}": 2.0}, step))])

    def read() -> None:
        try:
            for _ in range(200):
                for series in Metrics(store).values():
                    assert len(series.values) == len(series.steps) == len(series.ranks)
        except Exception as error:  # noqa: BLE001 - carried to the test's thread
            problems.append(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(3)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert sorted(Metrics(store)) == ["loss", "own 0", "own 1", "own 2"]


def test_metrics_are_a_mapping_and_frames() -> None:
    pytest.importorskip("pandas")
    store = Store()
    metrics = Metrics(store)
    assert (len(metrics), dict(metrics), "loss" in metrics) == (0, {}, False)
    assert list(metrics.to_pandas().columns) == ["name", "step", "time", "rank", "value"]
    _feed(store, MetricEvent({"loss": 2.0, "acc": 0.5}, 1), rank=1)
    assert list(metrics) == ["loss", "acc"]
    assert "loss" in metrics
    assert metrics.get("absent") is None
    frame = metrics.to_pandas()
    assert frame.to_dict("list") == {
        "name": ["loss", "acc"], "step": [1, 1], "time": [0.0, 0.0], "rank": [1, 1], "value": [2.0, 0.5],
    }  # fmt: skip
    assert list(metrics["loss"].to_pandas().columns) == ["step", "time", "rank", "value"]
    assert "loss, acc" in repr(metrics)


def test_a_tail_continues_where_the_last_one_ended() -> None:
    store = Store(max_points=100)
    _feed(store, *_metrics([1.0, 2.0]))
    first = store.tail("loss", 0)
    assert (first.values.tolist(), first.whole) == ([1.0, 2.0], True)
    _feed(store, *_metrics([3.0]))
    second = store.tail("loss", 0, first.cursor)
    assert (second.values.tolist(), second.whole) == ([3.0], False)
    assert store.tail("loss", 0, second.cursor).values.tolist() == []
    _feed(store, *_metrics([float(value) for value in range(200)]))
    third = store.tail("loss", 0, second.cursor)
    assert third.whole, "thinning moved the points, so the tail must contain them all"
    assert third.values.tolist() == store.series("loss").values.tolist()
    assert store.ranks_of("loss") == [0]
    assert store.ranks_of("other") == []


def test_the_more_series_the_fewer_points_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_accelerate.telemetry.store.MAX_TOTAL_POINTS", 1000)
    store = Store()
    for step in range(2000):
        _feed(store, MetricEvent({f"m{index}": float(step) for index in range(10)}, step))
    kept = [len(store.series(name).values) for name in store.metric_names()]
    assert sum(kept) <= 1000
    assert min(kept) > 40


def test_a_log_tail_has_the_newest_lines() -> None:
    store = Store()
    _feed(store, LogEvent("stdout", "a\nb"), LogEvent("stderr", "c"))
    lines, cursor, skipped = store.log_tail(0)
    assert ([line.text for line in lines], skipped) == (["a", "b", "c"], 0)
    assert store.log_tail(0, cursor) == ([], cursor, 0)
    _feed(store, LogEvent("stdout", "\n".join(str(number) for number in range(1000))), LogEvent("stdout", "end"))
    lines, cursor, skipped = store.log_tail(0, cursor, limit=3)
    assert ([line.text for line in lines], skipped) == (["998", "999", "end"], 998)
    assert store.log_tail(7) == ([], 0, 0)


def test_a_progress_bar_does_not_replace_the_optimizers_count() -> None:
    store = Store()
    _feed(store, ProgressEvent(1, 3, "epochs"))
    assert store.last_step == {0: 1}
    _feed(store, ProgressEvent(70), ProgressEvent(2, 3, "epochs"))
    assert store.last_step == {0: 70}
    assert store.loops[0].label == "epochs"
