"""Losses and weights are bitwise equal to plain torch's."""

from __future__ import annotations

import pytest
import torch

from tests.parity.training.scripts import Case, Result, accelerated, both_on_a_rank, plain
from tests.support.ranks import run_ranks

CASES = {
    "as it is": Case(),
    "momentum": Case(adam=False),
    "accumulation": Case(accumulation=2),
    "accumulation, uneven last window": Case(samples=20, accumulation=2),
    "uneven data": Case(samples=22),
    "bf16": Case(precision="bf16"),
    "bf16, accumulation": Case(precision="bf16", accumulation=3),
    "fp16": Case(precision="fp16"),
    "fp16, clipping": Case(precision="fp16", clip=0.05),
    "clipping": Case(clip=0.1),
    "clipping by value": Case(clip_value=0.01, accumulation=2),
    "schedule": Case(schedule=True),
    "schedule, accumulation, clipping, uneven data": Case(
        samples=22, schedule=True, accumulation=2, clip=0.1, adam=False
    ),
}


def assert_equal(ours: Result, theirs: Result) -> None:
    assert ours[0] == theirs[0]
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_one_process_trains_like_plain_torch(case: Case) -> None:
    ours, theirs = accelerated(case), plain(case)
    assert_equal(ours, theirs)
    assert len(set(ours[0])) > 3  # The losses must change.


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_two_ranks_train_like_plain_torch(case: Case) -> None:
    results = run_ranks(both_on_a_rank, case)
    for ours, theirs in results:
        assert_equal(ours, theirs)
    assert results[0][0][0] != results[1][0][0]  # The ranks must read different batches,
    for first, second in zip(results[0][0][1], results[1][0][1], strict=True):
        assert torch.equal(first, second)  # but end with the same weights.
