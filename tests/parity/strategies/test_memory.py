"""Each rank needs less memory for parameters, gradients and optimizer state, as its strategy promises."""

from __future__ import annotations

from itertools import product

import pytest

from tests.parity.strategies.cells import SECONDS, machine, patient
from tests.parity.strategies.memory import ShardSizes, measured
from tests.parity.strategies.table import ON_FOUR, SLOW, STRATEGIES, case_of
from tests.support.nightly import rest_nightly
from tests.support.ranks import run_ranks

MOMENTS = 2
"""The number of tensors that AdamW keeps for each parameter, in the parameter's shape."""
# Allow for biases that are not split, the padding of parts, and a batch with its activations.
CLOSE = 0.06
PARTS = {
    "ddp": 1,
    "ddp, compiled": 1,
    "ddp, compiled to kernels": 1,
    "ddp, compiled regions": 1,
    "fsdp1, replicas of shards": 2,
    "fsdp1, replicas of gradients and optimizer": 2,
    "fsdp2, replicas of shards": 2,
}
"""The number of parts into which a model is split; by default, one part per rank."""
WHOLE_IN_BACKWARD = {
    "fsdp1, gradients and optimizer",
    "fsdp1, replicas of gradients and optimizer",
    "fsdp2, whole in backward",
}
ROWS = [(name, ranks) for name, ranks in [*product(STRATEGIES, (2, 4)), *product(ON_FOUR, (4,))]]


def promised(name: str, ranks: int) -> ShardSizes:
    share = 1 / PARTS.get(name, ranks)
    between = share + (1 if name in WHOLE_IN_BACKWARD else 0)
    return ShardSizes(parameters=share, between=between, gradients=share, state=MOMENTS * share)


@patient
@pytest.mark.parametrize(
    ("name", "ranks"),
    rest_nightly(ROWS, daily=lambda name, ranks: (ranks == 2 or name in ON_FOUR) and name not in SLOW),
)
def test_each_rank_holds_its_share(name: str, ranks: int) -> None:
    case = case_of(name, ranks)
    expected = promised(name, ranks)
    for rank, held in enumerate(run_ranks(measured, case, world_size=ranks, timeout=SECONDS, env=machine(case))):
        print(f"{name} on {ranks} ranks, rank {rank}: {held}")
        for kind, share in vars(expected).items():
            assert getattr(held, kind) == pytest.approx(share, abs=CLOSE), kind
