"""A GPT on megatron-core, with its tensors and stages split across ranks, compared with the same GPT in plain torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.megatron.trainings import Case, beside_plain, run
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)

CLOSE = 1e-5
"""The relative tolerance for float32 sums that are computed in another order."""
HALF_WAY = 2


def test_one_rank_trains_like_plain_torch() -> None:
    ((found, expected),) = run_ranks(beside_plain, Case(), world_size=1)
    assert len(found) == len(expected) == 6
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=CLOSE)
    assert found[-1][0] < found[0][0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float]]]:
    """Return a checkpoint that one rank wrote halfway through its training, and the results of that training."""
    folder = tmp_path_factory.mktemp("one") / "checkpoint"
    (found,) = run_ranks(run, Case(save_after=HALF_WAY, save_to=str(folder)), world_size=1)
    return folder, found


def test_a_resumed_training_equals_an_uninterrupted_one(checkpoint: tuple[Path, list[tuple[float, float]]]) -> None:
    folder, expected = checkpoint
    (found,) = run_ranks(run, Case(start=str(folder), skipped=HALF_WAY + 1), world_size=1)
    assert found == expected[HALF_WAY + 1 :]


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (Case(tp=2), 2),
        (Case(pp=2), 2),
        (Case(batch_size=2), 2),
        (Case(tp=2, more={"recompute_activations": True}), 2),
        (Case(pp=2, micro_batches=4, batch_size=2, more={"calculate_per_token_loss": True}), 2),
    ],
    ids=["tensors", "stages", "data", "recomputed", "loss of tokens"],
)
def test_splitting_does_not_change_the_loss(
    case: Case, ranks: int, checkpoint: tuple[Path, list[tuple[float, float]]]
) -> None:
    folder, expected = checkpoint
    case.start, case.skipped = str(folder), HALF_WAY + 1
    for found in run_ranks(run, case, world_size=ranks):
        for mine, theirs in zip(found, expected[HALF_WAY + 1 :], strict=True):
            assert mine == pytest.approx(theirs, rel=CLOSE)


def test_tensors_and_stages_together_can_be_saved_and_resumed(
    checkpoint: tuple[Path, list[tuple[float, float]]], tmp_path: Path
) -> None:
    folder, expected = checkpoint
    again = tmp_path / "again"
    case = Case(tp=2, pp=2, start=str(folder), skipped=HALF_WAY + 1, save_after=HALF_WAY + 2, save_to=str(again))
    four = run_ranks(run, case, world_size=4)
    for found in four:
        for mine, theirs in zip(found, expected[HALF_WAY + 1 :], strict=True):
            assert mine == pytest.approx(theirs, rel=CLOSE)
    assert {path.name for path in again.iterdir()} >= {
        "iter_0000005",
        "latest_checkpointed_iteration.txt",
        "checkpoint_manifest.json",
    }
    resumed = run_ranks(run, Case(tp=2, pp=2, start=str(again), skipped=HALF_WAY + 3), world_size=4)
    assert resumed == [found[2:] for found in four]
    (one,) = run_ranks(run, Case(start=str(again), skipped=HALF_WAY + 3), world_size=1)
    for mine, theirs in zip(one, expected[HALF_WAY + 3 :], strict=True):
        assert mine == pytest.approx(theirs, rel=CLOSE)


def test_bf16_follows_float32() -> None:
    (half,) = run_ranks(run, Case(precision="bf16"), world_size=1)
    (whole,) = run_ranks(run, Case(), world_size=1)
    assert [loss for loss, _ in half] == pytest.approx([loss for loss, _ in whole], rel=2e-2)
    assert half != whole


def test_interleaved_stages_train_like_one_model(tmp_path: Path) -> None:
    folder, deeper = str(tmp_path / "checkpoint"), {"other_megatron_args": {"num_layers": 4}}
    (alone,) = run_ranks(run, Case(more=deeper, save_after=0, save_to=folder), world_size=1)
    case = Case(pp=2, start=folder, skipped=1, more={**deeper, "num_layers_per_virtual_pipeline_stage": 1})
    for found in run_ranks(run, case, world_size=2):
        for mine, theirs in zip(found, alone[1:], strict=True):
            assert mine == pytest.approx(theirs, rel=CLOSE)


SHARED = {"use_distributed_optimizer": True}


def test_a_distributed_optimizer_trains_like_a_whole_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    (alone,) = run_ranks(run, Case(), world_size=1)
    case = Case(batch_size=2, more=SHARED, save_after=HALF_WAY, save_to=folder)
    for found in run_ranks(run, case, world_size=2):
        for mine, theirs in zip(found, alone, strict=True):
            assert mine == pytest.approx(theirs, rel=CLOSE)
    case = Case(batch_size=2, more=SHARED, start=folder, skipped=HALF_WAY + 1)
    for found in run_ranks(run, case, world_size=2):
        for mine, theirs in zip(found, alone[HALF_WAY + 1 :], strict=True):
            assert mine == pytest.approx(theirs, rel=CLOSE)
    (one,) = run_ranks(run, Case(more=SHARED, start=folder, skipped=HALF_WAY + 1), world_size=1)
    assert [loss for loss, _ in one] == pytest.approx([loss for loss, _ in alone[HALF_WAY + 1 :]], rel=CLOSE)


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
def test_a_distributed_optimizer_can_resume(tmp_path: Path) -> None:
    folder, ranks = str(tmp_path / "checkpoint"), min(2, torch.cuda.device_count())
    expected = run_ranks(run, Case(batch_size=2, more=SHARED, save_after=HALF_WAY, save_to=folder), world_size=ranks)
    case = Case(batch_size=2, more=SHARED, start=folder, skipped=HALF_WAY + 1)
    for found, whole in zip(run_ranks(run, case, world_size=ranks), expected, strict=True):
        for mine, theirs in zip(found, whole[HALF_WAY + 1 :], strict=True):
            assert mine == pytest.approx(theirs, rel=CLOSE)
