"""fp8 on two ranks: whole models, and shards that are gathered in fp8."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin
from notebook_accelerate.precision.ao import has_ao_layers
from notebook_accelerate.utils import AORecipeKwargs
from tests.support.ranks import run_ranks

pytest.importorskip("torchao")


def losses_of(accelerator: Accelerator) -> list[float]:
    """Train on the same batch everywhere, so that any number of ranks has the losses of one."""
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    inputs, labels = torch.randn(32, 16), torch.randint(0, 4, (32,))
    model, optimizer = accelerator.prepare(raw, optimizer)
    assert has_ao_layers(model)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone_or_ddp() -> list[float]:
    return losses_of(Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()]))


def sharded(gathers_fp8: bool) -> list[float]:
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=gathers_fp8)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, reshard_after_forward=True
    )
    return losses_of(Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], fsdp_plugin=plugin))


@pytest.fixture(scope="module")
def expected() -> list[float]:
    (losses,) = run_ranks(alone_or_ddp, world_size=1)
    assert losses[-1] < losses[0]
    return losses  # type: ignore[no-any-return]


def test_whole_models(expected: list[float]) -> None:
    first, second = run_ranks(alone_or_ddp)
    assert first == second == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gathers_fp8", [False, True])
def test_shards(expected: list[float], gathers_fp8: bool) -> None:
    first, second = run_ranks(sharded, gathers_fp8)
    assert first == second == pytest.approx(expected, rel=5e-3)  # FSDP's weights and reductions are bfloat16
