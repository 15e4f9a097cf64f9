"""Profiles of ranks that another process started: in a detached run, in another kernel, or on another host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from notebook_accelerate import attach
from tests.support.detached import user_folder
from tests.support.join_commands import JOIN, LIMIT, JoinCommand
from tests.support.kernel import Kernel
from tests.support.ports import free_port
from tests.support.waiting import until

SECRET = "hush-4712"
TRAIN = """
import time, torch
from notebook_accelerate import Accelerator, notebook_launcher

def read(rank):
    if rank == 1:
        time.sleep(0.4)
    return torch.ones(64, 64)

def train():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    while True:
        batch = read(accelerator.process_index)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

def wait_for_steps(run, ranks=2):
    while run.ended is None and min(run._internals.store.last_step.get(rank, 0) for rank in range(ranks)) < 3:
        time.sleep(0.1)
"""
FACTS = "[profile.ranks, profile.steps, profile.missing, len(profile.timeline.steps), profile.findings[0].sentence]"
HIDE = """
from notebook_accelerate.launch.report.profile import ProfileFolder
seen = ProfileFolder.__init__
def hidden(self):
    seen(self)
    (self.path / self._token).unlink()
ProfileFolder.__init__ = hidden
"""
"""A cell that hides the folders of profiles from ranks, as if they were on another machine."""


def check(kernel: Kernel) -> None:
    """Profile the kernel's run, and check the findings and the memory report."""
    kernel.check("wait_for_steps(run)\nprofile = run.profile(steps=4)", 180)
    ranks, steps, missing, recorded, sentence = kernel.value(FACTS)
    assert (ranks, steps, missing, recorded) == ([0, 1], 4, {}, 8)
    assert sentence.startswith("rank 0 waits ")
    assert " per step for rank 1 in all_reduce" in sentence
    assert sentence.endswith("time.sleep(0.4)")
    kernel.check("memory = run.memory()", 120)
    assert kernel.value("memory.missing") == {}
    parameters = kernel.value("[memory.bytes(rank)['parameters'] for rank in (0, 1)]")
    assert parameters == [4 * (64 * 256 + 256 + 256 * 64 + 64)] * 2


def test_a_detached_run_can_be_profiled_from_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with user_folder(tmp_path / "state", monkeypatch):
        with Kernel(detached=1) as kernel:
            kernel.check(TRAIN)
            kernel.check("run = notebook_launcher(train, num_processes=2, use_port=0, detach=True, name='far')", 120)
            followed = attach("far")
            until(lambda: followed._internals.store.last_step.get(0, -1) >= 2)
            kernel.kill()
        with Kernel() as kernel:
            kernel.check(TRAIN + "\nimport notebook_accelerate\nrun = notebook_accelerate.attach('far')")
            check(kernel)
            assert kernel.value("run.status") == "running"
            kernel.check("run.stop()", 60)


@pytest.mark.parametrize("hidden", [False, True])
def test_ranks_of_another_host_can_be_profiled(hidden: bool) -> None:
    port = free_port()
    with Kernel() as kernel:
        kernel.check(TRAIN + (HIDE if hidden else ""))
        options = {"num_processes": 1, "num_nodes": 2, "master_addr": "127.0.0.1", "use_port": port, "block": False}
        call = ", ".join(f"{name}={value!r}" for name, value in options.items())
        cell = kernel.submit(f"run = notebook_launcher(train, {call}, rdzv_conf={{'secret': {SECRET!r}}})")
        env = {**os.environ, "NOTEBOOK_ACCELERATE_SECRET": SECRET}
        command = JoinCommand(*JOIN, f"127.0.0.1:{port}", "--num_processes", "1", env=env)
        try:
            kernel.finish(cell, LIMIT).expect_ok()
            check(kernel)
            names = kernel.value("[path.name for path in profile.paths.values()]")
            assert all(name.endswith(".gz") == hidden for name in names)
            kernel.check("run.stop()", 60)
            command.exit_code()
        finally:
            command.close()
