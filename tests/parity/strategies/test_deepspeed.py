"""DeepSpeed's engine trains like plain torch. Run these tests with `make test-deepspeed`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from notebook_accelerate.errors import CheckpointMismatchError
from tests.parity.strategies import deepspeed_scripts as scripts
from tests.parity.strategies.cells import (
    ACCUMULATION,
    TOLERANCE,
    assert_notices_saving_alone,
    assert_trains_and_resumes,
    patient,
)
from tests.parity.strategies.scripts import Case, accelerated, parts, plain
from tests.parity.strategies.table import ZERO, case_of
from tests.support.nightly import rest_nightly
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make test-deepspeed"
)

SECONDS = 170.0
BUILT = any(Path(os.environ.get("TORCH_EXTENSIONS_DIR", "nowhere")).rglob("cpu_adam*.so"))
HALF = 5
IN_BF16 = {"stage 1", "stage 3"}
CELLS = rest_nightly(
    product(ZERO, (2, 4), TOLERANCE, ACCUMULATION),
    daily=lambda name, ranks, *how: ranks == 2 and how == (("bf16", 4) if name in IN_BF16 else ("no", 1)),
)


@patient
@pytest.mark.parametrize(("name", "ranks", "precision", "accumulation"), CELLS)
def test_deepspeed_trains_like_plain_torch_and_resumes(
    name: str, ranks: int, precision: str, accumulation: int, tmp_path: Path
) -> None:
    case = case_of(name, ranks, precision=precision, accumulation=accumulation)
    assert_trains_and_resumes(case, ranks, tmp_path)


def test_one_process_needs_no_launch() -> None:
    case = Case(deepspeed={"zero_stage": 2})
    found = run_ranks(accelerated, case, world_size=1, timeout=SECONDS)[0]["losses"]
    assert found == pytest.approx(plain(case), rel=1e-5)


@pytest.mark.skipif(not BUILT, reason="DeepSpeed's optimizer in C++ is not built: make test-nightly")
def test_deepspeeds_optimizer_for_main_memory_trains_like_plain_torch() -> None:
    case = Case(deepspeed={"zero_stage": 2, "offload_optimizer_device": "cpu"})
    found = run_ranks(accelerated, case, timeout=SECONDS)[0]["losses"]
    # Allow for the CPU's approximate square roots, which DeepSpeed's optimizer uses.
    assert found == pytest.approx(plain(case), rel=1e-4)


@pytest.mark.parametrize("stage", [0, 2])  # Stage 3 is tested in tests/deepspeed/test_stores.py.
def test_resuming_with_a_schedule_equals_an_uninterrupted_training(stage: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    whole = Case(**ZERO[f"stage {stage}"], steps=2 * HALF)
    expected = run_ranks(scripts.trained, whole, str(folder), HALF, timeout=SECONDS)[0]
    manifest = json.loads((folder / "checkpoint_manifest.json").read_text())
    assert manifest["layout"] == "deepspeed"
    assert any(re.fullmatch(r"pytorch_model/.*model_states\.pt", name) for name in manifest["files"])
    half = Case(**ZERO[f"stage {stage}"], first=HALF, steps=HALF)
    resumed = run_ranks(scripts.trained, half, str(folder), None, timeout=SECONDS)[0]
    assert resumed["losses"] == expected["losses"][HALF:]
    assert resumed["rate"] == resumed["engine"] == expected["rate"]
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, expected["weights"][name]), name


@patient
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.nightly), 3])
def test_saving_on_the_main_rank_alone_is_detected(stage: int, tmp_path: Path) -> None:
    assert_notices_saving_alone(case_of(f"stage {stage}", 2), tmp_path)


def test_precisions_and_devices_that_this_machine_lacks_are_reported(tmp_path: Path) -> None:
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    (said,) = run_ranks(scripts.lacking, world_size=1, timeout=SECONDS, env=env)
    assert list(tmp_path.iterdir()) == [], "an optimizer was compiled before the report"
    assert said["fp16"] in {
        "",
        "DeepSpeed does not support fp16 on cpu; pass mixed_precision='bf16', or leave fp16 out of its configuration",
    }
    assert said["nvme"] == "" or said["nvme"].startswith(
        "offload_optimizer_device='nvme' needs DeepSpeed's async_io, which is compiled with libaio"
    )


def test_a_checkpoint_can_be_converted_to_plain_weights(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run_ranks(scripts.trained, Case(**ZERO["stage 3"], steps=3), str(folder), 0, timeout=SECONDS)
    assert (folder / "zero_to_fp32.py").is_file()
    assert (folder / "latest").read_text() == "pytorch_model"
    weights = run_ranks(scripts.weights_in, str(folder), world_size=1, timeout=SECONDS)[0]
    for name, weight in parts()[0].state_dict().items():
        assert torch.equal(weights[name], weight), name
    with pytest.raises(RankError, match=r"in 2 shards, one per rank, but this run has 1 ranks\.") as caught:
        run_ranks(accelerated, Case(**ZERO["stage 3"], steps=1), None, str(folder), world_size=1)
    assert isinstance(caught.value.__cause__, CheckpointMismatchError)


@patient
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_each_rank_holds_its_share(stage: int, ranks: int) -> None:
    expected = {
        "parameters": 1 / ranks if stage == 3 else 1,
        "gradients": 1 / ranks if stage >= 2 else 1,
        "states": 2 / ranks if stage else 2,
        "masters": 1 / ranks if stage else 0,  # The optimizer updates a float32 copy of this rank's part.
    }
    for rank, held in enumerate(run_ranks(scripts.memory, stage, world_size=ranks, timeout=SECONDS)):
        print(f"stage {stage} on {ranks} ranks, rank {rank}: {held}")
        # Parts are padded. A weight on the border of two parts has its whole gradient, 1/16 of all, on both ranks.
        assert held == pytest.approx(expected, abs=0.07)


def test_the_optimizer_and_the_schedule_of_a_configuration_train_and_resume(tmp_path: Path) -> None:
    found = run_ranks(scripts.described, str(tmp_path / "checkpoint"), timeout=SECONDS)[0]
    expected = scripts.plainly_described()
    assert found["rates"] == pytest.approx(expected["rates"], rel=1e-6)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [found["config"][name] for name in sizes] == [8, 4, 1]
    assert found["config"]["scheduler"]["params"]["total_num_steps"] == scripts.STEPS
    assert "scheduler.bin" not in found["names"]  # The engine saves the schedule itself.
    assert found["rate of the checkpoint"] == found["rates"][scripts.STEPS // 2]


@pytest.mark.parametrize("stage", [0, 3])
def test_norms_are_those_before_clipping(stage: int) -> None:
    expected = run_ranks(scripts.norms, Case(steps=4))[0]
    found = run_ranks(scripts.norms, Case(deepspeed={"zero_stage": stage}, steps=4), timeout=SECONDS)
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-5)


def test_a_manual_window_trains_like_plain_torch() -> None:
    found = run_ranks(scripts.held_back, timeout=SECONDS)[0]["losses"]
    assert found == pytest.approx(plain(Case(steps=6, accumulation=2)), rel=1e-5)


def test_two_models_can_have_two_plugins() -> None:
    found = run_ranks(scripts.two_models, timeout=SECONDS)[0]
    assert found["first"]
    assert found["agrees"]
    assert found["selected"] == ["student"]
    assert found["resting"] < found["whole"] == found["plain"]
    assert found["wrapped"] == "Transformer"


def test_mistakes_are_refused_with_a_message() -> None:
    said = run_ranks(scripts.mistakes, timeout=SECONDS)[0]
    assert "AdamW has parameters of 0 of the 0 models given" in said["alone"]
    assert "is 'auto', but prepare() was given no loader" in said["no loader"]
    assert "the optimizer of its parameters" in said["another model's"]
    assert "a DeepSpeed engine has one" in said["two"]
    assert 'DummyOptim needs an optimizer in the configuration, which has none: add "optimizer"' in said["stand-in"]
    assert "create another Accelerator for the second model" in said["second"]
    assert "call accelerator.clip_grad_norm_" in said["values"]
    assert "which clips by the 2-norm" in said["norm"]
    assert said["again"] == "2"  # The second call has filled in "auto" for its own loader.


def test_whole_weights_of_a_sharded_model_can_be_saved(tmp_path: Path) -> None:
    said = run_ranks(scripts.saved_whole, str(tmp_path / "model"), timeout=SECONDS)[0]
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for name, weight in parts()[0].state_dict().items():
        if name in weights:  # Only one name of tied weights is written.
            assert torch.equal(weights[name], weight), name
    assert {"embedding.weight", "head.weight"} & weights.keys()
    assert "stage3_gather_16bit_weights_on_model_save is false" in said["forbidden"]
