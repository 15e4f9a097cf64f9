"""States in pieces, saved in the background: training goes on, and what is saved is what was there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from notebook_accelerate.checkpointing import state_saving, wait_for_saves
from notebook_accelerate.checkpointing.snapshot import Snapshot
from notebook_accelerate.collectives import gather_object
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.strategies.sharding import local_shards, shard_files
from tests.support.gates import Gate
from tests.support.ranks import RankError, run_ranks, run_script
from tests.support.sharded import FORMS, ShardedTraining

BEFORE, AFTER = 3, 4


def save_and_train(form: str, folder: str) -> tuple[list[float], list[float], bool]:
    training = ShardedTraining(form)
    for _ in range(BEFORE):
        training.step()
    gate = Gate(local_shards.write_shards)
    local_shards.write_shards = gate
    training.accelerator.save_state(folder, blocking=False)
    meanwhile = [training.step() for _ in range(AFTER)]  # with collectives of its own, while the writing is held
    unfinished = not Path(folder).exists()
    gate.open()
    training.accelerator.wait_for_everyone()
    wait_for_saves()
    resumed = ShardedTraining(form, seed=9)
    resumed.go_on(folder, BEFORE)
    again = [resumed.step() for _ in range(AFTER)]
    training.accelerator.end_training()
    return meanwhile, again, unfinished


@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_and_the_checkpoint_is_of_the_moment(form: str, tmp_path: Path) -> None:
    ranks = 4 if form in {"fsdp2 of replicas", "fsdp2 and tp"} else 2
    found = run_ranks(save_and_train, form, str(tmp_path / "out"), world_size=ranks)
    for meanwhile, again, unfinished in found:
        assert unfinished or "whole" in form  # whole files are written by no one who waits at the gate
        assert again == meanwhile
    manifest = (tmp_path / "out" / "checkpoint_manifest.json").read_text()
    if "whole" not in form:
        for name in ("pytorch_model_fsdp_0/.metadata", "optimizer_0/__1_0.distcp"):
            assert f'"{name}"' in manifest


def waits_for_nothing(folder: str) -> tuple[str, int]:
    training = ShardedTraining()
    training.step()
    groups = []
    for index in range(3):
        training.accelerator.save_state(f"{folder}_{index}", blocking=False)
        groups.append(state_saving._pending[-1].process_group)
        training.step()
    thread = state_saving._pending[-1].thread
    assert thread is not None
    assert groups[0] is not None
    assert groups[0] is not dist.group.WORLD
    name = dist.get_backend(groups[0])
    training.accelerator.end_training()
    return name, len({id(group) for group in groups})


def test_one_group_of_its_own_serves_all_saves(tmp_path: Path) -> None:
    assert run_ranks(waits_for_nothing, str(tmp_path / "out")) == [("gloo", 1)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out_0", "out_1", "out_2"]


def failing(place: str, folder: str, blocking: bool) -> tuple[str, list[str]]:
    """Rank 1 fails at a place; the error comes at the next save, on every rank, and the checkpoint before stays."""
    training = ShardedTraining()
    training.step()
    training.accelerator.save_state(folder)
    expected = training.step()

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if training.accelerator.process_index == 1:
            target, name = (shard_files.ChecksumStream, "write") if place == "write" else (Snapshot, "_run")
            patch.setattr(target, name, full)
        with pytest.raises(CheckpointError) as failure:
            saved_twice(training, folder, blocking)
    left = sorted(path.name for path in Path(folder).glob(".*"))
    training.go_on(folder, 1)
    assert training.step() == expected
    training.accelerator.save_state(folder, blocking=False)
    training.accelerator.end_training()
    return str(failure.value), left


def saved_twice(training: ShardedTraining, folder: str, blocking: bool) -> None:
    training.accelerator.save_state(folder, blocking=blocking)
    training.step()
    training.accelerator.save_state(folder, blocking=False)


@pytest.mark.parametrize(("place", "blocking"), [("write", True), ("write", False), ("copy", False)])
def test_one_ranks_failure_is_told_by_every_rank(place: str, blocking: bool, tmp_path: Path) -> None:
    main, other = run_ranks(failing, place, str(tmp_path / "out"), blocking)
    assert "Rank 1: The checkpoint" in main[0]
    assert all("the disk is full" in message for message, _ in (main, other))
    assert not main[1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupted(folder: str, before: int) -> list[str]:
    """All ranks are interrupted while they write, as a run is that is stopped."""
    training = ShardedTraining()
    for index in range(before):  # the first save makes the plan, by which the next ones are written
        training.step()
        training.accelerator.save_state(f"{folder}_{index}")
    expected = training.step()

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files.ChecksumStream, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            training.accelerator.save_state(folder)
    training.accelerator.wait_for_everyone()
    if before:
        training.go_on(f"{folder}_{before - 1}", before)
        assert training.step() == expected
    training.accelerator.save_state(folder)
    training.accelerator.end_training()
    return sorted(path.name for path in Path(folder).parent.iterdir())


@pytest.mark.parametrize("before", [0, 1])
def test_an_interrupt_while_shards_are_written_stays_one(before: int, tmp_path: Path) -> None:
    names = ["out", *(f"out_{index}" for index in range(before))]
    assert run_ranks(interrupted, str(tmp_path / "out"), before) == [names, names]


def killed(folder: str, at: str) -> None:
    """Rank 1 is killed in its thread; rank 0 finds out at once, and nothing is left."""
    training = ShardedTraining()
    training.step()
    training.accelerator.save_state(folder)
    victim = gather_object([os.getpid()])[1]

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if training.accelerator.process_index == 1:
        target, name = (shard_files.ChecksumStream, "write") if at == "writing" else (Snapshot, "finish")
        pytest.MonkeyPatch().setattr(target, name, die)
    training.accelerator.save_state(folder, blocking=False)
    pending = state_saving._pending[-1]
    pending.join()
    assert training.accelerator.process_index == 0
    assert f"rank 1 did not finish its part, its process {victim} has ended" in str(pending.error)
    assert not list(Path(folder).glob(".*"))
    Path(folder).with_name("seen").touch()


@pytest.mark.parametrize("at", ["copying", "writing"])
def test_a_rank_that_dies_is_noticed(at: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(killed, str(tmp_path / "out"), at)
    assert set(failure.value.reports) == {1}, failure.value
    assert (tmp_path / "seen").exists()


def another_number(folder: str) -> float:
    training = ShardedTraining(seed=9)
    training.accelerator.load_state(folder, elastic=True)
    training.done = BEFORE
    return training.step()


def test_background_saves_load_into_other_numbers_of_ranks(tmp_path: Path) -> None:
    meanwhile, _, _ = run_ranks(save_and_train, "fsdp2", str(tmp_path / "out"))[0]
    for loss in run_ranks(another_number, str(tmp_path / "out"), world_size=3):
        assert loss == pytest.approx(meanwhile[0], rel=1e-5)


_ENDING = """
import sys
from notebook_accelerate.strategies.sharding import local_shards, shard_files
from tests.support.gates import after_the_main_thread
from tests.support.sharded import ShardedTraining

local_shards.write_shards = after_the_main_thread(local_shards.write_shards)
training = ShardedTraining()
training.step()
training.accelerator.save_state(sys.argv[1], blocking=False)
"""


def test_ranks_that_end_while_they_write_finish_the_checkpoint(tmp_path: Path) -> None:
    for code, said in run_script(_ENDING, str(tmp_path / "out")):
        assert code == 0, said
    assert (tmp_path / "out" / "checkpoint_manifest.json").exists()
