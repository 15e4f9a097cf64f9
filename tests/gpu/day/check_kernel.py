"""A real kernel: memory that a rank holds and returns, a busy device, CUDA arguments, and memory after a failure."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support import gpu
from tests.support.kernel import Kernel

pytestmark = pytest.mark.gpu
SETUP = """
import gc, sys, time, torch
from tests.support.gpu import DEVICE, DRY
from notebook_accelerate import Accelerator, notebook_launcher

def hold(gigabytes, seconds):
    Accelerator(cpu=DRY)
    block = torch.ones(1 << 20 if DRY else int(gigabytes * (1 << 30)), dtype=torch.uint8, device=DEVICE)
    time.sleep(seconds)
    return block.numel()

def add(start):
    accelerator = Accelerator(cpu=DRY)
    return str(start.device), float((start + torch.ones(4, device=accelerator.device)).sum())

def fail():
    accelerator = Accelerator(cpu=DRY)
    model = accelerator.prepare(torch.nn.Linear(8, 8))
    block = torch.ones(1 << 20 if DRY else 8 << 30, dtype=torch.uint8, device=DEVICE)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200.00 GiB.")

def held():
    gc.collect()
    return 0 if DRY else torch.cuda.memory_allocated() >> 20
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(env=gpu.rank_environment()) as running:
        running.run(SETUP, timeout=90).expect_ok()
        yield running


def used() -> int:
    """Return the number of MiB that all processes use on the first GPU."""
    if gpu.DRY:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0])


def test_the_memory_of_a_rank_is_returned(kernel: Kernel) -> None:
    before = used()
    kernel.run("run = notebook_launcher(hold, (4, 3), num_processes=1, block=False, timeout=60)").expect_ok()
    deadline = time.monotonic() + 30
    while not gpu.DRY and used() < before + 4000:
        assert time.monotonic() < deadline, "the rank never held its memory"
        time.sleep(0.2)
    kernel.run("run.wait()", timeout=60).expect_ok()
    while used() > before + 64:
        assert time.monotonic() < deadline + 15, "the memory was not returned"
        time.sleep(0.2)
    assert kernel.run("torch.cuda.is_initialized()").result_text == "False"


@gpu.only_cuda
def test_a_second_launch_on_a_busy_device_is_refused(kernel: Kernel) -> None:
    kernel.run("run = notebook_launcher(hold, (1, 30), num_processes=1, block=False, timeout=60)").expect_ok()
    cell = kernel.run("notebook_launcher(hold, (1, 0), num_processes=1, timeout=60)", timeout=60)
    assert cell.error is not None
    assert cell.error.ename == "DeviceBusyError"
    kernel.run("run.stop(grace=1.0); run.wait()", timeout=60).expect_ok()


def test_a_failed_run_in_the_kernel_frees_its_memory(kernel: Kernel) -> None:
    before = kernel.value("held()")
    assert kernel.run("notebook_launcher(fail, num_processes=1)", timeout=60).error is not None
    kernel.run("notebook_launcher(held, num_processes=1)", timeout=60).expect_ok()
    assert kernel.value("held()") - before < 500


def test_a_tensor_on_the_kernels_device_can_be_an_argument(kernel: Kernel) -> None:
    """This test must be the last one, because the kernel uses CUDA from here on."""
    code = (
        "start = torch.arange(4.0, device=DEVICE)\nrun = notebook_launcher(add, (start,), num_processes=1, timeout=90)"
    )
    cell = kernel.run(code, timeout=120).expect_ok()
    assert gpu.DRY or "zygote" in cell.stdout
    assert kernel.value("run.results[0]") == ["cpu" if gpu.DRY else "cuda:0", 10.0]
