"""Training continues while sharded states are saved; each checkpoint holds the state at the time of the save call."""

from __future__ import annotations

import io
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from notebook_accelerate.checkpointing import wait_for_saves
from notebook_accelerate.checkpointing.snapshot import Snapshot
from notebook_accelerate.collectives import gather_object
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.strategies.sharding import shard_files, write_plans
from notebook_accelerate.torch_internals import StorageInfo
from notebook_accelerate.utils import merge_fsdp_weights
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
    gate = Gate(write_plans.write_shards)
    write_plans.write_shards = gate
    training.accelerator.save_state(folder, blocking=False)
    meanwhile = [training.step() for _ in range(AFTER)]  # Training uses its own collectives while the writers wait.
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
def test_training_continues_and_the_checkpoint_has_the_state_of_the_call(form: str, tmp_path: Path) -> None:
    ranks = 4 if form in {"fsdp2 of replicas", "fsdp2 and tp"} else 2
    found = run_ranks(save_and_train, form, str(tmp_path / "out"), world_size=ranks)
    for meanwhile, again, unfinished in found:
        assert unfinished or "whole" in form  # The gate delays only shards, not whole files.
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
    """Let rank 1 fail. This save or the next raises the error on every rank, and the previous checkpoint is kept."""
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
def test_the_failure_of_one_rank_is_raised_on_every_rank(place: str, blocking: bool, tmp_path: Path) -> None:
    main, other = run_ranks(failing, place, str(tmp_path / "out"), blocking)
    assert "Rank 1: The checkpoint" in main[0]
    assert all("the disk is full" in message for message, _ in (main, other))
    assert not main[1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupted(folder: str, before: int) -> list[str]:
    """Interrupt all ranks while they write, as happens when a run is stopped."""
    training = ShardedTraining()
    for index in range(before):  # The first save creates the plan that later ones use.
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
    """Kill rank 1 in its writing thread. Rank 0 must notice this immediately and remove all files."""
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
from notebook_accelerate.strategies.sharding import write_plans
from tests.support.sharded import ShardedTraining

write_plans.write_shards = after_the_main_thread(write_plans.write_shards)
training = ShardedTraining()
training.step()
"""


def test_ranks_that_exit_while_writing_finish_the_checkpoint(tmp_path: Path) -> None:
    check_ending_ranks_finish(_DELAYED_SAVE, tmp_path / "out")


class Attack:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def attacked(form: str, folder: str, kind: str) -> list[str]:
    """Return the errors of loading and merging a checkpoint into which an attacker has put code."""
    training = ShardedTraining(form)
    training.step()
    training.accelerator.save_state(folder)
    if training.accelerator.is_main_process:
        put_code_into(Path(folder), kind)
    training.accelerator.wait_for_everyone()
    raised = []
    for call in (
        lambda: training.accelerator.load_state(folder),
        lambda: merge_fsdp_weights(folder, f"{folder}_merged"),
    ):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - returned
            raised.append(f"{type(error).__name__}: {error}")
    return raised


def put_code_into(folder: Path, kind: str) -> None:
    (folder / "checkpoint_manifest.json").unlink()
    attack = Attack(f"{folder}_ran")
    if kind == "metadata":
        for path in folder.rglob(".metadata"):
            metadata = pickle.loads(path.read_bytes())
            metadata.planner_data = attack
            path.write_bytes(pickle.dumps(metadata))
    elif kind == "file":
        torch.save({"first.weight": attack}, folder / "pytorch_model_fsdp.bin")
    else:
        put_code_among_shards(folder, attack)


def put_code_among_shards(folder: Path, attack: Attack) -> None:
    """Replace an object in the optimizer's files, and add one to the model's."""
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        metadata = pickle.loads((folder / name / ".metadata").read_bytes())
        indices = [index for index in metadata.storage_data if index.fqn.endswith(".lr")]
        if not indices:
            metadata.state_dict_metadata["model.more"] = BytesStorageMetadata()
            indices, metadata.planner_data["model.more"] = [MetadataIndex("model.more")], ("model", "more")
            metadata.storage_data[indices[0]] = StorageInfo("__0_0.distcp", 0, 0)
        for index in indices:
            info = metadata.storage_data[index]
            path = folder / name / info.relative_path
            stream = io.BytesIO()
            torch.save(attack, stream)
            metadata.storage_data[index] = StorageInfo(info.relative_path, path.stat().st_size, len(stream.getvalue()))
            path.write_bytes(path.read_bytes() + stream.getvalue())
        (folder / name / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("form", "kind"),
    [("fsdp2", "metadata"), ("fsdp2", "objects"), ("fsdp1", "metadata"), ("fsdp2, whole", "file"), ("tp", "metadata")],
)
def test_no_code_of_a_sharded_checkpoint_runs(form: str, kind: str, tmp_path: Path) -> None:
    for raised in run_ranks(attacked, form, str(tmp_path / "out"), kind):
        assert raised
        assert "contains more than data" in raised[0], raised
    assert not (tmp_path / "out_ran").exists()
    assert not (tmp_path / "out_merged" / "model.safetensors").exists()
