"""The points that M4 keeps when it thins a curve."""

from __future__ import annotations

import math

import numpy as np
import pytest

from notebook_accelerate.telemetry.curves import m4


def test_a_short_curve_is_kept_whole() -> None:
    assert m4(np.arange(10.0), 10).tolist() == list(range(10))
    assert m4(np.empty(0), 4).tolist() == []


@pytest.mark.parametrize("count", [41, 1000, 1001, 12_345])
def test_ends_and_extremes_are_kept(count: int) -> None:
    values = np.sin(np.arange(count) / 7.0)
    values[count // 3], values[count // 2], values[-3] = 1e9, -1e9, math.nan
    kept = m4(values, 40)
    assert len(kept) <= 50
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert {0, count // 3, count // 2, count - 3, count - 1} <= set(kept.tolist())


def test_every_group_keeps_its_own_extremes() -> None:
    values = np.random.default_rng(0).normal(size=4000)
    kept = m4(values, 400)
    for begin in range(0, 4000, 40):
        group = values[begin : begin + 40]
        inside = values[kept[(kept >= begin) & (kept < begin + 40)]]
        assert (inside.min(), inside.max()) == (group.min(), group.max())
        assert (inside[0], inside[-1]) == (group[0], group[-1])


def test_a_curve_of_only_nan_is_thinned() -> None:
    assert 0 < len(m4(np.full(1000, math.nan), 40)) <= 60
