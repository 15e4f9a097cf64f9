"""fp8 layers in DeepSpeed's engine, whose other layers compute in bf16."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator, DeepSpeedPlugin
from notebook_accelerate.utils import AORecipeKwargs
from tests.parity.strategies.cells import patient
from tests.support.ranks import RankError, run_ranks
from tests.support.trainings import fp8_net, losses_on_one_batch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make test-deepspeed"
)
SECONDS = 400.0


def losses(stage: int | None, precision: str) -> list[float]:
    plugin = None if stage is None else DeepSpeedPlugin({"zero_optimization": {"stage": stage}})
    handlers = [AORecipeKwargs()] if precision == "fp8" else None
    accelerator = Accelerator(mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=handlers)
    return losses_on_one_batch(accelerator, 0.5)


@patient
@pytest.mark.parametrize("stage", [2, 3])
def test_layers_compute_in_fp8(stage: int) -> None:
    (expected,) = run_ranks(losses, None, "fp8", world_size=1, timeout=SECONDS)
    assert expected[-1] < expected[0] - 0.1
    first, second = run_ranks(losses, stage, "fp8", timeout=SECONDS)
    # The tolerance is large because the engine's weights are bfloat16.
    assert first == second == pytest.approx(expected, rel=1e-2)


def with_msamp() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2, enable_msamp=True, msamp_opt_level="O2")
    accelerator = Accelerator(mixed_precision="fp8", deepspeed_plugin=plugin, kwargs_handlers=[AORecipeKwargs()])
    model = fp8_net()
    loader = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=32)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)


@pytest.mark.skipif(importlib.util.find_spec("msamp") is not None, reason="MS-AMP is installed")
def test_missing_msamp_raises() -> None:
    with pytest.raises(RankError, match=r"enable_msamp=True\) needs MS-AMP, which is not installed"):
        run_ranks(with_msamp, world_size=1, timeout=SECONDS)
