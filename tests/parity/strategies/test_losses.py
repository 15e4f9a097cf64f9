"""Every strategy's losses are those of one process in plain torch.

One cell per strategy runs always; TEST_STRATEGIES=all (`make test-strategies`) runs the table times precisions times
accumulation.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest

from tests.parity.strategies.scripts import Case, accelerated, plain
from tests.parity.strategies.table import ON_FOUR, STRATEGIES
from tests.support.ranks import run_ranks

ALL = os.environ.get("TEST_STRATEGIES") == "all"
# fp32: sums in another order. bf16: the units' weights are rounded once more than by autocast.
TOLERANCE = {"no": 1e-5, "bf16": 1e-2}
WHOLE_TABLE = {name for name in STRATEGIES if ALL or name == "fsdp2"}
CELLS = [
    (name, precision, accumulation)
    for name, precision, accumulation in product(STRATEGIES, TOLERANCE, (1, 4))
    if name in WHOLE_TABLE or (precision, accumulation) == ("no", 1)
]


def assert_trains_as_plain(case: Case, world_size: int) -> list[dict[str, Any]]:
    results = run_ranks(accelerated, case, world_size=world_size)
    expected = plain(case)
    assert results[0]["losses"] == pytest.approx(expected, rel=TOLERANCE[case.precision])
    assert expected[-1] < 0.75 * expected[0]  # it trains
    return results


@pytest.mark.parametrize(("name", "precision", "accumulation"), CELLS)
def test_two_ranks(name: str, precision: str, accumulation: int) -> None:
    case = Case(**STRATEGIES[name], precision=precision, accumulation=accumulation)
    assert_trains_as_plain(case, 2)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(name: str) -> None:
    assert_trains_as_plain(Case(**ON_FOUR[name], steps=12), 4)


def test_each_rank_holds_its_share() -> None:
    whole = assert_trains_as_plain(Case(**STRATEGIES["ddp"]), 2)[0]
    for name in ("fsdp1", "fsdp2"):
        for shard in assert_trains_as_plain(Case(**STRATEGIES[name]), 2):
            assert shard["elements"] <= 0.51 * whole["elements"]
            assert shard["state"] <= 0.52 * whole["state"]
