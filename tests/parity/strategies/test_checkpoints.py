"""A training run that resumes from a checkpoint equals an uninterrupted one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.utils import merge_fsdp_weights
from tests.parity.strategies.scripts import Case, Transformer, accelerated, saved_by_hand
from tests.parity.strategies.table import FORMS, STRATEGIES
from tests.support.mounted import MountedFileSystem
from tests.support.ranks import RankError, run_ranks

HALF = 5


@functools.cache
def uninterrupted(version: int) -> dict[str, Any]:
    case = Case(**STRATEGIES[f"fsdp{version}"], steps=2 * HALF)
    return run_ranks(accelerated, case)[0]


def saved(form: str, folder: Path) -> Case:
    """Train the first half and save. Return the case for the second half."""
    run_ranks(accelerated, Case(fsdp=FORMS[form], steps=HALF), str(folder))
    return Case(fsdp=FORMS[form], first=HALF, steps=HALF)


@pytest.mark.parametrize("form", FORMS)
def test_resuming_equals_an_uninterrupted_training(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    resumed = run_ranks(accelerated, saved(form, folder), None, str(folder))[0]
    expected = uninterrupted(1 if form.startswith("fsdp1") else 2)
    assert resumed["losses"] == expected["losses"][HALF:]
    assert resumed["weights"].keys() == expected["weights"].keys() == Transformer().state_dict().keys()
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, expected["weights"][name]), name


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("fsdp1, sharded", marks=pytest.mark.nightly),
        "fsdp2, sharded",
        pytest.param("fsdp2, whole", marks=pytest.mark.nightly),
    ],
)
def test_resuming_on_more_ranks_equals_an_uninterrupted_training(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    resumed = run_ranks(accelerated, saved(form, folder), None, str(folder), world_size=4)[0]
    expected = uninterrupted(1 if form.startswith("fsdp1") else 2)
    assert resumed["losses"] == pytest.approx(expected["losses"][HALF:], rel=1e-5)


@pytest.mark.parametrize("form", ["fsdp1, whole", "fsdp2, sharded", "fsdp2, whole"])
def test_functions_that_libraries_call_restore_the_state(form: str, tmp_path: Path) -> None:
    assert run_ranks(saved_by_hand, Case(fsdp=FORMS[form], steps=2), str(tmp_path / "checkpoint")) == [[], []]


def test_file_names_equal_accelerates(tmp_path: Path) -> None:
    saved("fsdp2, sharded", tmp_path / "sharded")
    saved("fsdp2, whole", tmp_path / "whole")
    assert (tmp_path / "sharded" / "pytorch_model_fsdp_0" / ".metadata").is_file()
    assert (tmp_path / "sharded" / "optimizer_0" / "__1_0.distcp").is_file()
    assert (tmp_path / "whole" / "pytorch_model_fsdp.bin").is_file()
    state = torch.load(tmp_path / "whole" / "optimizer.bin", weights_only=True)
    assert {"embedding.weight", "blocks.0.before.bias"} <= state["state"].keys()


def test_shards_can_be_merged_into_a_whole_file(tmp_path: Path) -> None:
    saved("fsdp2, sharded", tmp_path / "checkpoint")
    merge_fsdp_weights(str(tmp_path / "checkpoint"), str(tmp_path / "merged"))
    model = Transformer()
    model.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    folder, plain = tmp_path / "checkpoint" / "pytorch_model_fsdp_0", tmp_path / "plain"
    assert MountedFileSystem.protocol == "mounted"
    merge_fsdp_weights(f"mounted://{tmp_path}/checkpoint", f"mounted://{plain}", False, remove_checkpoint_dir=True)
    weights = torch.load(plain / "pytorch_model.bin", weights_only=True)
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight), name
    assert not folder.exists()
    with pytest.raises(ValueError, match=r'merge_fsdp_weights\("checkpoint/pytorch_model_fsdp_0"'):
        merge_fsdp_weights(str(tmp_path / "checkpoint"), str(tmp_path / "merged"))


def test_a_checkpoint_of_another_strategy_is_refused(tmp_path: Path) -> None:
    second = saved("fsdp2, sharded", tmp_path / "checkpoint")
    with pytest.raises(RankError, match="was written by the strategy 'fsdp'") as caught:
        run_ranks(accelerated, Case(first=second.first, steps=1), None, str(tmp_path / "checkpoint"))
    assert isinstance(caught.value.__cause__, CheckpointMismatchError)
