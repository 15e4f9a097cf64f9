"""The locks of processes that were killed while they compiled DeepSpeed's operators are removed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.utils import file_baton
from torch.utils.cpp_extension import get_default_build_root

from notebook_accelerate.state.warn_once import reset_warnings
from notebook_accelerate.strategies.deepspeed import deepspeed_engine

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc only")

HOLD = """
import runpy, sys, time

assert runpy.run_path(sys.argv[1])["FileBaton"](sys.argv[2]).try_acquire()
print("held", flush=True)
time.sleep(1000)
"""


def held(lock: Path) -> subprocess.Popen[str]:
    lock.parent.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, file_baton.__file__, str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on a file system that is treated as local to this container."""
    monkeypatch.setattr(
        deepspeed_engine, "_CONTAINER_FILE_SYSTEMS", frozenset({deepspeed_engine._file_system_type(tmp_path)})
    )
    return tmp_path


@pytest.mark.usefixtures("fresh_state")
def test_a_lock_is_removed_when_its_process_is_dead(own: Path) -> None:
    locks = [own / "one" / "lock", own / "py311_cpu" / "two" / "lock"]
    processes = [held(lock) for lock in locks]
    try:
        assert deepspeed_engine.remove_dead_locks(own) == []
        end(processes[0])
        with pytest.warns(UserWarning, match=r"removed .*one/lock: the process that was compiling there"):
            assert deepspeed_engine.remove_dead_locks(own) == locks[:1]
        assert [lock.exists() for lock in locks] == [False, True]
    finally:
        for process in processes:
            end(process)
    with pytest.warns(UserWarning, match=r"removed .*two/lock"):
        assert deepspeed_engine.remove_dead_locks(own) == locks[1:]


def test_a_zombie_counts_as_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert not deepspeed_engine._has_ended(Path("/proc/self"))
        assert process.stdout.read() == b""  # The process has closed its files and is about to exit.
        deadline = time.monotonic() + 60
        while not deepspeed_engine._has_ended(Path(f"/proc/{process.pid}")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.stdout.close()
        process.wait()
    assert deepspeed_engine._has_ended(Path(f"/proc/{process.pid}"))


@pytest.mark.usefixtures("fresh_state")
def test_a_lock_that_an_invisible_process_may_hold_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "one" / "lock"
    end(held(lock))
    monkeypatch.setattr(deepspeed_engine, "_CONTAINER_FILE_SYSTEMS", frozenset())
    own = str(Path("/proc/self/ns/pid").readlink())
    for kinds, pids in ((set(), own), ({deepspeed_engine._file_system_type(tmp_path)}, "pid:[1]")):
        monkeypatch.setattr(deepspeed_engine, "_MACHINE_FILE_SYSTEMS", frozenset(kinds))
        monkeypatch.setattr(deepspeed_engine, "_INITIAL_PID_NAMESPACE", pids)
        reset_warnings()
        with pytest.warns(UserWarning, match=rf"in another container with this .*: rm {lock}"):
            assert deepspeed_engine.remove_dead_locks(tmp_path) == []
        assert lock.exists()
    monkeypatch.setattr(deepspeed_engine, "_INITIAL_PID_NAMESPACE", own)
    with pytest.warns(UserWarning, match=r"removed .*one/lock"):
        assert deepspeed_engine.remove_dead_locks(tmp_path) == [lock]


def test_the_file_system_is_unknown_if_mounts_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "missing"))
    assert deepspeed_engine._file_system_type(tmp_path) == ""


def test_the_extensions_folder_is_shared_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert deepspeed_engine.extensions_folder().resolve() == Path(get_default_build_root()).resolve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert deepspeed_engine.extensions_folder().resolve() == Path(get_default_build_root()).resolve()
    assert deepspeed_engine.extensions_folder() == tmp_path / "torch_extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    assert deepspeed_engine.extensions_folder() == tmp_path / "own"


@pytest.mark.usefixtures("fresh_state")
def test_dead_locks_are_removed_before_compiling(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = own / "cpu_adam" / "lock"
    end(held(lock))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(own))
    with pytest.warns(UserWarning, match="was killed") as seen, deepspeed_engine.compilation_context():
        assert not lock.exists()
    assert seen[0].filename == __file__
