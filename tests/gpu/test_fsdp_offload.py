"""FSDP 2 with parameters and gradients in main memory: clipping reduces them by gloo (pytorch#148532)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices share a model"),
]


def clipped(cpu_offload: bool) -> tuple[str, float, list[float]]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=cpu_offload))
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return str(dist.get_backend()), norm.item(), losses


def test_offloaded_gradients_are_clipped_like_those_on_the_device() -> None:
    backend, norm, losses = run_ranks(clipped, True)[0]
    _, expected_norm, expected = run_ranks(clipped, False)[0]
    assert backend == "cuda:nccl,cpu:gloo"
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert losses == pytest.approx(expected, rel=1e-4)
