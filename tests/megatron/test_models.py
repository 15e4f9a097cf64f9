"""Encoders and encoder-decoders: their training steps on one rank, and on two ranks that share tensors."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from tests.megatron.trainings import Case, run
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)

CLOSE = 1e-5
START = {"bert": math.log(32), "classifier": math.log(3), "t5": math.log(32)}
"""The loss of an untrained model, by kind."""


@pytest.mark.parametrize("kind", list(START))
def test_two_ranks_train_like_one(kind: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    (alone,) = run_ranks(run, Case(kind=kind, save_after=0, save_to=folder), world_size=1)
    assert alone[0][0] == pytest.approx(START[kind], rel=0.1)
    for found in run_ranks(run, Case(kind=kind, tp=2, start=folder, skipped=1), world_size=2):
        for mine, theirs in zip(found, alone[1:], strict=True):
            assert mine == pytest.approx(theirs, rel=CLOSE)


@pytest.mark.parametrize(("tp", "ranks"), [(1, 2), (2, 4)], ids=["stages", "tensors and stages"])
def test_the_stages_of_an_encoder_train_like_one_model(tp: int, ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    (alone,) = run_ranks(run, Case(kind="bert", save_after=0, save_to=folder), world_size=1)
    for found in run_ranks(run, Case(kind="bert", tp=tp, pp=2, start=folder, skipped=1), world_size=ranks):
        for mine, theirs in zip(found, alone[1:], strict=True):
            assert mine == pytest.approx(theirs, rel=CLOSE)


def test_stages_of_an_encoder_decoder_are_refused() -> None:
    with pytest.raises(RankError, match="pp_degree=2 is not available for T5: megatron-core keeps"):
        run_ranks(run, Case(kind="t5", pp=2), world_size=2)
