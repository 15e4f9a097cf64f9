"""Checkpoints of two ranks: resuming, other world sizes, failures on one rank, machines with separate disks."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate.checkpointing import checkpoint_writer, rank_agreement, wait_for_saves
from notebook_accelerate.checkpointing.snapshot import SnapshotBuffers
from notebook_accelerate.collectives import gather_object
from notebook_accelerate.config.kwargs_handlers import ProjectConfiguration
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError, CheckpointMismatchError
from tests.support.background_saves import check_dead_rank_reported, check_ending_ranks_finish, disk_full
from tests.support.ranks import RankError, run_ranks
from tests.support.trainings import Training, same


def resume(folder: str, safe: bool, blocking: bool) -> tuple[bool, bool, list[str]]:
    whole = Training(gradient_accumulation_steps=2)
    for _ in range(3):
        whole.epoch()
    expected = whole.everything()
    first = Training(gradient_accumulation_steps=2)
    first.epoch()
    first.accelerator.save_state(folder, safe_serialization=safe, blocking=blocking)
    first.epoch()
    resumed = Training(seed=99, gradient_accumulation_steps=2)
    resumed.loader.dataset.tensors = first.loader.dataset.tensors
    resumed.accelerator.load_state(folder)
    resumed.epoch()
    resumed.epoch()
    equal = same(resumed.everything(), expected)
    return resumed.losses == whole.losses[6 * 2 // 2 :], equal, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(("safe", "blocking"), [(True, True), (False, False)])
def test_resuming_on_two_ranks_equals_an_uninterrupted_run(tmp_path: Path, safe: bool, blocking: bool) -> None:
    for losses, everything, names in run_ranks(resume, str(tmp_path / "out"), safe, blocking):
        assert losses
        assert everything
        assert [name for name in names if name.startswith("random")] == ["random_states_0.pkl", "random_states_1.pkl"]
        assert ("model.safetensors" if safe else "pytorch_model.bin") in names


def save_here(folder: str) -> None:
    training = Training()
    training.epoch()
    training.accelerator.save_state(folder)


def load_here(folder: str, options: dict[str, Any]) -> int:
    training = Training(seed=5)
    training.accelerator.load_state(folder, **options)
    return training.counter.count


def test_another_number_of_ranks_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save_here, str(tmp_path / "two"))
    with pytest.raises(RankError) as failure:
        run_ranks(load_here, str(tmp_path / "two"), {}, world_size=3)
    assert isinstance(failure.value.__cause__, CheckpointMismatchError)
    assert len(failure.value.reports) == 3
    assert "written by 2 ranks, but this run has 3" in failure.value.reports[2]
    assert run_ranks(load_here, str(tmp_path / "two"), {"elastic": True}, world_size=1) == [6]


def test_damage_is_found_whichever_rank_reads_the_file(tmp_path: Path) -> None:
    run_ranks(save_here, str(tmp_path / "out"))
    for path in sorted((tmp_path / "out").glob("[!c]*.*")):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RankError) as failure:
            run_ranks(load_here, str(tmp_path / "out"), {})
        assert isinstance(failure.value.__cause__, BrokenCheckpointError)
        assert all(path.name in report for report in failure.value.reports.values())
        assert len(failure.value.reports) == 2
        path.write_bytes(content)


def fail_on_rank_one(folder: str, blocking: bool) -> str:
    training = Training()
    training.accelerator.save_state(folder)
    before = training.weights()
    training.epoch()
    write = checkpoint_writer.write_file

    def broken(value: Any, path: Path) -> None:
        (disk_full if training.accelerator.process_index == 1 else write)(value, path)

    checkpoint_writer.write_file = broken  # type: ignore[assignment]
    try:
        training.accelerator.save_state(folder, blocking=blocking)
        training.accelerator.end_training()
    except CheckpointError as error:
        message = str(error)
    checkpoint_writer.write_file = write  # type: ignore[assignment]
    training.accelerator.load_state(folder)
    assert same(training.weights(), before)
    assert not list(Path(folder).glob(".*"))
    return message


@pytest.mark.parametrize("blocking", [True, False])
def test_the_failure_of_one_rank_is_raised_on_every_rank(tmp_path: Path, blocking: bool) -> None:
    messages = run_ranks(fail_on_rank_one, str(tmp_path / "out"), blocking)
    assert "Rank 1: " in messages[0]
    assert all("disk is full" in message for message in messages)


def own_disks(folder: str, on_each: bool) -> list[str]:
    """Save to a separate folder on each rank, as on two machines without a shared disk."""
    from notebook_accelerate.state import PartialState

    rank = PartialState().process_index
    place = Path(folder) / f"machine_{rank}"
    place.mkdir()
    project = ProjectConfiguration(save_on_each_node=on_each)
    training = Training(project_config=project)
    training.accelerator.save_state(str(place / "out"), blocking=False)
    if on_each:
        training.accelerator.load_state(str(place / "out"))
    training.accelerator.end_training()
    return sorted(path.name for path in (place / "out").iterdir())


def test_machines_with_separate_disks_each_save_their_part(tmp_path: Path) -> None:
    one_rank_each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    main, other = run_ranks(own_disks, str(tmp_path), False, env=one_rank_each)
    assert "model.safetensors" in main
    assert other == ["checkpoint_manifest.json", "random_states_1.pkl"]
    shutil.rmtree(tmp_path / "machine_0")
    shutil.rmtree(tmp_path / "machine_1")
    main, other = run_ranks(own_disks, str(tmp_path), True, env=one_rank_each)
    assert [name for name in main if not name.startswith("random")] == [
        name for name in other if not name.startswith("random")
    ]


def dies_while_writing(folder: str) -> None:
    """Kill rank 1 while it writes. Rank 0 must notice this without waiting for a timeout."""
    training = Training()
    training.accelerator.save_state(folder)
    rank, pid = training.accelerator.process_index, os.getpid()
    victim = gather_object([pid])[1]
    write = checkpoint_writer.write_file

    def killed(value: Any, path: Path) -> None:
        if rank == 1:
            os.kill(pid, signal.SIGKILL)
        write(value, path)

    checkpoint_writer.write_file = killed  # type: ignore[assignment]
    training.accelerator.save_state(folder, blocking=False)
    check_dead_rank_reported(folder, victim)


def test_a_rank_that_dies_while_writing_is_detected(tmp_path: Path) -> None:
    run_ranks(save_here, str(tmp_path / "out"))
    with pytest.raises(RankError) as failure:
        run_ranks(dies_while_writing, str(tmp_path / "out"))
    assert set(failure.value.reports) == {1}, failure.value
    assert (tmp_path / "seen").exists()
    run_ranks(load_here, str(tmp_path / "out"), {})


_DELAYED_SAVE = """
from notebook_accelerate.checkpointing import checkpoint_writer
from tests.support.trainings import Training

checkpoint_writer.write_file = after_the_main_thread(checkpoint_writer.write_file)
training = Training()
training.epoch(stop=2)
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        pytest.param("raise RuntimeError('over')", 1, marks=pytest.mark.nightly),
        pytest.param("del training", 0, marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_exit_while_writing_finish_the_checkpoint(tmp_path: Path, ending: str, code: int) -> None:
    check_ending_ranks_finish(_DELAYED_SAVE, tmp_path / "out", ending, code)
    assert run_ranks(load_here, str(tmp_path / "out"), {}) == [2, 2]


def no_memory_on_rank_one(folder: str) -> str:
    training = Training()
    training.epoch()
    take = SnapshotBuffers.take

    def exhausted(self: SnapshotBuffers, *values: Any) -> Any:
        if training.accelerator.process_index == 1:
            raise MemoryError("no memory for the copy")
        return take(self, *values)

    SnapshotBuffers.take = exhausted  # type: ignore[method-assign]
    with pytest.raises((MemoryError, CheckpointError), match="no memory for the copy") as failure:
        training.accelerator.save_state(folder, blocking=False)
    SnapshotBuffers.take = take  # type: ignore[method-assign]
    assert not Path(folder).exists()
    training.accelerator.wait_for_everyone()
    training.epoch()  # The next step shows that no optimizer still waits for a copy.
    training.accelerator.save_state(folder, blocking=False)
    training.accelerator.end_training()
    return str(failure.value)


def test_a_copy_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    main, _ = run_ranks(no_memory_on_rank_one, str(tmp_path / "out"))
    assert main == "Rank 1: no memory for the copy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def only_main(folder: str) -> str:
    rank_agreement._WARN_AFTER = 0.2  # type: ignore[misc]
    training = Training()
    lines: list[str] = []
    warned = Path(f"{folder}_warned")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            warned.touch()

    if training.accelerator.is_main_process:
        logging.getLogger("notebook_accelerate").addHandler(Keep())
    else:
        while not warned.exists():
            time.sleep(0.02)
    training.accelerator.save_state(folder)
    return lines[0] if lines else ""


def test_a_save_on_the_main_rank_alone_logs_why_it_hangs(tmp_path: Path) -> None:
    main, _ = run_ranks(only_main, str(tmp_path / "out"))
    assert "Every rank must call save_state" in main
    assert "is_main_process" in main


def numbered(folder: str) -> tuple[list[str], float]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    training = Training(project_config=project)
    for _ in range(4):
        training.epoch(stop=1)
        training.accelerator.save_state(blocking=False)
    training.accelerator.load_state()
    wait_for_saves()
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir()), float(torch.rand(1))


def test_two_ranks_share_numbered_checkpoints(tmp_path: Path) -> None:
    for names, _ in run_ranks(numbered, str(tmp_path)):
        assert names == ["checkpoint_2", "checkpoint_3"]
