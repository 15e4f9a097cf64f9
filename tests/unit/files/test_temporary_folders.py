"""Private temporary folders, and their removal by the right process at the right time."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from notebook_accelerate.files.temporary_folders import (
    _PREFIX,
    _locks,
    make_private_folder,
    make_private_folder_for,
    remove_private_folder,
)
from notebook_accelerate.launch.report.profile import ProfileFolder

KILLED = """
import os, signal
from notebook_accelerate.launch.report.profile import ProfileFolder
folder = ProfileFolder()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Owner:
    """An object that owns a folder."""


@pytest.fixture(autouse=True)
def _own_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_folders_of_exited_processes_are_removed(tmp_path: Path) -> None:
    left, kept = make_private_folder(), make_private_folder()
    _locks.pop(left)  # This makes it look as if the folder's process had exited: only this descriptor held the lock.
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if str(left) in str(path.resolve())]
    for path in descriptors:
        os.close(int(path.name))
    another = make_private_folder()
    assert not left.exists()
    assert kept.exists()
    remove_private_folder(kept)
    remove_private_folder(another)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_removed_with_its_owner(tmp_path: Path) -> None:
    owner = Owner()
    folder = make_private_folder_for(owner)
    (folder / "trace").touch()
    assert folder.parent == tmp_path
    del owner
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_keeps_the_folder_of_an_object_that_it_drops() -> None:
    owner = Owner()
    folder = make_private_folder_for(owner)
    child = os.fork()
    if child == 0:
        del owner
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert folder.exists()


def test_traces_of_a_killed_kernel_are_removed_by_the_next_profile(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert left.exists()
    folder = ProfileFolder()
    assert not left.exists()
    assert [each for each in tmp_path.iterdir() if each.is_dir()] == [folder.path]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to own a file as another user")
def test_a_lock_of_another_user_removes_nothing(tmp_path: Path) -> None:
    name = f"{_PREFIX}{os.getuid()}-notes"
    (tmp_path / name).mkdir()
    lock = tmp_path / f"{name}.lock"
    lock.touch()
    os.chown(lock, 65534, 65534)
    remove_private_folder(make_private_folder(tmp_path))
    assert (tmp_path / name).is_dir()
