"""The band over all ranks: what it keeps, what it tells of as new, and how much it may hold."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from notebook_accelerate.telemetry import MetricEvent, Store
from notebook_accelerate.telemetry.envelope import BAND_FROM, MAX_BUCKETS, MetricEnvelope
from notebook_accelerate.telemetry.store import Record


def test_a_step_has_the_smallest_the_mean_and_the_largest_of_all_ranks() -> None:
    band = MetricEnvelope()
    for step in range(10):
        for rank in range(5):
            band.add(step, 100.0 + step, rank + 10.0 * step)
    told = band.since()
    assert told.steps.tolist() == list(range(10))
    assert told.low.tolist() == [10.0 * step for step in range(10)]
    assert told.mean.tolist() == [10.0 * step + 2 for step in range(10)]
    assert told.high.tolist() == [10.0 * step + 4 for step in range(10)]
    assert told.cut == -math.inf


def test_only_what_has_changed_is_told_again() -> None:
    band = MetricEnvelope()
    for step in range(10):
        band.add(step, 0.0, 1.0)
    told = band.since()
    assert not len(band.since(told.cursor).steps)
    band.add(8, 0.0, 3.0)
    band.add(10, 0.0, 2.0)
    new = band.since(told.cursor)
    assert new.steps.tolist() == [8, 9, 10]
    assert new.cut == 8
    assert new.mean.tolist() == [2.0, 1.0, 2.0]


@pytest.mark.parametrize("steps", [range(5_000), range(0, 500_000, 100), range(70_000, 60_000, -3)])
def test_it_never_holds_more_buckets_and_loses_no_extreme(steps: range) -> None:
    band, values = MetricEnvelope(), random.Random(0)
    given = [values.uniform(-1, 1) for _ in steps]
    for step, value in zip(steps, given, strict=True):
        band.add(step, float(step), value)
    told = band.since()
    assert MAX_BUCKETS / 4 <= len(told.steps) <= MAX_BUCKETS
    assert (np.nanmin(told.low), np.nanmax(told.high)) == (min(given), max(given))
    assert np.all(np.diff(told.steps) > 0)


def test_a_far_step_does_not_take_the_memory_for_what_lies_between() -> None:
    band = MetricEnvelope()
    for step in (5, 2**62, 0):
        band.add(step, 0.0, 1.0)
    assert len(band.since().steps) == 2
    assert len(band._count) <= MAX_BUCKETS


def test_what_is_not_finite_is_seen_in_the_mean_and_not_in_the_edges() -> None:
    band = MetricEnvelope()
    for value in (1.0, math.nan, 3.0):
        band.add(0, 0.0, value)
    band.add(1, 0.0, math.inf)
    told = band.since()
    assert math.isnan(told.mean[0])
    assert (told.low[0], told.high[0]) == (1.0, 3.0)
    assert math.isnan(told.low[1])
    assert told.mean[1] == math.inf


def test_without_steps_it_runs_over_time() -> None:
    band = MetricEnvelope()
    for second in range(100):
        for rank in range(3):
            band.add(-1, 1000.0 + second, float(rank))
    told = band.since()
    assert np.isnan(told.steps).all()
    assert told.times.tolist() == [1000.0 + second for second in range(100)]
    assert set(told.mean.tolist()) == {1.0}


def test_a_store_keeps_one_once_many_ranks_have_logged_a_metric() -> None:
    store = Store()
    for rank in range(BAND_FROM + 1):
        assert store.band("loss") is None
        store.add([Record(rank, 0.0, MetricEvent({"loss": float(rank)}, step)) for step in range(3)])
    told = store.band("loss")
    assert told is not None
    assert told.high.tolist() == [float(BAND_FROM)] * 3
    assert told.mean.tolist() == [BAND_FROM / 2] * 3
