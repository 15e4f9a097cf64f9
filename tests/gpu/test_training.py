"""With each strategy, training on GPUs gives the same losses as plain torch on one device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate import (
    Accelerator,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from notebook_accelerate.utils import AORecipeKwargs
from tests.support import gpu
from tests.support.ranks import run_ranks
from tests.support.trainings import losses_on_one_batch

pytestmark = pytest.mark.gpu
STEPS, CLIP = 4, 0.05
FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def replicated(shared: bool, precision: str = "no", **options: Any) -> tuple[str, list[float]]:
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")] if shared else []
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers, **options)
    return accelerator.device.type, gpu.losses(accelerator, STEPS)


@pytest.mark.parametrize("world", gpu.WORLDS)
def test_replicas_have_the_losses_of_one_device(world: int) -> None:
    expected = gpu.plain_losses(STEPS)
    for device, losses in run_ranks(replicated, False, world_size=world, env=gpu.rank_environment()):
        assert device == gpu.DEVICE
        assert losses == pytest.approx(expected, rel=1e-3)


def test_two_ranks_share_one_device() -> None:
    expected = gpu.plain_losses(STEPS)
    for device, losses in run_ranks(replicated, True, env=gpu.rank_environment(share=True)):
        assert device == gpu.DEVICE
        assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=gpu.only_cuda)])
def test_half_precision_is_near_full_precision(precision: str) -> None:
    ((_, losses),) = run_ranks(replicated, False, precision, world_size=1, env=gpu.rank_environment())
    assert losses == pytest.approx(gpu.plain_losses(STEPS), rel=0.05)
    assert losses != gpu.plain_losses(STEPS), "nothing was computed in half precision"


def overflowing(scale: float) -> tuple[list[float], list[bool], bool]:
    """Train with one step whose gradients overflow. Return scales, skipped steps, and whether weights are finite."""
    accelerator = Accelerator(mixed_precision="fp16")
    raw = gpu.network()
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=0.002))
    scales, skipped = [], []
    for step in range(3):
        inputs = gpu.batch(step).to(accelerator.device) * (scale if step == 1 else 1)
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        scales.append(accelerator.scaler.get_scale() if accelerator.scaler else 0.0)
    return scales, skipped, all(bool(parameter.isfinite().all()) for parameter in raw.parameters())


@gpu.only_cuda
def test_a_step_that_overflows_in_fp16_is_skipped() -> None:
    ((scales, skipped, finite),) = run_ranks(overflowing, 1e6, world_size=1, env=gpu.rank_environment())
    assert finite
    assert skipped == [False, True, False]
    assert scales[1] == scales[2] == scales[0] / 2


def compiled() -> list[float]:
    accelerator = Accelerator(dynamo_backend="inductor" if not gpu.DRY else "eager")
    return gpu.losses(accelerator, STEPS)


@pytest.mark.parametrize("world", gpu.WORLDS)
def test_compiled_models_have_the_losses_of_one_device(world: int) -> None:
    for losses in run_ranks(compiled, world_size=world, env=gpu.rank_environment(), timeout=480):
        assert losses == pytest.approx(gpu.plain_losses(STEPS), rel=1e-2)


def fsdp(version: int, **options: Any) -> FullyShardedDataParallelPlugin:
    """Return a plugin that shards the blocks of `gpu.network`."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        use_orig_params=version == 1 or None,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1000,
        **options,
    )


def sharded(version: int, offload: bool, precision: str) -> tuple[str, set[str], list[float]]:
    accelerator = Accelerator(fsdp_plugin=fsdp(version, cpu_offload=offload), mixed_precision=precision)
    losses = gpu.losses(accelerator, STEPS, clip=CLIP)
    (model,) = accelerator._models
    return str(accelerator.state.backend), {parameter.device.type for parameter in model.parameters()}, losses


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offloaded"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("world", gpu.WORLDS)
def test_sharded_and_clipped_models_have_the_losses_of_one_device(
    world: int, version: int, offload: bool, precision: str
) -> None:
    expected = gpu.plain_losses(STEPS, clip=CLIP)
    for backend, places, losses in run_ranks(
        sharded, version, offload, precision, world_size=world, env=gpu.rank_environment()
    ):
        if version == 2 and offload and world > 1 and not gpu.DRY:
            assert backend == "cuda:nccl,cpu:gloo", "gloo reduces the gradient norm in CPU memory (pytorch#148532)"
        # In a world of one process, the plugin has no effect, so nothing is sharded or offloaded.
        assert places == {"cpu" if offload and world > 1 else gpu.DEVICE}
        assert losses == pytest.approx(expected, rel=1e-3 if precision == "no" else 0.05)


def resumed(version: int, kind: str, folder: str) -> tuple[list[float], list[float]]:
    accelerator = Accelerator(fsdp_plugin=fsdp(version, state_dict_type=kind))
    raw = gpu.network()
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=0.002))

    def train(first: int) -> list[float]:
        losses = []
        for step in range(first, first + STEPS):
            loss = model(gpu.batch(step).to(accelerator.device)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    train(0)
    accelerator.save_state(folder, blocking=False)
    after = train(STEPS)
    accelerator.load_state(folder)
    return after, train(STEPS)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("world", gpu.WORLDS)
def test_sharded_states_continue_from_the_checkpoint(world: int, version: int, kind: str, tmp_path: Path) -> None:
    for after, again in run_ranks(
        resumed, version, kind, str(tmp_path / "state"), world_size=world, env=gpu.rank_environment()
    ):
        assert again == pytest.approx(after, rel=1e-5)


def zero(stage: int, offload: str) -> list[float]:
    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_clipping=CLIP, offload_optimizer_device=offload, offload_param_device="none"
    )
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    settings: Any = accelerator.state.deepspeed_plugin
    settings.deepspeed_config["train_micro_batch_size_per_gpu"] = 16
    return gpu.losses(accelerator, STEPS)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", gpu.WORLDS)
def test_zero_has_the_losses_of_one_device(world: int, stage: int, offload: str) -> None:
    expected = gpu.plain_losses(STEPS, clip=CLIP)
    for losses in run_ranks(zero, stage, offload, world_size=world, env=gpu.rank_environment(), timeout=480):
        assert losses == pytest.approx(expected, rel=0.1)


def in_fp8() -> list[float]:
    return losses_on_one_batch(Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()]), 0.1)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.skipif(not (FP8 or gpu.DRY), reason="this GPU has no fp8: its compute capability is below 8.9")
def test_fp8_is_near_full_precision() -> None:
    (losses,) = run_ranks(in_fp8, world_size=1, env=gpu.rank_environment(), timeout=480)
    assert losses[-1] < losses[0]
