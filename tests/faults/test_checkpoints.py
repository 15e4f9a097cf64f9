"""Saves can be killed at any point: the previous checkpoint still loads, and an unfinished one is recognized."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from tests.support.fresh import fresh_state

__all__ = ["fresh_state"]

_SAVE = """
import os, sys, torch
from notebook_accelerate import Accelerator
from notebook_accelerate.config.kwargs_handlers import ProjectConfiguration

def saver(target, value, blocking=True):
    project = None
    if target == "auto":
        project = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=1, iteration=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(16, 16)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer)
    def save():
        accelerator.save_state(None if project else target, blocking=blocking)
        accelerator.end_training()
    return save
"""

# For each k, one process exits without any clean-up before its k-th change to the file system.
_KILL_AT_EVERY_CHANGE = """
import signal
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")

def killed_at(step, save):
    seen = 0
    def audit(event, arguments):
        nonlocal seen
        writes = event == "open" and (isinstance(arguments[1], str) and set(arguments[1]) & set("wxa"))
        if event in CHANGES or writes:
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(audit)
    save()

import shutil
target, blocking = sys.argv[1], sys.argv[2] == "True"
shutil.copytree(".", "../pristine")
save = saver(target, 2.0, blocking)
step = 0
while True:
    step += 1
    place = f"../at_{step}"
    shutil.copytree("../pristine", place)
    pid = os.fork()
    if pid == 0:
        os.chdir(place)
        killed_at(step, save)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(step, code, flush=True)
    if code != -signal.SIGKILL:
        sys.exit(code)
"""

# This script forks a process for each line of input, so that modules are imported only once. The process saves until
# it is killed.
_SAVE_UNTIL_KILLED = """
import signal
import torch._dynamo  # by the first optimizer
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        print(os.getpid(), flush=True)
        for value in range(1, 100000):
            torch.manual_seed(0)
            saver("out", float(value), blocking=bool(value % 2))()
            print(value, flush=True)
        os._exit(1)
    killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    print("killed" if killed else "ended", flush=True)
"""


def python(code: str, *arguments: str, cwd: Path, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def save_ones(folder: Path) -> None:
    """Save a checkpoint of the small model, all of whose weights are 1."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(16, 16)
    nn.init.constant_(model.weight, 1.0)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(folder))
    accelerator.end_training()


def value_in(folder: Path) -> float:
    """Load a checkpoint of the small model and return the value that all its weights have."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(16, 16)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.load_state(str(folder))
    values = model.weight.detach().unique()
    assert len(values) == 1
    return values.item()


@pytest.mark.parametrize(
    ("target", "blocking"),
    [
        ("new", True),
        pytest.param("auto", False, marks=pytest.mark.nightly),
        pytest.param("new", False, marks=pytest.mark.nightly),
        pytest.param("old", True, marks=pytest.mark.nightly),
        pytest.param("old", False, marks=pytest.mark.nightly),
        pytest.param("auto", True, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(1800)
def test_a_process_killed_at_any_change_of_the_disk_loses_nothing(tmp_path: Path, target: str, blocking: bool) -> None:
    work = tmp_path / "work"
    work.mkdir()
    first = "checkpoints/checkpoint_0" if target == "auto" else "old"
    save_ones(work / first)
    done = python(_SAVE + _KILL_AT_EVERY_CHANGE, target, str(blocking), cwd=work)
    assert done.returncode == 0, done.stderr
    steps = [path for path in tmp_path.iterdir() if path.name.startswith("at_")]
    assert len(steps) > 8
    found = {check(place, target) for place in steps}
    assert found == {1.0, 2.0}


def check(place: Path, target: str) -> float:
    """Return the value of the newest complete checkpoint. Loading an unfinished one must raise."""
    # While a save overwrites a checkpoint, all files that load belong to either the first or the second save.
    if target == "old":
        return value_in(place / "old")
    new = place / ("checkpoints/checkpoint_1" if target == "auto" else "new")
    if not new.exists():
        assert value_in(place / ("checkpoints/checkpoint_0" if target == "auto" else "old")) == 1.0
        if any(place.glob(".*.incomplete")):
            with pytest.raises(BrokenCheckpointError, match=r"never finished: its process died while writing"):
                value_in(new)
        return 1.0
    return value_in(new)


def test_a_process_killed_at_a_random_moment_loses_nothing(tmp_path: Path) -> None:
    generator = random.Random(4)
    command = [sys.executable, "-c", _SAVE + _SAVE_UNTIL_KILLED]
    parent = subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent:
        try:
            for _ in range(4):
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
                print("start", file=parent.stdin, flush=True)
                child = int(parent.stdout.readline())
                assert parent.stdout.readline() == "1\n"
                time.sleep(generator.random() / 4)
                os.kill(child, signal.SIGKILL)
                finished = [1, *(int(line) for line in iter(parent.stdout.readline, "killed\n"))]
                assert value_in(tmp_path / "out") in {finished[-1], finished[-1] + 1}
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_truncated_file_is_reported_by_name(tmp_path: Path) -> None:
    save_ones(tmp_path / "out")
    for path in sorted((tmp_path / "out").iterdir()):
        content = path.read_bytes()
        for length in {0, 1, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:length])
            with pytest.raises(BrokenCheckpointError, match=rf"(?s)out is broken.*{path.name}"):
                value_in(tmp_path / "out")
        path.write_bytes(content)
    assert value_in(tmp_path / "out") == 1.0
    (tmp_path / "out" / "optimizer.bin").unlink()
    with pytest.raises(BrokenCheckpointError, match=r"optimizer\.bin is missing"):
        value_in(tmp_path / "out")


@pytest.mark.parametrize("blocking", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_full_disk_raises_and_keeps_the_previous_checkpoint(tmp_path: Path, blocking: bool) -> None:
    save_ones(tmp_path / "out")
    # A limit on the size of files makes writes fail halfway, like a full disk except for the message.
    script = (
        _SAVE
        + f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save = saver("out", 2.0, {blocking})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
save()
"""
    )
    failed = python(script, cwd=tmp_path)
    assert failed.returncode == 1
    assert "CheckpointError: The checkpoint" in failed.stderr
    assert "was not written" in failed.stderr
    assert "Its previous content is unchanged" in failed.stderr
    assert value_in(tmp_path / "out") == 1.0


@pytest.mark.skipif(os.geteuid() != 0, reason="creating a small file system needs root")
def test_a_full_file_system_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(512, 512))
        for safe in (True, False):
            accelerator.save_state(str(disk / "first"))
            (disk / "ballast").write_bytes(bytes(1 << 20))
            with pytest.raises(CheckpointError, match="the disk is full"):
                accelerator.save_state(str(disk / "second"), safe_serialization=safe)
            assert not [path.name for path in disk.iterdir() if path.name not in {"first", "ballast"}]
            (disk / "ballast").unlink()
        accelerator.load_state(str(disk / "first"))
        assert model is accelerator._models[0]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
