"""bf16, fp8, and compiled models with inductor and its CUDA graphs, compared with full precision."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch

from notebook_accelerate import Accelerator
from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.utils import AORecipeKwargs, TorchDynamoPlugin, check_cuda_fp8_capability
from tests.support import gpu

pytestmark = pytest.mark.gpu
WIDTH, ROWS = gpu.size(1024, 32), gpu.size(2048, 16)
BACKENDS: list[dict[str, Any]] = [{"backend": "inductor"}, {"backend": "inductor", "mode": "reduce-overhead"}]


def _losses(steps: int = 12, **options: Any) -> list[float]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=gpu.DRY, **options)
    torch.manual_seed(0)
    raw = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=1e-3))
    batch = gpu.batch(1, ROWS, WIDTH).to(accelerator.device)
    found = []
    for _ in range(steps):
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@functools.cache
def _plain() -> float:
    return _losses()[-1]


def test_bf16_is_near_full_precision() -> None:
    assert _losses(mixed_precision="bf16")[-1] == pytest.approx(_plain(), rel=0.05)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_fp8_is_near_full_precision() -> None:
    assert gpu.DRY or check_cuda_fp8_capability()
    losses = _losses(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    assert losses[-1] == pytest.approx(_plain(), rel=0.1)


@pytest.mark.leaks_ok("inductor keeps its compiling processes for the next model")
@pytest.mark.parametrize("options", [{"backend": "eager"}] if gpu.DRY else BACKENDS, ids=str)
def test_a_compiled_model_is_near_full_precision(options: dict[str, Any]) -> None:
    assert _losses(dynamo_plugin=TorchDynamoPlugin(**options))[-1] == pytest.approx(_plain(), rel=0.02)
