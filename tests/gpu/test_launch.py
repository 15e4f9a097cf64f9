"""Launching from real kernels on a machine with NVIDIA GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support import gpu
from tests.support.kernel import Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.notebook]

SETUP = """
import ctypes, os, torch
from tests.support.gpu import COUNT, DEVICE, DRY
from notebook_accelerate import Accelerator, notebook_launcher

def train(steps):
    accelerator = Accelerator(cpu=DRY)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        loss = model(torch.randn(32, 64, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return str(accelerator.device), loss.item()
"""


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(env=gpu.rank_environment()) as running:
        running.run(SETUP, timeout=60).expect_ok()
        yield running


@gpu.only_cuda
def test_cuda_used_in_the_kernel_before_the_launch_makes_ranks_start_from_the_zygote(kernel: Kernel) -> None:
    kernel.run("x = torch.ones(8, device='cuda'); (x * 2).sum().item()", timeout=60).expect_ok()
    cell = kernel.run("run = notebook_launcher(train, (5,), num_processes=1, timeout=120)", timeout=150).expect_ok()
    assert "zygote" in cell.stdout
    assert "CUDA is initialised in the kernel" in cell.stdout
    assert kernel.run("run.results[0][0]").result_text == "'cuda:0'"


@gpu.only_cuda
def test_a_driver_initialised_without_torch_is_detected(kernel: Kernel) -> None:
    """torch.cuda.is_initialized() returns False even though the driver is initialized (accelerate#3925)."""
    kernel.run("assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0 and not torch.cuda.is_initialized()").expect_ok()
    cell = kernel.run("run = notebook_launcher(train, (5,), num_processes=1, timeout=120)", timeout=150).expect_ok()
    assert "CUDA is initialised in the kernel" in cell.stdout
    assert kernel.run("run.results[0][0]").result_text == "'cuda:0'"


def test_a_clean_kernel_forks_and_stays_clean(kernel: Kernel) -> None:
    cell = kernel.run("run = notebook_launcher(train, (5,), num_processes=1, timeout=120)", timeout=150).expect_ok()
    assert "fork" in cell.stdout
    assert kernel.run("torch.cuda.is_initialized()").result_text == "False"


def test_nccl_connects_all_available_gpus(kernel: Kernel) -> None:
    kernel.run("""
def world():
    import torch.distributed as dist
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not DRY:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if DRY else "nccl", rank=rank, world_size=size)
    value = torch.full((4,), float(rank + 1), device=DEVICE)
    dist.all_reduce(value)
    return value[0].item(), size, dist.get_backend()
""").expect_ok()
    cell = kernel.run(
        "run = notebook_launcher(world, num_processes=COUNT, timeout=180); run.results[0]", timeout=200
    ).expect_ok()
    assert cell.result_text is not None
    value, size, backend = eval(cell.result_text)
    assert (value, backend) == (size * (size + 1) / 2, "gloo" if gpu.DRY else "nccl")
    assert kernel.run(f"len(run.results) == COUNT == {size}").result_text == "True"


@gpu.only_cuda
def test_memory_is_freed_after_the_run(kernel: Kernel) -> None:
    kernel.run("""
import subprocess
def used():
    rows = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"],
                          capture_output=True, text=True, check=True).stdout
    return int(rows.split()[0])
def hold():
    block = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return used()
before = used()
""").expect_ok()
    kernel.run("during = notebook_launcher(hold, num_processes=1, timeout=120).results[0]", timeout=150).expect_ok()
    deadline = time.monotonic() + 10
    while (left := int(kernel.run("used()").result_text or 0)) > int(kernel.run("before").result_text or 0) + 64:
        assert time.monotonic() < deadline, f"{left} MiB are still in use"
        time.sleep(0.2)
    assert kernel.run("during - before > 1000").result_text == "True"


def test_tensors_arrive_without_starting_cuda_in_the_kernel(kernel: Kernel) -> None:
    code = (
        "run = notebook_launcher(lambda: torch.arange(3, device=DEVICE), num_processes=1, timeout=120); run.results[0]"
    )
    assert kernel.run(code, timeout=150).expect_ok().result_text == "tensor([0, 1, 2])"
    assert kernel.run("torch.cuda.is_initialized()").result_text == "False"


@gpu.only_cuda
def test_gpu_memory_is_sampled(kernel: Kernel) -> None:
    kernel.run(
        """
def busy():
    import time
    block = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    time.sleep(3)
run = notebook_launcher(busy, num_processes=1, timeout=120)
""",
        timeout=150,
    ).expect_ok()
    kernel.run("(device,) = run._internals.store.devices.of_rank(0)").expect_ok()
    assert kernel.run("device.device, device.peak >= 1 << 28, device.total > device.used > 1 << 28").result_text == (
        "('cuda:0', True, True)"
    )
    assert kernel.run("0 <= device.percent <= 100, len(device.uuid)").result_text == "(True, 36)"
