"""Checkpoints of two ranks in an object store: resuming, separate machines, numbering, sharded states, hooks."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.checkpointing import wait_for_saves
from notebook_accelerate.collectives import gather_object
from notebook_accelerate.config.kwargs_handlers import ProjectConfiguration
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.files.remote_paths import RemotePath
from tests.s3.conftest import store
from tests.support.background_saves import pending_save
from tests.support.mounted import OWN_MACHINES, to_a_machine_of_its_own
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import ShardedTraining
from tests.support.trainings import Training, same

MANIFEST = "checkpoint_manifest.json"


def names_in(folder: str) -> list[str]:
    """List all files below a URL by their paths relative to it."""
    start = len(folder.removeprefix("s3://")) + 1
    return sorted(name[start:] for name in store().find(folder))


def of_manifest(folder: str) -> list[str]:
    """List the files that a checkpoint's manifest names, and the manifest itself."""
    return sorted([*json.loads(store().cat_file(f"{folder}/{MANIFEST}"))["files"], MANIFEST])


def left_here() -> list[str]:
    """List the temporary files that this rank has left."""
    return sorted(path.name for path in Path(tempfile.gettempdir()).glob("notebook_accelerate*"))


def resume(folder: str, blocking: bool, place: str) -> tuple[bool, bool, list[str]]:
    to_a_machine_of_its_own(place)
    whole = Training()
    for _ in range(3):
        whole.epoch()
    expected = whole.everything()
    first = Training()
    first.epoch()
    first.accelerator.save_state(folder, blocking=blocking)
    first.epoch()
    resumed = Training(seed=99)
    resumed.loader.dataset.tensors = first.loader.dataset.tensors
    resumed.accelerator.load_state(folder)
    resumed.epoch()
    resumed.epoch()
    everything = resumed.everything()
    resumed.accelerator.wait_for_everyone()
    return resumed.losses == whole.losses[6:], same(everything, expected), left_here()


@pytest.mark.parametrize("blocking", [True, False])
def test_ranks_on_two_machines_resume_as_if_never_interrupted(bucket: str, tmp_path: Path, blocking: bool) -> None:
    folder = f"{bucket}/runs/out"
    for losses, everything, left in run_ranks(resume, folder, blocking, str(tmp_path), env=OWN_MACHINES):
        assert losses
        assert everything
        assert left == []
    assert names_in(folder) == of_manifest(folder)
    assert {"model.safetensors", "random_states_0.pkl", "random_states_1.pkl"} <= set(names_in(folder))


def resume_shards(folder: str, blocking: bool, place: str) -> tuple[list[float], list[float]]:
    to_a_machine_of_its_own(place)
    training = ShardedTraining()
    for _ in range(3):
        training.step()
    training.accelerator.save_state(folder, blocking=blocking)
    went_on = [training.step() for _ in range(3)]
    wait_for_saves()
    resumed = ShardedTraining(seed=9)
    resumed.go_on(folder, 3)
    again = [resumed.step() for _ in range(3)]
    training.accelerator.end_training()
    return went_on, again


@pytest.mark.parametrize("blocking", [True, False])
def test_each_rank_uploads_its_own_shards(bucket: str, tmp_path: Path, blocking: bool) -> None:
    for went_on, again in run_ranks(resume_shards, f"{bucket}/out", blocking, str(tmp_path), env=OWN_MACHINES):
        assert went_on == again
    names = names_in(f"{bucket}/out")
    assert names == of_manifest(f"{bucket}/out")
    assert {f"pytorch_model_fsdp_0/__{rank}_0.distcp" for rank in (0, 1)} < set(names)


def numbered(project_dir: str) -> tuple[list[str], int, int]:
    options = {"project_dir": project_dir, "automatic_checkpoint_naming": True, "total_limit": 2}
    first = Training(project_config=ProjectConfiguration(**options))
    shown = []
    for blocking in (True, False, True, False):
        first.epoch()
        shown.append(first.accelerator.save_state(blocking=blocking))
    wait_for_saves()
    resumed = Training(project_config=ProjectConfiguration(**options))
    resumed.accelerator.load_state()
    return shown, resumed.accelerator.project_configuration.iteration, resumed.counter.count


def test_numbered_checkpoints_are_limited(bucket: str) -> None:
    for shown, iteration, count in run_ranks(numbered, f"{bucket}/project"):
        assert shown == [f"{bucket}/project/checkpoints/checkpoint_{number}" for number in range(4)]
        assert iteration == 4
        assert count == 24
    kept = {name.split("/")[1] for name in names_in(f"{bucket}/project")}
    assert kept == {"checkpoint_2", "checkpoint_3"}


def save_here(folder: str) -> None:
    training = Training()
    training.epoch()
    training.accelerator.save_state(folder)


def load_here(folder: str | None, options: dict[str, Any]) -> int:
    training = Training(seed=5, **({"project_config": ProjectConfiguration(**options)} if options else {}))
    training.accelerator.load_state(folder)
    return training.counter.count


def dies_while_uploading(folder: str, after: int) -> None:
    training = Training()
    rank, pid = training.accelerator.process_index, os.getpid()
    victim = gather_object([pid])[1]
    upload, count = RemotePath.upload, iter(range(99))

    def killed(self: RemotePath, place: Path) -> None:
        if rank == 1 and next(count) == after:
            os.kill(pid, signal.SIGKILL)
        upload(self, place)

    RemotePath.upload = killed  # type: ignore[method-assign]
    training.accelerator.save_state(folder, blocking=False)
    save = pending_save()
    save.join()
    assert rank == 0
    assert f"rank 1 did not finish its part, because its process {victim} has ended" in str(save.error)


@pytest.mark.parametrize("old", [True, False])
def test_a_rank_that_dies_while_uploading_leaves_no_partial_checkpoint(bucket: str, old: bool) -> None:
    folder = f"{bucket}/out"
    store().pipe_file(f"{folder}/notes.txt" if old else f"{bucket}/other/notes.txt", b"mine")
    if old:
        run_ranks(save_here, folder)
    before = names_in(folder)
    with pytest.raises(RankError) as failure:
        run_ranks(dies_while_uploading, folder, 0)
    assert set(failure.value.reports) == {1}, failure.value
    assert set(before) < set(names_in(folder))
    if old:
        assert run_ranks(load_here, folder, {}) == [6, 6]
    else:
        with pytest.raises(RankError) as failure:
            run_ranks(load_here, folder, {})
        assert isinstance(failure.value.__cause__, BrokenCheckpointError)
        assert "never finished" in str(failure.value.__cause__)
    run_ranks(save_here, folder)
    assert names_in(folder) == sorted([*of_manifest(folder), *(["notes.txt"] if old else [])])
    assert store().cat_file(f"{folder}/notes.txt" if old else f"{bucket}/other/notes.txt") == b"mine"
    assert run_ranks(load_here, folder, {}) == [6, 6]


def hooked(folder: str, blocking: bool) -> tuple[list[str], list[str]]:
    training = Training()
    rank = training.accelerator.process_index

    def write(models: Any, weights: Any, place: str) -> None:
        Path(place, f"of_rank_{rank}.txt").write_text(str(rank))
        Path(place, "of_all.txt").write_text("rank" * (rank + 1))

    def read(models: Any, place: str) -> None:
        seen.extend(path.read_text() for path in sorted(Path(place).glob("of_*.txt")))

    seen: list[str] = []
    training.accelerator.register_save_state_pre_hook(write)
    training.accelerator.register_load_state_pre_hook(read)
    training.accelerator.save_state(folder, blocking=blocking)
    training.accelerator.load_state(folder)
    return seen, []


@pytest.mark.parametrize("blocking", [True, False])
def test_files_that_hooks_write_on_any_rank_are_saved(bucket: str, blocking: bool) -> None:
    found = run_ranks(hooked, f"{bucket}/out", blocking)
    assert found[0] == found[1]
    of_all, *own = found[0][0]
    assert of_all in {"rank", "rankrank"}
    assert own == ["0", "1"]


def fails_on_rank_1(folder: str, blocking: bool) -> str:
    training = Training()
    upload = RemotePath.upload

    def broken(self: RemotePath, place: Path) -> None:
        if place.name == "random_states_1.pkl":
            raise CheckpointError("the line is dead")
        upload(self, place)

    RemotePath.upload = broken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as failure:  # noqa: PT012 - raised here or there
        training.accelerator.save_state(folder, blocking=blocking)
        wait_for_saves()
    RemotePath.upload = upload  # type: ignore[method-assign]
    training.accelerator.save_state(folder)
    return str(failure.value)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_failed_upload_is_raised_on_every_rank(bucket: str, blocking: bool) -> None:
    for message in run_ranks(fails_on_rank_1, f"{bucket}/out", blocking):
        assert "the line is dead" in message
    assert names_in(f"{bucket}/out") == of_manifest(f"{bucket}/out")


def test_an_unfinished_checkpoint_is_neither_the_latest_nor_counted(bucket: str) -> None:
    options = {"project_dir": f"{bucket}/p", "automatic_checkpoint_naming": True, "total_limit": 2}
    run_ranks(save_here, f"{bucket}/p/checkpoints/checkpoint_0")
    with pytest.raises(RankError):
        run_ranks(dies_while_uploading, f"{bucket}/p/checkpoints/checkpoint_1", 0)
    assert any(name.startswith("checkpoints/checkpoint_1/") for name in names_in(f"{bucket}/p"))
    assert run_ranks(load_here, None, options) == [6, 6]
    run_ranks(save_next, {**options, "iteration": 2})
    assert {name.split("/")[1] for name in names_in(f"{bucket}/p")} == {"checkpoint_0", "checkpoint_2"}


def save_next(options: dict[str, Any]) -> None:
    Training(project_config=ProjectConfiguration(**options)).accelerator.save_state()
