"""Functions that DeepSpeed's ranks run: training with checkpoints, measurements, and configuration files."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator, DeepSpeedPlugin
from notebook_accelerate.state import AcceleratorState, reset_shared_state
from notebook_accelerate.utils import DummyOptim, DummyScheduler, GatheredParameters
from tests.parity.strategies.memory import size_of
from tests.parity.strategies.scripts import GLOBAL_BATCH, Case, accelerator_of, dataset, loss_of, parts


def trained(case: Case, folder: str, save_at: int | None) -> dict[str, Any]:
    """Train with a schedule, and save before batch `save_at`; if that is None, resume from `folder` instead."""
    accelerator = accelerator_of(case)
    model, optimizer = parts(1 + accelerator.process_index)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    loader = DataLoader(dataset(case), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if save_at is None:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, case.first)
    losses = []
    for index, (words, targets) in enumerate(loader):
        if index == save_at:
            accelerator.save_state(folder)
        loss = loss_of(model(words), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {
        "losses": losses,
        "weights": accelerator.get_state_dict(model),
        "rate": schedule.get_last_lr(),
        "engine": [group["lr"] for group in optimizer.param_groups],
    }


def weights_in(folder: str) -> dict[str, torch.Tensor]:
    """Return a checkpoint's float32 weights, read with DeepSpeed's own function."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return {name: weight.clone() for name, weight in get_fp32_state_dict_from_zero_checkpoint(folder).items()}


class Wide(nn.Module):
    """A model large enough for the ranks' shares to be visible."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layers for x."""
        return self.layers(x)


def memory(stage: int) -> dict[str, float]:
    """Return the memory that this rank holds, relative to all parameters. Gradients are measured within a window."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin({"zero_optimization": zero}))
    loader = DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=4)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    held: dict[str, int] = {}
    for index, (x,) in enumerate(loader):
        if index % 2 == 0:
            with accelerator.no_sync(model):
                accelerator.backward(model(x).pow(2).mean())
            held["gradients"] = gradients_of(model)
        else:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
    held["parameters"] = size_of([*model.parameters(), *(getattr(p, "ds_tensor", None) for p in model.parameters())])
    states = [value for state in optimizer.state.values() for value in state.values()]
    held["states"] = size_of(value for value in states if isinstance(value, torch.Tensor) and value.numel() > 1)
    # The first name is for stages 1 and 2, and the second one for stage 3.
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    held["masters"] = size_of(part for name in names for part in getattr(model.optimizer, name, ()))
    return {name: size / whole for name, size in held.items()}


def gradients_of(engine: Any) -> int:
    """Return the size in bytes of the gradients that wait for the rest of a window, whole or as this rank's parts."""
    optimizer = engine.optimizer
    held = {**(getattr(optimizer, "all_grad_tensors", None) or {})}  # Stage 2 keeps gradients here.
    waiting = [tensor for group in held.values() for tensor in group or ()]
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)  # Stage 3 keeps gradients here.
    waiting += [] if buffer is None else [buffer]
    waiting += [p.grad for p in engine.module.parameters() if p.grad is not None]
    return size_of(waiting)


CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}
STEPS, WARM = 10, 2


def described(folder: str | None = None) -> dict[str, Any]:
    """Train with a configuration's optimizer and schedule, saving halfway, and finally load that checkpoint."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(CONFIG))
    case = Case(steps=STEPS)
    model, _ = parts()
    stand_in = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = DummyScheduler(stand_in, total_num_steps=STEPS * accelerator.num_processes, warmup_num_steps=WARM)
    loader = DataLoader(dataset(case), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader, schedule = accelerator.prepare(model, stand_in, loader, schedule)
    rates, losses = [], []
    for index, (words, targets) in enumerate(loader):
        if folder is not None and index == STEPS // 2:
            accelerator.save_state(folder)
        rates.append(optimizer.param_groups[0]["lr"])
        loss = loss_of(model(words), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    names = sorted(path.name for path in Path(folder).iterdir()) if folder is not None else []
    if folder is not None:
        accelerator.load_state(folder)
    return {
        "rates": rates,
        "losses": losses,
        "config": accelerator.deepspeed_plugin.deepspeed_config,
        "names": names,
        "rate of the checkpoint": optimizer.param_groups[0]["lr"],
    }


def plainly_described() -> dict[str, list[float]]:
    """Train in plain torch as `CONFIG` describes."""
    model, _ = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def factor(step: int) -> float:
        step = max(step - 1, 0)  # DeepSpeed's schedules start with the first step, and count from 0.
        return step / WARM if step < WARM else (STEPS - step) / (STEPS - WARM)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    found: dict[str, list[float]] = {"rates": [], "losses": []}
    for words, targets in DataLoader(dataset(Case(steps=STEPS)), batch_size=GLOBAL_BATCH):
        found["rates"].append(optimizer.param_groups[0]["lr"])
        loss = loss_of(model(words), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    return found


def norms(case: Case) -> list[float]:
    """Return the results of clip_grad_norm_ for each batch."""
    accelerator = accelerator_of(case)
    model, optimizer = parts()
    loader = DataLoader(dataset(case), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for words, targets in loader:
        accelerator.backward(loss_of(model(words), targets))
        found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def held_back() -> dict[str, Any]:
    """Train with `no_sync`: every other batch's gradients are exchanged only with the next batch's, before a step."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    case = Case(steps=12)
    model, optimizer = parts()
    loader = DataLoader(dataset(case), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for index, (words, targets) in enumerate(loader):
        if index % 2 == 0:
            with accelerator.no_sync(model):
                loss = loss_of(model(words), targets) / 2
                accelerator.backward(loss)
        else:
            loss = loss_of(model(words), targets) / 2
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(2 * accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses}


def two_models() -> dict[str, Any]:
    """Train a student in stage 2 with a teacher that is sharded in stage 3. Each has its own Accelerator."""
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(deepspeed_plugins=plugins)
    first = accelerator.deepspeed_plugin is plugins["student"]
    student, optimizer = parts()
    loader = DataLoader(dataset(Case(steps=4)), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    AcceleratorState().select_deepspeed_plugin("teacher")
    helper = Accelerator()
    teacher = helper.prepare(parts(7)[0])
    words = next(iter(loader))[0]
    with torch.no_grad():
        scores, alone = teacher(words), parts(7)[0](words)
    AcceleratorState().select_deepspeed_plugin("student")
    for batch, targets in loader:
        accelerator.backward(loss_of(student(batch), targets))
        optimizer.step()
    with GatheredParameters(list(teacher.parameters())):
        whole = sum(parameter.numel() for parameter in teacher.parameters())
    return {
        "first": first,
        "selected": [name for name, plugin in plugins.items() if plugin.selected],
        "agrees": torch.allclose(scores, alone, atol=1e-6),
        "resting": sum(parameter.numel() for parameter in teacher.parameters()),
        "whole": whole,
        "plain": sum(parameter.numel() for parameter in parts()[0].parameters()),
        "wrapped": type(accelerator.unwrap_model(student)).__name__,
    }


def mistakes() -> dict[str, str]:
    """Return the messages for requests that are not supported."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model, optimizer = parts()
    other, others = parts()
    loader = DataLoader(dataset(Case(steps=2)), batch_size=4)
    said = {
        "alone": _said(accelerator.prepare, optimizer),
        "no loader": _said(accelerator.prepare, model, optimizer),
        "another model's": _said(accelerator.prepare, other, optimizer, loader),
        "two": _said(accelerator.prepare, model, optimizer, others, loader),
        "stand-in": _said(accelerator.prepare, model, DummyOptim(model.parameters()), loader),
    }
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    said["second"] = _said(accelerator.prepare, other, others)
    said["values"] = _said(accelerator.clip_grad_value_, model.parameters(), 1.0)
    said["norm"] = _said(functools.partial(accelerator.clip_grad_norm_, model.parameters(), 1.0, norm_type=1))
    accelerator.free_memory()
    prepared = accelerator.prepare(*parts(), DataLoader(dataset(Case(steps=2)), batch_size=2))
    said["again"] = str(accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"])
    assert len(prepared) == 3
    return said


def _said(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


def lacking() -> dict[str, str]:
    """Return the messages about fp16 and NVMe, or "" for those that this machine supports."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder

    def train(precision: str, **settings: Any) -> None:
        reset_shared_state()
        accelerator = Accelerator(mixed_precision=precision, deepspeed_plugin=DeepSpeedPlugin(**settings))
        model, optimizer = parts()
        accelerator.prepare(model, optimizer, DataLoader(dataset(Case(steps=2)), batch_size=GLOBAL_BATCH))

    Accelerator(deepspeed_plugin=DeepSpeedPlugin())  # This imports DeepSpeed for the right device.
    said = {"fp16": "", "nvme": ""}
    if not get_accelerator().is_fp16_supported():
        said["fp16"] = _said(functools.partial(train, "fp16", zero_stage=2))
        assert said["fp16"]
    if not AsyncIOBuilder().is_compatible(verbose=False):
        place = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "."}
        said["nvme"] = _said(functools.partial(train, "no", zero_stage=3, **place))
        assert said["nvme"]
    return said


def saved_whole(folder: str) -> dict[str, Any]:
    """Save a sharded model as whole weights. Return the message that appears if the configuration forbids that."""
    accelerator = accelerator_of(replace(Case(), deepspeed={"zero_stage": 3}))
    model, optimizer = parts()
    loader = DataLoader(dataset(Case(steps=2)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    model._config.zero_config.gather_16bit_weights_on_model_save = False
    return {"forbidden": _said(accelerator.get_state_dict, model)}
