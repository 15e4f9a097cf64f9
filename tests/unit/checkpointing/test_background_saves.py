"""After `save_state(blocking=False)`, training does not change the checkpoint, and the next call raises any error."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import checkpointing
from notebook_accelerate.checkpointing import checkpoint_writer, disk_store
from notebook_accelerate.checkpointing.single_files import write_file
from notebook_accelerate.checkpointing.snapshot import SnapshotBuffers
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.hardware.process_liveness import this_process
from tests.support.gates import Gate
from tests.support.interpreters import InterpreterServer
from tests.support.trainings import Training, same


def held_writing(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Return a gate that holds up the writing thread until the gate is opened."""
    gate = Gate(write_file)
    monkeypatch.setattr(checkpoint_writer, "write_file", gate)
    return gate


def test_training_continues_without_changing_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = held_writing(monkeypatch)
    training = Training()
    training.epoch()
    training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    expected = training.everything()
    training.epoch()
    for tensor in training.raw.state_dict().values():
        tensor.zero_()
    training.counter.count = -1
    assert not (tmp_path / "out").exists()
    gate.open()
    training.accelerator.load_state(str(tmp_path / "out"))
    assert same(training.everything(), expected)


def test_a_save_waits_for_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = held_writing(monkeypatch)
    training = Training()
    training.accelerator.save_state(str(tmp_path / "a"), blocking=False)
    threading.Timer(0.2, gate.open).start()
    training.accelerator.save_state(str(tmp_path / "b"), blocking=False)
    assert (tmp_path / "a" / "checkpoint_manifest.json").exists()
    training.accelerator.end_training()
    assert (tmp_path / "b" / "checkpoint_manifest.json").exists()


def test_files_added_during_a_save_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = held_writing(monkeypatch)
    training, folder = Training(), tmp_path / "out"
    training.accelerator.save_state(str(folder), blocking=False)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    gate.open()
    training.accelerator.load_state(str(folder))
    assert (folder / "notes.txt").read_text() == "mine"
    assert not [*folder.glob(".*"), *tmp_path.glob(".*")]


def test_an_error_is_logged_and_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    training.accelerator.save_state(str(tmp_path / "out"))
    before = training.weights()
    training.epoch()

    def full(value: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_file", full)
    training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    with pytest.raises(
        CheckpointError, match=r"disk is full, [0-9.]+ [kMGT]?B are free\. Its previous content is unchanged"
    ):
        training.accelerator.end_training()
    assert "disk is full" in caplog.text
    monkeypatch.undo()
    training.accelerator.load_state(str(tmp_path / "out"))
    assert same(training.weights(), before)
    assert not list((tmp_path / "out").glob(".*"))


def test_an_optimizer_waits_for_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(checkpointing.snapshot.Snapshot._run)
    monkeypatch.setattr(checkpointing.snapshot.Snapshot, "_run", partialmethod(gate))
    training = Training()
    training.epoch()
    state = [value.clone() for value in training.optimizer.state[training.raw.first.weight].values()]
    training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    assert gate.reached.wait(60)
    threading.Timer(0.3, gate.open).start()
    training.epoch(stop=1)
    assert gate.opened.is_set()
    training.accelerator.end_training()
    saved = torch.load(tmp_path / "out" / "optimizer.bin")["state"][0]
    assert same(state, list(saved.values()))
    assert not training.optimizer.optimizer._optimizer_step_pre_hooks


def test_changing_an_optimizers_state_during_a_save_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = checkpointing.snapshot.Snapshot._run
    training = Training()
    training.epoch()

    def meddle(self: Any) -> None:
        training.optimizer.state[training.raw.first.weight]["exp_avg"].zero_()
        run(self)

    monkeypatch.setattr(checkpointing.snapshot.Snapshot, "_run", meddle)
    training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    with pytest.raises(CheckpointError, match=r"changed in place, outside its step\(\)"):
        training.accelerator.end_training()
    assert not (tmp_path / "out").exists()


def test_a_tensor_learning_rate_may_change_immediately(tmp_path: Path) -> None:
    training = Training()
    rate = torch.tensor(0.5)
    training.optimizer.param_groups[0]["lr"] = rate
    training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    rate.fill_(0.25)
    training.accelerator.end_training()
    assert torch.load(tmp_path / "out" / "optimizer.bin")["param_groups"][0]["lr"] == 0.5


def test_a_script_that_exits_still_writes_its_checkpoint(tmp_path: Path, interpreters: InterpreterServer) -> None:
    script = f"""
import torch
from notebook_accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(512, 512))
accelerator.save_state({str(tmp_path / "out")!r}, blocking=False)
raise SystemExit(3)
"""
    assert interpreters.run("-c", script, env=os.environ).returncode == 3
    accelerator = Training().accelerator
    accelerator._models[:], accelerator._custom_objects[:] = [nn.Linear(512, 512)], []
    for objects in (accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders):
        objects.clear()
    accelerator.load_state(str(tmp_path / "out"))


def test_copies_keep_structure_sharing_views_and_metadata() -> None:
    base = torch.arange(6.0)
    module_state = nn.BatchNorm1d(3).state_dict()
    value = {
        "views": [base[1:3], base.view(2, 3).t()],
        "whole": (base, base.to_sparse(), torch.empty(0, 3), torch.tensor(3, dtype=torch.bfloat16)),
        "module": module_state,
        "plain": {"list": [1, 2], "none": None, 3: "x"},
    }
    snapshots = SnapshotBuffers()
    copied = snapshots.take([value]).values[0]
    base.zero_()
    value["plain"]["list"].append(3)
    assert copied["views"][0].tolist() == [1, 2]
    assert copied["views"][1].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copied["views"][0].untyped_storage().data_ptr() == copied["whole"][0].untyped_storage().data_ptr()
    assert copied["whole"][0].untyped_storage().nbytes() == 24
    assert copied["whole"][1].to_dense().tolist() == [0, 1, 2, 3, 4, 5]
    assert copied["whole"][2].shape == (0, 3)
    assert copied["whole"][3].item() == 3
    assert copied["module"]._metadata == module_state._metadata
    assert copied["plain"] == {"list": [1, 2], "none": None, 3: "x"}


def test_the_next_copy_uses_the_same_memory() -> None:
    snapshots, tensor = SnapshotBuffers(), torch.ones(1 << 16)
    first = snapshots.take([tensor]).values[0].data_ptr()
    assert snapshots.take([tensor]).values[0].data_ptr() == first


def test_without_threads_a_save_runs_in_the_foreground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    training = Training()
    training.epoch()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.warns(UserWarning, match="wrote the checkpoint in the foreground: can't start new thread"):
        training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    assert (tmp_path / "out" / "checkpoint_manifest.json").exists()
    training.epoch()
    training.accelerator.end_training()
    assert not training.optimizer.optimizer._optimizer_step_pre_hooks


def end_interrupted(training: Training) -> None:
    threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    training.accelerator.end_training()


def test_an_interrupted_wait_keeps_the_save_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = held_writing(monkeypatch)
    training = Training()
    training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    # SIGINT may be ignored in the process that runs the tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            end_interrupted(training)
    signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "out").exists()
    threading.Timer(0.3, gate.open).start()
    training.accelerator.end_training()
    assert (tmp_path / "out" / "checkpoint_manifest.json").exists()


def test_an_interrupted_save_keeps_the_previous_one_and_does_not_raise_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    training.accelerator.save_state(str(tmp_path / "out"))
    before = training.weights()
    training.epoch()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_file", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.accelerator.save_state(str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob(".*"))
    training.accelerator.load_state(str(tmp_path / "out"))
    assert same(training.weights(), before)
    training.accelerator.save_state(str(tmp_path / "out"))


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_failed_copy_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.epoch()

    def exhausted(*_: Any) -> None:
        raise MemoryError("no memory for the copy")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotBuffers, "take", exhausted)
        with pytest.raises(MemoryError, match="no memory for the copy"):
            training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    assert list(tmp_path.iterdir()) == []
    training.epoch()  # The next epoch shows that no optimizer still waits for the copy that failed.
    training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
    training.accelerator.end_training()
    assert (tmp_path / "out" / "checkpoint_manifest.json").exists()


def test_folder_size_skips_files_renamed_during_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_bytes(b"123")
    monkeypatch.setattr(disk_store, "files_below", lambda folder: [folder / "renamed", folder / "there"])
    assert disk_store._folder_size(tmp_path) == 3


def test_an_exited_process_is_detected() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        peer = dataclasses.replace(this_process(), pid=process.pid, started=0)
        if not peer.machine:
            pytest.skip("this system does not identify machines")
        assert not peer.has_ended()
        process.kill()
        deadline = time.monotonic() + 60
        # The process stays a zombie, because nothing has read its exit status yet.
        while not peer.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert peer.has_ended()
    assert peer.has_ended()
    assert not this_process().has_ended()
    assert not dataclasses.replace(peer, machine="another").has_ended()
    assert not dataclasses.replace(peer, machine="").has_ended()
    assert dataclasses.replace(this_process(), started=1).has_ended(), "another process now has its ID"
