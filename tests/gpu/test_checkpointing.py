"""Saving in the background from a CUDA device: copies go through page-locked memory during training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from notebook_accelerate import Accelerator
from tests.support import gpu
from tests.support.fresh import fresh_state

__all__ = ["fresh_state"]
pytestmark = pytest.mark.gpu
WIDTH = gpu.size(1024, 32)


def test_training_on_the_device_does_not_change_the_checkpoint(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=gpu.DRY)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(model(torch.randn(64, WIDTH, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    for index in range(3):
        expected = [tensor.clone() for tensor in (*model.parameters(), *_moments(optimizer))]
        accelerator.save_state(str(tmp_path / "out"), blocking=index == 2)
        randoms = torch.rand(3, device=accelerator.device)
        for _ in range(5):
            step()
        accelerator.load_state(str(tmp_path / "out"))
        found = [*model.parameters(), *_moments(optimizer)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(torch.rand(3, device=accelerator.device), randoms)
        assert {tensor.device.type for tensor in found} == {gpu.DEVICE}
    accelerator.end_training()


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
