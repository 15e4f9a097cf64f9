"""Like Accelerate, `save_state` fills an existing folder in place."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from notebook_accelerate import Accelerator
from notebook_accelerate.checkpointing.save_lock import acquire_lock
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.state import reset_shared_state

MANIFEST = "checkpoint_manifest.json"


def save(folder: Path | str, value: float = 1.0) -> None:
    """Save the checkpoint of a model whose weight is filled with ``value``."""
    reset_shared_state()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    accelerator.prepare(model)
    accelerator.save_state(str(folder))


def value_in(folder: Path | str) -> float:
    reset_shared_state()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    accelerator.prepare(model)
    accelerator.load_state(str(folder))
    (value,) = model.weight.detach().unique().tolist()
    return float(value)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the group of a folder needs root")
def test_mode_and_group_of_an_empty_folder_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    os.chown(folder, 12, 345)
    folder.chmod(0o2750)
    before = folder.stat()
    save(folder)
    after = folder.stat()
    assert (after.st_ino, after.st_uid, after.st_gid) == (before.st_ino, 12, 345)
    assert stat.S_IMODE(after.st_mode) == 0o2750
    assert {path.stat().st_gid for path in folder.iterdir()} == {345}
    assert value_in(folder) == 1.0
    assert hidden(folder) == []


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "out"
    link.symlink_to("real")
    for value in (1.0, 2.0):
        save(link, value)
        assert link.is_symlink()
        assert (tmp_path / "real" / MANIFEST).exists()
        assert value_in(link) == value_in(tmp_path / "real") == value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_an_empty_mount_point_is_filled(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        for value in (1.0, 2.0):
            save(folder, value)
            assert value_in(folder) == value
        assert os.path.ismount(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


_AS_ANOTHER_USER = """
import os, sys
import torch, notebook_accelerate.checkpointing.state_saving, notebook_accelerate.checkpointing.disk_store
from tests.unit.checkpointing.test_existing_folders import save, value_in
save(sys.argv[2])  # what is imported later may not be readable for the other user
value_in(sys.argv[2])
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
save("out", 2.0)
assert value_in("out") == 2.0
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_writable_folder_in_a_read_only_parent_is_filled(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users.
        parent = Path(name)
        parent.chmod(0o755)
        (parent / "out").mkdir()
        os.chown(parent / "out", 65534, 65534)
        command = [sys.executable, "-c", _AS_ANOTHER_USER, str(parent), str(tmp_path / "first")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert (parent / "out" / MANIFEST).exists()
        assert hidden(parent) == hidden(parent / "out") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("alive", [False, True])
def test_the_lock_of_another_user_is_respected_while_its_process_lives(tmp_path: Path, alive: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        parent.chmod(0o755)
        (parent / "out").mkdir()
        (parent / "out").chmod(0o777)
        lock = acquire_lock(parent / "out" / ".saving")
        if not alive:
            lock.abandon()
        command = [sys.executable, "-c", _AS_ANOTHER_USER, str(parent), str(tmp_path / "first")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lock.release()
        if alive:
            assert f"process {os.getpid()} on" in done.stderr
        else:
            assert done.returncode == 0, done.stderr
            assert hidden(parent / "out") == []


def test_a_name_of_the_maximum_length_works(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 255)
    for value in (1.0, 2.0):
        save(folder, value)
        assert value_in(folder) == value
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, b"[" * 4096, b'{"pid": -1, "machine": ""}', b'{"pid": 1, "machine": 3}']
)
def test_a_lock_without_an_owner_is_free(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, 1.0)
    (tmp_path / ".saving").write_bytes(content)
    save(tmp_path, 2.0)
    assert value_in(tmp_path) == 2.0
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_a_lock_that_is_not_a_file_is_reported(tmp_path: Path, make: Callable[[Path], None]) -> None:
    save(tmp_path, 1.0)
    make(tmp_path / ".saving")
    with pytest.raises(CheckpointError, match=r"was not written: .*\.saving"):
        save(tmp_path, 2.0)
    assert value_in(tmp_path) == 1.0


def test_the_working_directory_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(".")
    assert Path.cwd() == tmp_path
    assert Path(MANIFEST).exists()
    assert value_in(".") == 1.0


def test_an_unfinished_save_into_an_empty_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / ".incomplete" / "token").mkdir(parents=True)
    (folder / ".incomplete" / "token" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(BrokenCheckpointError, match="never finished"):
        value_in(folder)
    save(folder)
    assert value_in(folder) == 1.0
    assert hidden(folder) == []


def test_a_folder_created_during_the_save_is_filled(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    reset_shared_state()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(4, 4))

    def create(*_: object) -> None:
        folder.mkdir()
        folder.chmod(0o700)
        (folder / "note").write_text("the user's")

    accelerator.register_save_state_pre_hook(create)
    accelerator.save_state(str(folder))
    assert (folder / "note").exists()
    assert (folder / MANIFEST).exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert hidden(folder) == []
