"""Background saves of sharded states: training continues, and the checkpoint has the state at the call."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from notebook_accelerate.checkpointing import wait_for_saves
from notebook_accelerate.checkpointing.snapshot import Snapshot
from notebook_accelerate.collectives import gather_object
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.strategies.sharding import local_shards, shard_files
from tests.support.background_saves import (
    check_dead_rank_reported,
    check_ending_ranks_finish,
    disk_full,
    pending_save,
)
from tests.support.gates import Gate
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import FORMS, ShardedTraining

BEFORE, AFTER = 3, 4


def save_and_train(form: str, folder: str) -> tuple[list[float], list[float], bool]:
    training = ShardedTraining(form)
    for _ in range(BEFORE):
        training.step()
    gate = Gate(local_shards.write_shards)
    local_shards.write_shards = gate
    training.accelerator.save_state(folder, blocking=False)
    meanwhile = [training.step() for _ in range(AFTER)]  # with collectives of its own, while the writers wait
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
def test_training_continues_and_the_checkpoint_has_the_state_of_its_save(form: str, tmp_path: Path) -> None:
    ranks = 4 if form in {"fsdp2 of replicas", "fsdp2 and tp"} else 2
    found = run_ranks(save_and_train, form, str(tmp_path / "out"), world_size=ranks)
    for meanwhile, again, unfinished in found:
        assert unfinished or "whole" in form  # whole files are not written by the delayed function
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
        groups.append(pending_save().process_group)
        training.step()
    thread = pending_save().thread
    assert thread is not None
    assert groups[0] is not None
    assert groups[0] is not dist.group.WORLD
    name = dist.get_backend(groups[0])
    training.accelerator.end_training()
    return name, len({id(group) for group in groups})


def test_one_background_group_serves_all_saves(tmp_path: Path) -> None:
    assert run_ranks(waits_for_nothing, str(tmp_path / "out")) == [("gloo", 1)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out_0", "out_1", "out_2"]


def failing(place: str, folder: str, blocking: bool) -> tuple[str, list[str]]:
    """Rank 1 fails; the next save raises the error on every rank, and the previous checkpoint is kept."""
    training = ShardedTraining()
    training.step()
    training.accelerator.save_state(folder)
    expected = training.step()

    with pytest.MonkeyPatch.context() as patch:
        if training.accelerator.process_index == 1:
            target, name = (shard_files.ChecksumStream, "write") if place == "write" else (Snapshot, "_run")
            patch.setattr(target, name, disk_full)
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
def test_one_ranks_failure_is_raised_on_every_rank(place: str, blocking: bool, tmp_path: Path) -> None:
    main, other = run_ranks(failing, place, str(tmp_path / "out"), blocking)
    assert "Rank 1: The checkpoint" in main[0]
    assert all("the disk is full" in message for message, _ in (main, other))
    assert not main[1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupted(folder: str, before: int) -> list[str]:
    """All ranks are interrupted while they write, as when a run is stopped."""
    training = ShardedTraining()
    for index in range(before):  # the first save creates the plan that later ones use
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
def test_an_interrupt_while_shards_are_written_stays_an_interrupt(before: int, tmp_path: Path) -> None:
    names = ["out", *(f"out_{index}" for index in range(before))]
    assert run_ranks(interrupted, str(tmp_path / "out"), before) == [names, names]


def killed(folder: str, at: str) -> None:
    """Rank 1 is killed in its thread; rank 0 detects it at once and removes all files."""
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
    check_dead_rank_reported(folder, victim)


@pytest.mark.parametrize("at", ["copying", "writing"])
def test_a_rank_that_dies_is_detected(at: str, tmp_path: Path) -> None:
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


_DELAYED_SAVE = """
from notebook_accelerate.strategies.sharding import local_shards
from tests.support.sharded import ShardedTraining

local_shards.write_shards = after_the_main_thread(local_shards.write_shards)
training = ShardedTraining()
training.step()
"""


def test_ranks_that_end_while_they_write_finish_the_checkpoint(tmp_path: Path) -> None:
    check_ending_ranks_finish(_DELAYED_SAVE, tmp_path / "out")
