"""Several processes use a checkpoint at the same time: some load it during saves, or two runs save to one folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import tests.support.mounted  # noqa: F401 - makes its protocol known
from notebook_accelerate import Accelerator
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state import reset_shared_state
from tests.support.fresh import fresh_state
from tests.support.ranks import run_ranks

__all__ = ["fresh_state"]


class Value:
    """A custom object with a state."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Parts:
    """A state that is saved as four files, all of which hold one value."""

    def __init__(self, value: float) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.models = [nn.Linear(64, 64, bias=False) for _ in range(3)]
        self.custom = Value(value)
        self.accelerator.prepare(*self.models)
        self.accelerator.register_for_checkpointing(self.custom)
        self.set(value)

    def set(self, value: float) -> None:
        self.custom.value = value
        for model in self.models:
            nn.init.constant_(model.weight, value)

    def values(self) -> set[float]:
        found = {self.custom.value}
        for model in self.models:
            found |= set(model.weight.detach().unique().tolist())
        return found


def value_in(folder: Path | str) -> float:
    """Load a checkpoint and return the single value that its files hold."""
    reset_shared_state()
    parts = Parts(-1.0)
    parts.accelerator.load_state(str(folder))
    (value,) = parts.values()
    return value


_SAVER = """
import ctypes, sys, time
import tests.support.mounted
from tests.faults.test_shared_checkpoints import Parts
folder = sys.argv[1]
parts = Parts(float(sys.argv[2]))

def stop_before(event, path):
    def audit(name, arguments):
        global stopped
        if not stopped and name == event and path in str(arguments[0]):
            stopped = True
            if len(sys.argv) > 5:  # as C code forks: without Python's hooks, every open file is the child's too
                child = ctypes.CDLL(None).fork()
                if child == 0:
                    time.sleep(600)
                open(sys.argv[5], "x").write(str(child))
            print("stopped", flush=True)
            sys.stdin.readline()
    sys.addaudithook(audit)

stopped = False
if len(sys.argv) > 3:
    stop_before(sys.argv[3], sys.argv[4])
parts.accelerator.save_state(folder)
print("saved", flush=True)
"""

MOVING = ("os.rename", "/.committing/")
COPYING = ("shutil.copyfile", "/.committing/model_1")  # A store cannot rename files, so they are copied.
WRITING = ("open", "custom_checkpoint_0.pkl")


def start_saver(folder: Path | str, value: float, *stop: str, **options: Any) -> subprocess.Popen[str]:
    """Start a process that saves one value. With `stop`, return once the process has paused before that event."""
    command = [sys.executable, "-c", _SAVER, str(folder), str(value), *stop]
    saver = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    assert saver.stdout is not None
    if stop:
        assert saver.stdout.readline() == "stopped\n", saver.communicate()
    return saver


def finish(saver: subprocess.Popen[str]) -> None:
    """Let a paused saver continue, and check that it saves."""
    output, errors = saver.communicate("go on\n", timeout=60)
    assert (saver.returncode, output) == (0, "saved\n"), errors


def test_a_load_waits_for_a_live_writer_that_is_moving_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    Parts(1.0).accelerator.save_state(str(folder))
    saver = start_saver(folder, 2.0, *MOVING)
    found: list[float] = []
    loader = threading.Thread(target=lambda: found.append(value_in(folder)))
    loader.start()
    time.sleep(0.3)
    assert loader.is_alive()
    assert (folder / ".committing" / "checkpoint_manifest.json").exists()
    finish(saver)
    loader.join(60)
    assert found == [2.0]


def test_a_load_finishes_the_commit_of_a_finished_writer(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    Parts(1.0).accelerator.save_state(str(folder))
    saver = start_saver(folder, 2.0, *MOVING)
    saver.kill()
    saver.communicate()
    assert value_in(folder) == 2.0
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_the_child_of_a_finished_writer_does_not_keep_its_lock(tmp_path: Path) -> None:
    folder, note = tmp_path / "out", tmp_path / "child"
    Parts(1.0).accelerator.save_state(str(folder))
    saver = start_saver(folder, 2.0, *MOVING, str(note))
    saver.kill()
    try:
        saver.wait()
        assert value_in(folder) == 2.0
        reset_shared_state()
        Parts(3.0).accelerator.save_state(str(folder))
        assert value_in(folder) == 3.0
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)
        saver.communicate()


def test_a_load_from_a_store_leaves_a_live_writer_alone(tmp_path: Path) -> None:
    folder = f"mounted://{tmp_path}/out"
    Parts(1.0).accelerator.save_state(folder)
    saver = start_saver(folder, 2.0, *COPYING)
    assert value_in(folder) == 2.0
    assert (tmp_path / "out" / ".committing" / "checkpoint_manifest.json").exists()
    reset_shared_state()
    with pytest.raises(CheckpointError, match=rf"process {saver.pid} on .* is saving to this folder"):
        Parts(3.0).accelerator.save_state(folder)
    finish(saver)
    assert value_in(folder) == 2.0
    reset_shared_state()
    Parts(3.0).accelerator.save_state(folder)
    assert value_in(folder) == 3.0


def save_values(folder: str, count: int, pause: float) -> None:
    parts = Parts(0.0)
    for value in range(1, count + 1):
        parts.set(float(value))
        parts.accelerator.save_state(folder)
        time.sleep(pause)


@pytest.mark.parametrize("pause", [0.1, pytest.param(0.0, marks=pytest.mark.nightly)])
def test_loads_during_the_saves_of_two_ranks_see_a_single_save(tmp_path: Path, pause: float) -> None:
    folder, count = tmp_path / "out", 30
    Parts(0.0).accelerator.save_state(str(folder))
    failures: list[BaseException] = []

    def save() -> None:
        try:
            run_ranks(save_values, str(folder), count, pause)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    reset_shared_state()
    parts, loads = Parts(-1.0), []
    while saving.is_alive():
        time.sleep(0.01)
        parts.accelerator.load_state(str(folder), elastic=True)
        (value,) = parts.values()
        loads.append(value)
    saving.join()
    assert failures == []
    assert loads == sorted(loads)
    assert len(set(loads)) > 5
    assert value_in_elastic(folder) == count


def value_in_elastic(folder: Path) -> float:
    reset_shared_state()
    parts = Parts(-1.0)
    parts.accelerator.load_state(str(folder), elastic=True)
    (value,) = parts.values()
    return value


@pytest.mark.parametrize("stop", [WRITING, MOVING], ids=["writing", "moving"])
def test_a_second_run_that_saves_to_the_folder_gets_an_error_that_names_the_first(
    tmp_path: Path, stop: tuple[str, str]
) -> None:
    folder = tmp_path / "out"
    Parts(1.0).accelerator.save_state(str(folder))
    saver = start_saver(folder, 2.0, *stop)
    reset_shared_state()
    with pytest.raises(CheckpointError, match=rf"process {saver.pid} on .* is saving to this folder.*unchanged"):
        Parts(3.0).accelerator.save_state(str(folder))
    finish(saver)
    assert value_in(folder) == 2.0
    reset_shared_state()
    Parts(3.0).accelerator.save_state(str(folder))
    assert value_in(folder) == 3.0


def test_a_second_run_that_saves_a_new_folder_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    saver = start_saver(folder, 2.0, *WRITING)
    with pytest.raises(CheckpointError, match=rf"process {saver.pid} on .* is saving to this folder"):
        Parts(3.0).accelerator.save_state(str(folder))
    folder.mkdir()  # In an existing folder, the second run stages inside it, while the first one stages next to it.
    reset_shared_state()
    with pytest.raises(CheckpointError, match=rf"process {saver.pid} on .* is saving to this folder"):
        Parts(3.0).accelerator.save_state(str(folder))
    finish(saver)
    assert value_in(folder) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_folder_of_a_killed_run_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    saver = start_saver(folder, 2.0, *WRITING)
    saver.send_signal(signal.SIGKILL)
    saver.wait()
    Parts(3.0).accelerator.save_state(str(folder))
    assert value_in(folder) == 3.0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_removed_lock_ends_the_save(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    Parts(1.0).accelerator.save_state(str(folder))
    saver = start_saver(folder, 2.0, *WRITING)
    (folder / ".saving").unlink()
    _, errors = saver.communicate("go on\n", timeout=60)
    assert saver.returncode == 1
    assert "the lock" in errors
    assert "was removed while it was being saved" in errors
    assert value_in(folder) == 1.0


def test_a_checkpoint_replaced_between_verifying_and_loading_is_read_again(tmp_path: Path) -> None:
    folder, read = tmp_path / "out", []
    Parts(1.0).accelerator.save_state(str(folder))
    reset_shared_state()
    parts = Parts(-1.0)

    def replace(_: object, place: str) -> None:
        if not read:
            finish(start_saver(place, 2.0))
        read.append(place)

    parts.accelerator.register_load_state_pre_hook(replace)
    parts.accelerator.load_state(str(folder))
    assert parts.values() == {2.0}
    assert len(read) == 2


def test_a_checkpoint_that_keeps_being_replaced_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    Parts(1.0).accelerator.save_state(str(folder))
    reset_shared_state()
    parts = Parts(-1.0)

    def replace(_: object, place: str) -> None:
        (tmp_path / "other").write_bytes((Path(place) / "checkpoint_manifest.json").read_bytes() + b" ")
        (tmp_path / "other").replace(Path(place) / "checkpoint_manifest.json")

    parts.accelerator.register_load_state_pre_hook(replace)
    with pytest.raises(CheckpointError, match="another process saved to it each of the 10 times"):
        parts.accelerator.load_state(str(folder))


def test_two_runs_that_save_continuously_lose_nothing(tmp_path: Path) -> None:
    code = """
import sys, time
from notebook_accelerate.errors import CheckpointError
from tests.faults.test_shared_checkpoints import Parts
parts = Parts(0.0)
for number in range(40):
    parts.set(float(number + int(sys.argv[2])))
    try:
        parts.accelerator.save_state(sys.argv[1])
    except CheckpointError as error:
        assert "is saving to this folder" in str(error), error
    time.sleep(0.001)
"""
    folder = tmp_path / "out"
    Parts(1.0).accelerator.save_state(str(folder))
    savers = [
        subprocess.Popen([sys.executable, "-c", code, str(folder), start], stderr=subprocess.PIPE)
        for start in ("0", "1000")
    ]
    for saver in savers:
        _, errors = saver.communicate(timeout=120)
        assert saver.returncode == 0, errors.decode()
    assert value_in(folder) in set(range(40)) | set(range(1000, 1040))
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
