"""Losses and weights equal those of the real Accelerate, which must be installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.parity.training.scripts import Case, Result, accelerated
from tests.parity.training.test_plain_torch import CASES, assert_equal
from tests.support.ranks import run_ranks

pytest.importorskip("accelerate", reason="the real package is not installed: make test-parity")

# On the CPU, Accelerate refuses fp16.
SHARED = {name: case for name, case in CASES.items() if case.precision != "fp16"}


@pytest.fixture(autouse=True)
def fresh_original() -> Iterator[None]:
    yield
    state = import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


@pytest.mark.parametrize("case", SHARED.values(), ids=list(SHARED))
def test_one_process_trains_like_accelerate(case: Case) -> None:
    assert_equal(accelerated(case), accelerated(case, "accelerate"))


def both(case: Case) -> tuple[Result, Result]:
    """Train with both packages on one rank. The second one uses the process group that the first one created."""
    return accelerated(case, "accelerate"), accelerated(case)


@pytest.mark.parametrize("case", SHARED.values(), ids=list(SHARED))
def test_two_ranks_train_like_accelerate(case: Case) -> None:
    for theirs, ours in run_ranks(both, case):
        assert_equal(ours, theirs)
