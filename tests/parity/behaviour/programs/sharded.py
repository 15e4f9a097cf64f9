"""FSDP 1 and 2 on two ranks. Accelerate shards models only on GPUs, so its results come from DDP."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, utils
from torch import nn

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import data, files, loader, raised

CALLS = [
    "_methods(FullyShardedDataParallelPlugin)",
    "utils.fsdp2_canonicalize_names({'a._checkpoint_wrapped_module.weight': 1, '_orig_mod.b': 2, 'c': 3})",
    "utils.get_fsdp2_grad_scaler.__name__",
    "type(utils.get_fsdp2_grad_scaler(device='cpu')).__name__",
    "raised(lambda: utils.merge_fsdp_weights('absent', 'out'))",
    "utils.ensure_weights_retied(lambda module: None, nn.Linear(2, 2), torch.device('cpu')).__class__.__name__",
    "[utils.fsdp2_load_full_state_dict.__name__, utils.fsdp2_switch_optimizer_parameters.__name__]",
]


class Blocks(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def _methods(kind: type) -> list[str]:
    return [name for name in ("set_state_dict_type", "set_cpu_offload", "set_auto_wrap_policy") if hasattr(kind, name)]


def _plugin(version: int, **settings: Any) -> FullyShardedDataParallelPlugin:
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Sequential"]}
    if version == 1:
        policy["use_orig_params"] = True
    return FullyShardedDataParallelPlugin(fsdp_version=version, **{**policy, **settings})


def _prepared(version: int, accumulation: int = 1, precision: str | None = None, **settings: Any) -> Any:
    accelerator = Accelerator(
        fsdp_plugin=_plugin(version, **settings), gradient_accumulation_steps=accumulation, mixed_precision=precision
    )
    torch.manual_seed(3)
    net = Blocks()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    return accelerator, *accelerator.prepare(net, opt, loader(8), schedule)


def _trained(version: int, **settings: Any) -> Any:
    prepared = accelerator, net, opt, batches, schedule = _prepared(version, **settings)
    losses = []
    for inputs, targets in batches:
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(inputs).float(), targets)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(net.parameters(), 0.5) if accelerator.sync_gradients else None
            opt.step()
            schedule.step()
            opt.zero_grad()
        losses.append([loss.item(), None if norm is None else float(norm)])
    return prepared, losses


def _facts(version: int, **settings: Any) -> Any:
    (accelerator, net, opt, _, _), losses = _trained(version, **settings)
    state = accelerator.get_state_dict(net)
    return losses, state if accelerator.is_main_process else None, len(opt.param_groups)


@program(ranks=2, tolerance=1e-5)
def fsdp1_trains() -> Any:
    return _facts(1)


@program(ranks=2, tolerance=1e-5)
def fsdp2_trains() -> Any:
    return _facts(2)


@program(ranks=2, tolerance=1e-5)
def fsdp1_accumulates() -> Any:
    return _facts(1, accumulation=2)


@program(ranks=2, tolerance=1e-5)
def fsdp2_accumulates() -> Any:
    return _facts(2, accumulation=2)


@program(ranks=2, tolerance=1e-2)
def fsdp1_in_bf16() -> Any:
    return _facts(1, precision="bf16")


@program(ranks=2, tolerance=1e-2)
def fsdp2_in_bf16() -> Any:
    return _facts(2, precision="bf16")


@program(ranks=2, tolerance=1e-5)
def fsdp2_keeps_parameters_after_the_forward() -> Any:
    return _facts(2, reshard_after_forward=False, activation_checkpointing=True)


@program(ranks=2, tolerance=1e-5)
def fsdp2_recomputes_nothing_without_units() -> Any:
    return _facts(2, activation_checkpointing=True, auto_wrap_policy=None, transformer_cls_names_to_wrap=None)


def _resumed(version: int, **settings: Any) -> Any:
    (accelerator, net, opt, batches, schedule), _ = _trained(version, **settings)
    before = accelerator.get_state_dict(net)
    accelerator.save_state("out")
    for inputs, targets in batches:
        accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
        opt.step()
        opt.zero_grad()
    accelerator.load_state("out")
    accelerator.wait_for_everyone()
    after = accelerator.get_state_dict(net)
    if not accelerator.is_main_process:
        return None
    same = all(torch.equal(before[name], after[name]) for name in before)
    return same, schedule.get_last_lr()


@program(ranks=2, tolerance=1e-5)
def fsdp1_resumes() -> Any:
    return _resumed(1)


@program(ranks=2, tolerance=1e-5)
def fsdp1_resumes_from_shards() -> Any:
    return _resumed(1, state_dict_type="SHARDED_STATE_DICT")


@program(ranks=2, tolerance=1e-5)
def fsdp2_resumes() -> Any:
    return _resumed(2)


@program(ranks=2, tolerance=1e-5)
def fsdp2_resumes_from_full_weights() -> Any:
    return _resumed(2, state_dict_type="FULL_STATE_DICT")


def _saved(version: int) -> Any:
    (accelerator, net, *_), _ = _trained(version)
    accelerator.save_model(net, "out")
    accelerator.wait_for_everyone()
    return files("out") if accelerator.is_main_process else None


@program(ranks=2, tolerance=1e-5)
def fsdp1_saves_the_model() -> Any:
    return _saved(1)


@program(ranks=2, tolerance=1e-5)
def fsdp2_saves_the_model() -> Any:
    return _saved(2)


@program(ranks=2)
def fsdp_evaluates() -> Any:
    accelerator, net, *_ = _prepared(2)
    net.eval()
    batches = accelerator.prepare(torch.utils.data.DataLoader(data(5), batch_size=2))
    with torch.no_grad():
        return [accelerator.gather_for_metrics(net(inputs)) for inputs, _ in batches]
