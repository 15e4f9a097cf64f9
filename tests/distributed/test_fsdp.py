"""Sharded models on two ranks: error messages, and unusual uses that work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.utils.fsdp_utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from tests.support.ranks import RankError, run_ranks


def accelerator_of(version: int = 2, precision: str = "no", **settings: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=version == 1 or None, **settings)
    return Accelerator(fsdp_plugin=plugin, mixed_precision=precision)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> float:
    loss = model(torch.ones(2, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save_on_the_main_rank(folder: str, version: int) -> None:
    accelerator = accelerator_of(version)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer)
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    train(accelerator, model, optimizer)


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_saving_on_the_main_rank_alone_is_an_error_and_does_not_hang(version: int, tmp_path: Any) -> None:
    with pytest.raises(
        RankError,
        match=r"Rank 0 is in save_state, and the other ranks cannot reach it: rank 1 is waiting in "
        r"another collective, at .*test_fsdp\.py.*take it out of `if accelerator.is_main_process:`",
    ) as caught:
        run_ranks(save_on_the_main_rank, str(tmp_path / "checkpoint"), version)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert not (tmp_path / "checkpoint").exists()


def save_after_a_long_way(folder: str) -> list[str]:
    accelerator = accelerator_of()
    model, _ = accelerator.prepare(net(), None)
    if not accelerator.is_main_process:
        time.sleep(3)  # Rank 0 reaches save_state while the other rank is still on its way.
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    return sorted(accelerator.get_state_dict(model))


def test_late_ranks_are_waited_for(tmp_path: Any) -> None:
    names, others = run_ranks(save_after_a_long_way, str(tmp_path / "checkpoint"))
    assert names == sorted(net().state_dict())
    assert others == []


def optimizer_of_another_model() -> None:
    accelerator = accelerator_of()
    accelerator.prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(RankError, match="SGD has no parameter of a prepared model: it was created before"):
        run_ranks(optimizer_of_another_model)


def prepared_one_by_one(version: int) -> list[bool]:
    accelerator = accelerator_of(version)
    found = []
    for optimizer_first in (True, False):
        torch.manual_seed(0)
        raw = net()
        optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
        if optimizer_first:
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(raw)
        else:
            model = accelerator.prepare(raw)
            optimizer = accelerator.prepare(optimizer)
        losses = [train(accelerator, model, optimizer) for _ in range(3)]
        found.append(losses[2] < losses[0])
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_optimizers_may_be_prepared_before_or_after_their_model(version: int) -> None:
    assert run_ranks(prepared_one_by_one, version) == [[True, True]] * 2


def took_steps_before() -> bool:
    raw = net()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.1)
    raw(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    accelerator = accelerator_of()
    model, optimizer = accelerator.prepare(raw, optimizer)
    train(accelerator, model, optimizer)
    return all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())


def test_existing_optimizer_states_are_sharded() -> None:
    assert run_ranks(took_steps_before) == [True, True]


def one_flat_parameter_per_unit(groups: int) -> list[float]:
    plugin = FullyShardedDataParallelPlugin(use_orig_params=False, sync_module_states=True)
    accelerator = Accelerator(fsdp_plugin=plugin)
    raw = net()
    parameters = list(raw.parameters())
    split = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01}][:groups] if groups > 1 else parameters
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(split, lr=0.1))
    return [train(accelerator, model, optimizer) for _ in range(3)]


def test_flat_parameters_train_and_cannot_span_groups() -> None:
    first, second = run_ranks(one_flat_parameter_per_unit, 1)
    assert first == second
    assert first[2] < first[0]
    with pytest.raises(RankError, match=r"share one flat parameter of FSDP 1; write .*use_orig_params=True"):
        run_ranks(one_flat_parameter_per_unit, 2)


def scaled(version: int) -> tuple[list[float], float, float]:
    accelerator = accelerator_of(version, "fp16", sync_module_states=True)
    raw = net()
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        # Keep the loss small: multiplied by 2**16, it must fit into fp16 on every CPU.
        loss = model(torch.ones(2, 4)).square().mean() / 16
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norm.item(), accelerator.scaler.get_scale()


@pytest.mark.parametrize("version", [1, 2])
def test_fp16_gradients_are_unscaled(version: int) -> None:
    (losses, norm, scale), other = run_ranks(scaled, version)
    assert (losses, norm, scale) == other
    assert losses[2] < losses[0]
    assert 0 < norm < 100  # The norm of the scaled gradients would be about 65536 times larger.
    assert scale == 65536.0


def infinite_on_one_rank() -> tuple[bool, float]:
    accelerator = accelerator_of(2, "fp16")
    raw = net()
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    loss = model(torch.ones(2, 4)).square().mean()
    accelerator.backward(loss)
    if accelerator.is_main_process:
        next(model.parameters()).grad.to_local().fill_(float("inf"))
    optimizer.step()
    return accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    assert run_ranks(infinite_on_one_rank) == [(True, 32768.0)] * 2


def left_alone() -> tuple[list[str], float]:
    accelerator = accelerator_of(2, ignored_modules="2")
    raw = net()
    model, _ = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    loss = model(torch.ones(2, 4)).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)], norm.item()


def test_ignored_modules_stay_whole_and_count_in_the_norm() -> None:
    (names, norm), (_, other) = run_ranks(left_alone)
    assert names == ["2.weight", "2.bias"]
    assert norm == other > 0


def a_model_to_clip(version: int) -> None:
    accelerator = accelerator_of(version)
    raw = net()
    model, _ = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        with pytest.raises(ValueError, match=r"clipping takes parameters, not a .*model\.parameters\(\)"):
            clip(model, 1.0)


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_in_place_of_its_parameters_is_refused_with_an_explanation(version: int) -> None:
    run_ranks(a_model_to_clip, version)


def exchanged_while_accumulating(version: int) -> dict[str, list[int]]:
    """Count the collectives in each of four batches, with two batches per step."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=version == 1 or None)
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: dict[str, list[int]] = {"reduce_scatter": [], "all_reduce": [], "gather": []}
    for _ in range(4):
        with accelerator.accumulate(model):
            loss = model(torch.ones(2, 4)).square().mean()
            with CommDebugMode() as counted:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        names = {str(operation): count for operation, count in counted.get_comm_counts().items()}
        for kind, counts in found.items():
            wanted = "gather" if kind == "gather" else kind.replace("all_reduce", "allreduce")
            counts.append(sum(count for name, count in names.items() if wanted in name))
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_accumulated_batches_exchange_no_gradients(version: int) -> None:
    first, second = run_ranks(exchanged_while_accumulating, version)
    assert first == second
    scattered = first["reduce_scatter"]
    assert scattered[0] == scattered[2] == 0
    assert scattered[1] == scattered[3] > 0
    assert first["all_reduce"] == [0, 0, 0, 0]


def told_to_torch(settings: dict[str, Any]) -> dict[str, Any]:
    accelerator = accelerator_of(1, **settings)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [train(accelerator, model, optimizer) for _ in range(3)]
    return {
        "backward": getattr(model.backward_prefetch, "name", None),
        "forward": model.forward_prefetch,
        "limit": model.limit_all_gathers,
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "losses": losses,
    }


def test_settings_of_fsdp_1_reach_torch_and_do_not_change_the_loss() -> None:
    usual, _ = run_ranks(told_to_torch, {})
    assert (usual["backward"], usual["forward"], usual["limit"]) == (None, False, True)
    settings = {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False}
    other, _ = run_ranks(told_to_torch, {**settings, "cpu_offload": True})
    assert (other["backward"], other["forward"], other["limit"]) == ("BACKWARD_POST", True, False)
    assert other["devices"] == ["cpu"]
    assert other["losses"] == usual["losses"]


def alone() -> tuple[str, str]:
    accelerator = accelerator_of()
    return accelerator.strategy.name, accelerator.strategy.checkpoint_layout


def test_one_process_does_not_shard() -> None:
    with pytest.warns(UserWarning, match="fsdp_plugin has no effect with a single process"):
        assert alone() == ("single", "whole")


def saved_by_each_rank(folder: str) -> tuple[list[str], bool, list[float]]:
    accelerator = accelerator_of(state_dict_type="SHARDED_STATE_DICT")
    plugin = accelerator.state.fsdp_plugin
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer)
    save_fsdp_model(plugin, accelerator, model, folder, use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=False)
    expected = [train(accelerator, model, optimizer) for _ in range(2)]
    load_fsdp_model(plugin, accelerator, model, folder, use_dcp=False)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=False)
    found = [train(accelerator, model, optimizer) for _ in range(2)]
    return sorted(path.name for path in Path(folder).iterdir()), found == expected, found


def test_each_rank_writes_its_shards_without_distributed_checkpoints(tmp_path: Path) -> None:
    for names, equal, losses in run_ranks(saved_by_each_rank, str(tmp_path / "out")):
        assert names == [
            "optimizer_0_rank0.bin",
            "optimizer_0_rank1.bin",
            "pytorch_model_fsdp_0_rank0.bin",
            "pytorch_model_fsdp_0_rank1.bin",
        ]
        assert equal, losses
