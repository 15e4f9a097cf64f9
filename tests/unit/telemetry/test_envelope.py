"""The envelope of all ranks' values: its contents, the updates that it returns, and its maximum size."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from notebook_accelerate.telemetry import MetricEvent, Store
from notebook_accelerate.telemetry.curves import FEW_RANKS, MAX_BUCKETS, MetricEnvelope
from notebook_accelerate.telemetry.store import Record


def test_a_step_has_the_minimum_the_mean_and_the_maximum_of_all_ranks() -> None:
    envelope = MetricEnvelope()
    for step in range(10):
        for rank in range(5):
            envelope.add(step, 100.0 + step, rank + 10.0 * step)
    found = envelope.since()
    assert found.steps.tolist() == list(range(10))
    assert found.low.tolist() == [10.0 * step for step in range(10)]
    assert found.mean.tolist() == [10.0 * step + 2 for step in range(10)]
    assert found.high.tolist() == [10.0 * step + 4 for step in range(10)]
    assert found.cut == -math.inf


def test_only_changed_buckets_are_returned_again() -> None:
    envelope = MetricEnvelope()
    for step in range(10):
        envelope.add(step, 0.0, 1.0)
    found = envelope.since()
    assert not len(envelope.since(found.cursor).steps)
    envelope.add(8, 0.0, 3.0)
    envelope.add(10, 0.0, 2.0)
    new = envelope.since(found.cursor)
    assert new.steps.tolist() == [8, 9, 10]
    assert new.cut == 8
    assert new.mean.tolist() == [2.0, 1.0, 2.0]


@pytest.mark.parametrize("steps", [range(5_000), range(0, 500_000, 100), range(70_000, 60_000, -3)])
def test_it_never_exceeds_its_buckets_and_loses_no_extreme(steps: range) -> None:
    envelope, values = MetricEnvelope(), random.Random(0)
    given = [values.uniform(-1, 1) for _ in steps]
    for step, value in zip(steps, given, strict=True):
        envelope.add(step, float(step), value)
    found = envelope.since()
    assert MAX_BUCKETS / 4 <= len(found.steps) <= MAX_BUCKETS
    assert (np.nanmin(found.low), np.nanmax(found.high)) == (min(given), max(given))
    assert np.all(np.diff(found.steps) > 0)


def test_a_distant_step_takes_no_memory_for_the_steps_before() -> None:
    envelope = MetricEnvelope()
    for step in (5, 2**62, 0):
        envelope.add(step, 0.0, 1.0)
    assert len(envelope.since().steps) == 2
    assert len(envelope._count) <= MAX_BUCKETS


def test_values_that_are_not_finite_appear_in_the_mean_only() -> None:
    envelope = MetricEnvelope()
    for value in (1.0, math.nan, 3.0):
        envelope.add(0, 0.0, value)
    envelope.add(1, 0.0, math.inf)
    found = envelope.since()
    assert math.isnan(found.mean[0])
    assert (found.low[0], found.high[0]) == (1.0, 3.0)
    assert math.isnan(found.low[1])
    assert found.mean[1] == math.inf


def test_without_steps_it_runs_over_time() -> None:
    envelope = MetricEnvelope()
    for second in range(100):
        for rank in range(3):
            envelope.add(-1, 1000.0 + second, float(rank))
    found = envelope.since()
    assert np.isnan(found.steps).all()
    assert found.times.tolist() == [1000.0 + second for second in range(100)]
    assert set(found.mean.tolist()) == {1.0}


def test_a_store_keeps_an_envelope_of_metrics_that_many_ranks_log() -> None:
    store = Store()
    for rank in range(FEW_RANKS + 1):
        assert store.envelope("loss") is None
        store.add([Record(rank, 0.0, MetricEvent({"loss": float(rank)}, step)) for step in range(3)])
    found = store.envelope("loss")
    assert found is not None
    assert found.high.tolist() == [float(FEW_RANKS)] * 3
    assert found.mean.tolist() == [FEW_RANKS / 2] * 3
