"""Ranks that save sharded states repeatedly agree only once on who writes which piece; every checkpoint is complete."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from notebook_accelerate.checkpointing import wait_for_saves
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.strategies.sharding import shard_files, sharded_checkpoint, write_plans
from tests.support.ranks import run_ranks
from tests.support.sharded import FORMS, ShardedTraining


def counted(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each plan that torch makes is appended."""
    planned: list[Any] = []
    plan = write_plans._plan_and_write

    def noted(*given: Any) -> Any:
        planned.append(given[2].name)
        return plan(*given)

    patch.setattr(write_plans, "_plan_and_write", noted)
    return planned


def saved_and_resumed(form: str, folder: str, blocking: bool) -> tuple[list[float], list[float], list[str]]:
    training = ShardedTraining(form)
    training.step()
    with pytest.MonkeyPatch.context() as patch:
        planned = counted(patch)
        for index in range(3):
            training.optimizer.param_groups[0]["note"] = "x" * 1000 * index  # Pickled objects may become longer.
            training.accelerator.save_state(f"{folder}_{index}", blocking=blocking)
            meanwhile = [training.step() for _ in range(2)]
        wait_for_saves()
    resumed = ShardedTraining(form, seed=9)
    resumed.optimizer.param_groups[0]["note"] = ""
    resumed.go_on(f"{folder}_2", 5)
    assert resumed.optimizer.param_groups[0]["note"] == "x" * 2000
    again = [resumed.step() for _ in range(2)]
    training.accelerator.free_memory()
    assert not write_plans._plans
    training.accelerator.end_training()
    return meanwhile, again, planned


IN_PIECES = [form for form in FORMS if "whole" not in form]


@pytest.mark.parametrize(("form", "blocking"), [("fsdp2", False), *((form, True) for form in IN_PIECES)])
def test_later_checkpoints_resume_too(form: str, blocking: bool, tmp_path: Path) -> None:
    ranks = 4 if form in {"fsdp2 of replicas", "fsdp2 and tp"} else 2
    # With FSDP 1, a rank may hold several pieces of a tensor, so every save is planned anew.
    times = 3 if "fsdp1" in form else 1
    for meanwhile, again, planned in run_ranks(
        saved_and_resumed, form, str(tmp_path / "out"), blocking, world_size=ranks
    ):
        assert again == meanwhile
        assert planned == ["pytorch_model_fsdp_0", "optimizer_0"] * times


def saved_twice(folder: str) -> None:
    training = ShardedTraining()
    training.step()
    for index in range(2):
        training.accelerator.save_state(f"{folder}_{index}")


def test_without_training_in_between_two_checkpoints_are_equal(tmp_path: Path) -> None:
    run_ranks(saved_twice, str(tmp_path / "out"))
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        first, second = (tmp_path / f"out_{index}" / name for index in range(2))
        names = sorted(path.name for path in first.iterdir())
        assert names == sorted(path.name for path in second.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        for file in names[1:]:
            assert (first / file).read_bytes() == (second / file).read_bytes()
        assert pickle.loads((first / ".metadata").read_bytes()) == pickle.loads((second / ".metadata").read_bytes())
        for index, folder in enumerate((first, second)):
            dcp_to_torch_save(folder, tmp_path / f"{name}_{index}.bin")
        whole = [torch.load(tmp_path / f"{name}_{index}.bin", weights_only=False) for index in range(2)]
        assert str(whole[0]) == str(whole[1])


def one_changes(folder: str) -> tuple[list[str], float, float]:
    """Add a value to the optimizer's state on rank 1 only, which makes all ranks plan again."""
    training = ShardedTraining()
    training.step()
    training.accelerator.save_state(folder)
    state = training.optimizer.state[next(training.model.parameters())]
    with pytest.MonkeyPatch.context() as patch:
        planned = counted(patch)
        if training.accelerator.process_index == 1:
            state["more"] = torch.ones(3)
        training.accelerator.save_state(folder)
    expected = training.step()
    state.pop("more", None)
    training.go_on(folder, 1)
    found = training.step()
    training.accelerator.end_training()
    return planned, found, expected


def test_a_change_on_one_rank_makes_all_ranks_plan_again(tmp_path: Path) -> None:
    for planned, found, expected in run_ranks(one_changes, str(tmp_path / "out")):
        assert planned == ["optimizer_0"]
        assert found == expected


def failing(folder: str, before: int, at: str, where: int) -> tuple[str, list[str]]:
    """Let a rank fail in the first save, which is planned, or in a later one. The save after it is complete again."""
    training = ShardedTraining()
    training.step()
    for _ in range(before):
        training.accelerator.save_state(folder)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    owner = {"write": shard_files.ChecksumStream, "rename": shard_files.ChecksumFiles}[at]
    with pytest.MonkeyPatch.context() as patch:
        if training.accelerator.process_index == where:
            patch.setattr(owner, at, full)
        with pytest.raises(CheckpointError) as failure:
            training.accelerator.save_state(folder)
    left = sorted(path.name for path in Path(folder).parent.glob(".*"))
    training.accelerator.save_state(folder)
    expected = training.step()
    training.go_on(folder, 1)
    assert training.step() == expected
    training.accelerator.end_training()
    return str(failure.value), left


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(("at", "where"), [("write", 0), ("write", 1), ("rename", 0)])
def test_every_rank_reports_the_failure(before: int, at: str, where: int, tmp_path: Path) -> None:
    for message, left in run_ranks(failing, str(tmp_path / "out"), before, at, where):
        assert "the disk is full" in message
        assert not left


def failing_on_one_rank(folder: str) -> str:
    training = ShardedTraining()
    training.step()
    training.accelerator.save_state(folder)
    with pytest.MonkeyPatch.context() as patch:
        if training.accelerator.process_index == 1:
            patch.setattr(sharded_checkpoint.ShardReader, "read_data", _unreadable)
        with pytest.raises((CheckpointError, write_plans.ShardsError)) as caught:
            training.accelerator.load_state(folder)
    training.accelerator.load_state(folder)
    return str(caught.value)


def _unreadable(*_: Any) -> None:
    raise OSError("the disk is gone")


def test_a_rank_that_cannot_read_its_part_ends_the_load_on_all(tmp_path: Path) -> None:
    for said in run_ranks(failing_on_one_rank, str(tmp_path / "out")):
        assert "rank 1: OSError: the disk is gone" in said
