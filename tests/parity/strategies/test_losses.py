"""Every strategy's losses equal those of one process in plain torch, even after the run was killed and resumed.

One combination per strategy runs daily; `make test-nightly` runs all combinations of precision, accumulation and ranks.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.parity.strategies.cells import ACCUMULATION, TOLERANCE, assert_trains_and_resumes, patient
from tests.parity.strategies.table import ON_FOUR, SLOW, STRATEGIES, case_of
from tests.support.nightly import rest_nightly

TABLE: list[tuple[str, int]] = [*product(STRATEGIES, (2, 4)), *product(ON_FOUR, (4,))]
CELLS = rest_nightly(
    [(*row, precision, accumulation) for row, precision, accumulation in product(TABLE, TOLERANCE, ACCUMULATION)],
    daily=lambda name, ranks, *how: how == ("no", 1) and (ranks == 2 or name in ON_FOUR) and name not in SLOW,
)


@patient
@pytest.mark.parametrize(("name", "ranks", "precision", "accumulation"), CELLS)
def test_a_strategy_trains_like_plain_torch_and_resumes(
    name: str, ranks: int, precision: str, accumulation: int, tmp_path: Path
) -> None:
    case = case_of(name, ranks, precision=precision, accumulation=accumulation)
    assert_trains_and_resumes(case, ranks, tmp_path)
