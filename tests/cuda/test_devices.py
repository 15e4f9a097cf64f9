"""Runs on some of the GPUs of a machine, which stub libraries emulate. The ranks are real processes."""

from __future__ import annotations

import ast

import pytest

from tests.cuda.conftest import Machine

LAUNCH = """
import os, time
import torch
from notebook_accelerate import DeviceBusyError, notebook_launcher

NAMES = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_CPU_AFFINITY")
def train(seconds=0.0):
    time.sleep(seconds)
    return [os.environ.get(name) for name in NAMES]
def launch(*arguments, **options):
    return notebook_launcher(train, arguments, panel=False, use_port=0, **options)
"""
FOUR = {"FAKE_NVML_COUNT": "4", "FAKE_CUDA_COUNT": "4"}


@pytest.mark.parametrize(
    ("devices", "kernel", "seen"),
    [
        ("[1]", "", ["1"]),
        ("[3, 1]", "", ["3,1"] * 2),
        ("[0]", "2,3", ["2"]),
        ("['GPU-2', 'GPU-0']", "", ["GPU-2,GPU-0"] * 2),
        ("['MIG-slice']", "", ["MIG-slice"]),
        ("2", "", ["0,1"] * 2),
    ],
)
def test_each_rank_sees_the_devices_of_its_run(machine: Machine, devices: str, kernel: str, seen: list[str]) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": kernel} if kernel else {}
    said = machine.run(LAUNCH + f"print(list(launch(devices={devices}).results))", **FOUR, **visible)
    ranks = len(seen)
    expected = [[entries, str(rank), str(ranks), "1"] for rank, entries in enumerate(seen)]
    assert ast.literal_eval(said.splitlines()[-1]) == expected
    assert machine.initialised() == []


def test_launches_of_two_kernels_are_refused_only_where_devices_overlap(machine: Machine) -> None:
    """The first kernel names its devices by number, and the second one by UUID."""
    code = """
import subprocess, sys
OTHER = '''
first = launch(600.0, devices=[0, 2], block=False, name="theirs")
print(first.plan.sentence(), flush=True)
input()
'''
if __name__ == "__main__":
    program = open(__file__).read().split("import subprocess")[0] + OTHER
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as other:
        print(other.stdout.readline().strip())
        print(other.pid)
        print(launch(devices=["GPU-1", "GPU-3"]).results)
        for options in ({"devices": ["GPU-2"]}, {"num_processes": 4}, {"devices": 3}):
            try:
                launch(**options)
            except DeviceBusyError as error:
                print(error)
        waits = launch(devices=[2], block=False, queue=True)
        print(waits.status)
        other.kill()
    waits.wait(60)
    print(waits.results)
"""
    lines = machine.run(LAUNCH + code, **FOUR).splitlines()
    pid = lines.pop(1)
    assert lines[0].startswith("2 processes on cuda [0, 2]")
    assert ast.literal_eval(lines[1]) == tuple([["GPU-1,GPU-3", str(rank), "2", "1"] for rank in range(2)])
    ends = f"end it with notebook_accelerate.attach('theirs@{pid}').stop(), or pass queue=True to start after it"
    held = ["cuda:GPU-2abc", "cuda:GPU-0abc, cuda:GPU-2abc", "cuda:GPU-0abc, cuda:GPU-2abc"]
    assert lines[2:5] == [f"the run theirs of process {pid} holds {each}; wait for it, {ends}" for each in held]
    assert lines[5] == "queued"
    assert ast.literal_eval(lines[6]) == (["2", "0", "1", "1"],)
