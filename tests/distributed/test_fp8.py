"""fp8 on two ranks, with whole models and with shards that are gathered in fp8."""

from __future__ import annotations

import pytest

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin
from notebook_accelerate.utils import AORecipeKwargs
from tests.support.ranks import run_ranks
from tests.support.trainings import losses_on_one_batch

pytest.importorskip("torchao")


def alone_or_ddp() -> list[float]:
    return losses_on_one_batch(Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()]), 0.1)


def sharded(gathers_fp8: bool) -> list[float]:
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=gathers_fp8)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, reshard_after_forward=True
    )
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], fsdp_plugin=plugin)
    return losses_on_one_batch(accelerator, 0.1)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    (losses,) = run_ranks(alone_or_ddp, world_size=1)
    assert losses[-1] < losses[0]
    return losses  # type: ignore[no-any-return]


def test_whole_models_on_two_ranks_equal_a_single_process(expected: list[float]) -> None:
    first, second = run_ranks(alone_or_ddp)
    assert first == second == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gathers_fp8", [False, True])
def test_sharded_models_equal_a_single_process(expected: list[float], gathers_fp8: bool) -> None:
    first, second = run_ranks(sharded, gathers_fp8)
    assert first == second == pytest.approx(expected, rel=5e-3)  # FSDP keeps weights and reduces gradients in bfloat16.
