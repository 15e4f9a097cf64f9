"""Ending a process group."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from notebook_accelerate import Accelerator
from tests.support.ranks import run_ranks


def end_with_a_model_alive() -> bool:
    """Free a DDP model after destroying its group, while gloo's thread still refers to the last collective."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[int(os.environ["RANK"]) % len(cores)]])
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    # Delay gloo's thread: on a shared core, its low priority lets this thread run first, and the long switch interval
    # keeps it from getting the interpreter.
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
    sys.setswitchinterval(1000)
    gathered, own = [torch.zeros(4000) for _ in range(2)], torch.ones(4000)
    torch.distributed.all_gather(gathered, own)
    del gathered, own
    accelerator.state.destroy_process_group()
    accelerator.free_memory()
    del accelerator, model
    return torch.distributed.is_initialized()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux: priorities of single threads")
def test_a_model_may_be_freed_right_after_its_group_was_destroyed() -> None:
    for _ in range(3):
        assert run_ranks(end_with_a_model_alive) == [False, False]
