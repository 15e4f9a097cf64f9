"""Saves to a store that are killed before each change that they make, and the state that the next process finds."""

from __future__ import annotations

import subprocess
import sys

# For each k, one process is killed before its k-th change to the store. Another process then loads and saves again.
_KILL_AT_EVERY_CHANGE = """
import os, signal, sys, torch
import torch._dynamo  # what each forked process would import with its first optimizer
from tests.support import stores
from notebook_accelerate import Accelerator, errors
from notebook_accelerate.files.remote_paths import RemotePath
from notebook_accelerate.config.kwargs_handlers import ProjectConfiguration

url, target, blocking, every = sys.argv[1], sys.argv[2], sys.argv[3] == "True", int(sys.argv[4])
CHANGES = ("write_text", "upload", "copy_files", "unlink", "remove_files", "remove_tree")

def training(place, value, iteration=0, **project):
    project = ProjectConfiguration(project_dir=place, iteration=iteration, **project) if project else None
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(16, 16)
    torch.nn.init.constant_(model.weight, value)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model

def save(place, value, iteration=1):
    if target == "auto":
        options = dict(automatic_checkpoint_naming=True, total_limit=1)
        accelerator, _ = training(place, value, iteration, **options)
        accelerator.save_state(blocking=blocking)
    else:
        accelerator, _ = training(place, value)
        accelerator.save_state(f"{place}/old" if target == "old" else f"{place}/new", blocking=blocking)
    accelerator.end_training()

def loaded(place):
    options = dict(automatic_checkpoint_naming=True) if target == "auto" else {}
    accelerator, model = training(place, 0.0, **options)
    try:
        accelerator.load_state(None if target == "auto" else f"{place}/{target}")
    except (errors.BrokenCheckpointError, ValueError) as error:
        return type(error).__name__
    return model.weight.unique().item()

def killed_at(step):
    seen = 0
    for name in CHANGES:
        method = getattr(RemotePath, name)
        def counted(self, *arguments, method=method, **options):
            nonlocal seen
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *arguments, **options)
        setattr(RemotePath, name, counted)

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def first(place):
    if target != "new":
        accelerator, _ = training(place, 1.0)
        accelerator.save_state(f"{place}/old" if target == "old" else f"{place}/checkpoints/checkpoint_0")

stores.load_packages(url)
step, ended = 1 - every, False
while not ended:
    step += every
    place = f"{url}/at_{step}"
    def victim():
        first(place)
        killed_at(step)
        save(place, 2.0)
    code = child(victim)
    assert code in (0, -signal.SIGKILL), code
    ended = code == 0
    def witness():
        found = loaded(place)
        save(place, 3.0, 2)
        assert loaded(place) == 3.0
        print(step, found, flush=True)
    assert child(witness) == 0
"""


def killed_saves(url: str, target: str, blocking: bool, every: int = 1) -> list[tuple[str, str]]:
    """Kill a save before each change of the store, and save again each time.

    Args:
        url: The target folder, whose subfolder ``at_{k}`` contains the k-th save.
        target: "new" without an earlier checkpoint, "old" with one in its place, or "auto" for numbered checkpoints of
            which one is kept.
        blocking: Whether the save blocks.
        every: Try only every n-th change.

    Returns:
        For each save, the number of the change, and the result of the next process: 1.0 if it loaded the earlier
        checkpoint, 2.0 if it loaded the killed one, and otherwise the name of the error. The last save is not killed.
    """
    command = [sys.executable, "-c", _KILL_AT_EVERY_CHANGE, url, target, str(blocking), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pairs = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    return [(step, found) for step, found in pairs]
