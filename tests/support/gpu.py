"""The devices for the tests in `tests/gpu`: CUDA devices or, in a dry run, the CPU in their place.

``TEST_GPU=dry`` runs all training of these tests on the CPU, with smaller models. A dry run shows that the tests work;
its measurements mean nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

DRY = os.environ.get("TEST_GPU") == "dry"
DEVICE = "cpu" if DRY else "cuda"
COUNT = 2 if DRY else torch.cuda.device_count()
"""The number of this machine's devices. NVML counts them, so that this process gets no CUDA context."""
WORLDS = range(1, COUNT + 1)
"""The world sizes in which each rank has its own device."""

only_cuda = pytest.mark.skipif(DRY, reason="the CPU does not support this; not part of a dry run")
two_devices = pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")
four_devices = pytest.mark.skipif(COUNT < 4 and not DRY, reason="needs four CUDA devices")


def rank_environment(*, share: bool = False) -> dict[str, str]:
    """Return the variables that put the ranks of `run_ranks` on this machine's devices.

    Args:
        share: Whether all ranks are on the first device. NCCL refuses that, so the backend is gloo.
    """
    if DRY:
        return {"ACCELERATE_USE_CPU": "true"}
    return {"ACCELERATE_USE_CPU": "false", **({"ACCELERATE_TORCH_DEVICE": "cuda:0"} if share else {})}


def size(cuda: int, cpu: int) -> int:
    """Return the size of a model or batch: the given one for a GPU, or a small one for a dry run."""
    return cpu if DRY else cuda


def synchronize() -> None:
    """Wait until the device has finished its work."""
    if not DRY:
        torch.cuda.synchronize()


def block(width: int) -> nn.Sequential:
    """Return a block of three layers with this width."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def network(width: int = 32, depth: int = 3, outputs: int = 8) -> nn.Sequential:
    """Return a model of equal blocks, with the same weights in each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(block(width) for _ in range(depth)), nn.Linear(width, outputs))


def batch(step: int, rows: int = 16, width: int = 32) -> torch.Tensor:
    """Return the inputs of a step, on the CPU."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def plain_losses(steps: int, rate: float = 0.002, clip: float | None = None) -> list[float]:
    """Return the losses of `network` in plain torch in full precision on one device."""
    model = network().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        loss = model(batch(step).to(DEVICE)).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses(accelerator: Any, steps: int, rate: float = 0.002, clip: float | None = None) -> list[float]:
    """Return the prepared `network`'s losses, averaged over the ranks. Each rank trains on its share of each batch."""
    raw = network()
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=rate))
    found = []
    for step in range(steps):
        share = batch(step).chunk(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)
        loss = model(share).square().mean()
        accelerator.backward(loss)
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    return found


Figure = Callable[[str, str], None]
"""The type of the fixture `figure` in tests/gpu, which takes a name, and a measured value with its unit."""
