"""Weights in CPU memory and on disk: bitwise equal results, their speed, and use after an out-of-memory error."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate import cpu_offload, disk_offload, dispatch_model
from tests.support import gpu
from tests.support.gpu import Figure

pytestmark = pytest.mark.gpu
WIDTH, DEPTH, ROWS = gpu.size(4096, 64), gpu.size(12, 6), gpu.size(4096, 8)
DTYPE = torch.float32 if gpu.DRY else torch.float16
DEVICE: Any = torch.device("cpu") if gpu.DRY else torch.device("cuda", 0)


def _network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=DTYPE) for _ in range(DEPTH))).eval()


def _seconds(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    gpu.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    gpu.synchronize()
    return (time.perf_counter() - begin) / repeats


def _offload(model: torch.nn.Module, where: str, folder: Path) -> None:
    if where == "main memory":
        cpu_offload(model, DEVICE)
    elif where == "disk":
        disk_offload(model, folder, DEVICE)
    else:
        main = "cpu" if gpu.DRY else 0
        places = {str(layer): ("cpu", "disk", main)[layer % 3] for layer in range(DEPTH)}
        dispatch_model(model, places, main_device=main, offload_dir=folder)


@pytest.mark.parametrize("where", ["main memory", "disk", "a device map"])
@torch.no_grad()
def test_results_are_bitwise_equal(where: str, tmp_path: Path, figure: Figure) -> None:
    batch = (gpu.batch(0, ROWS, WIDTH) / 64).to(DEVICE, DTYPE)
    plain = _network().to(DEVICE)
    expected = plain(batch)
    weights = [each.cpu() if gpu.DRY else each.cpu().pin_memory() for each in plain.parameters()]
    compute = _seconds(lambda: plain(batch))
    copies = _seconds(lambda: [each.to(DEVICE, non_blocking=True) for each in weights])
    model = _network()
    _offload(model, where, tmp_path)
    for _ in range(gpu.size(20, 4)):
        assert torch.equal(model(batch).to(DEVICE), expected)
    took = 1000 * _seconds(lambda: model(batch))
    bounds = f"computing {1000 * compute:.1f} ms, copying {1000 * copies:.1f} ms"
    figure(f"forward with weights in {where}", f"{took:.1f} ms ({bounds})")


@torch.no_grad()
def test_offloading_works_after_an_out_of_memory_error_in_the_last_layer(tmp_path: Path) -> None:
    batch = (gpu.batch(0, ROWS, WIDTH) / 64).to(DEVICE, DTYPE)
    model = _network()
    disk_offload(model, tmp_path, DEVICE)
    expected = [model(batch) for _ in range(3)][-1]

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    hook = model[DEPTH - 1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(batch)
    hook.remove()
    for _ in range(2):
        assert torch.equal(model(batch), expected)
