"""Complete training runs on two ranks, one for each feature in Accelerate's `by_feature` examples."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs, ProfileKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    ProjectConfiguration,
    find_executable_batch_size,
    gather_object,
    release_memory,
    set_seed,
)
from torch import nn
from torch.utils.data import DataLoader, Subset

from tests.parity.behaviour.programs._parts import data, model, optimizer

CALLS_ON_TWO_RANKS = [
    "_accumulation(2)",
    "_accumulation(3, clip=0.5)",
    "_automatic_accumulation()",
    "_by_number_of_items()",
    "_local_sgd(2)",
    "_local_sgd(3, steps=2)",
    "_checkpoints('epoch')",
    "_checkpoints('4')",
    "_checkpoints('3')",
    "_metrics()",
    "_tracked()",
    "_early_stopping()",
    "_cross_validation()",
    "_communication_hook('FP16')",
    "_communication_hook('BF16')",
    "_communication_hook('POWER_SGD')",
    "_communication_hook('BATCHED_POWER_SGD')",
    "_communication_hook('FP16', wrapper='BF16')",
    "_profiled()",
    "_inference()",
]


def _loader(samples: int = 22, shuffle: bool = True, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size=batch_size, shuffle=shuffle)


def _loss(net: Any, batch: Any, reduction: str = "mean") -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(net(inputs).float(), targets, reduction=reduction)


def _prepared(accelerator: Any, **settings: Any) -> Any:
    set_seed(3)
    net = model()
    opt = optimizer(net)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=12)
    return accelerator.prepare(net, opt, _loader(**settings), schedule)


def _weights(accelerator: Any, net: Any) -> Any:
    return {name: value.clone() for name, value in accelerator.unwrap_model(net).state_dict().items()}


def _accumulation(steps: int, clip: float | None = None) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    net, opt, batches, schedule = _prepared(accelerator)
    seen = []
    for _ in range(2):
        for batch in batches:
            with accelerator.accumulate(net):
                loss = _loss(net, batch)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), clip)
                opt.step()
                schedule.step()
                opt.zero_grad()
            seen.append((loss.item(), accelerator.sync_gradients, schedule.get_last_lr()))
    return seen, _weights(accelerator, net)


def _automatic_accumulation() -> Any:
    accelerator = Accelerator(cpu=True)
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> Any:
        tried.append(batch_size)
        accelerator.free_memory()
        net, opt, batches, _ = _prepared(accelerator, batch_size=batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")
        accelerator.gradient_accumulation_steps = 16 // batch_size
        for batch in batches:
            with accelerator.accumulate(net):
                accelerator.backward(_loss(net, batch))
                opt.step()
                opt.zero_grad()
        found = _weights(accelerator, net)
        release_memory(net, opt)
        return found

    return train(), tried


def _by_number_of_items() -> Any:
    """Accumulate batches of unequal sizes, and divide the gradients by the number of items on all ranks."""
    accelerator = Accelerator(cpu=True)
    net, opt, batches, _ = _prepared(accelerator, samples=26)
    counts, read = [], iter(batches)
    while group := list(itertools.islice(read, 3)):
        items = sum(targets.numel() for _, targets in group)
        total = accelerator.gather(torch.tensor(items)).sum().item()
        counts.append(total)
        for at, batch in enumerate(group):
            last = at == len(group) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(net):
                accelerator.backward(_loss(net, batch, "sum") * accelerator.num_processes / total)
        opt.step()
        opt.zero_grad()
    return counts, _weights(accelerator, net)


def _local_sgd(every: int, steps: int = 1) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    net, opt, batches, _ = _prepared(accelerator)
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=every, enabled=True) as local:
        for batch in batches:
            with accelerator.accumulate(net):
                accelerator.backward(_loss(net, batch))
                opt.step()
                opt.zero_grad()
                local.step()
    return _weights(accelerator, net)


def _checkpoints(when: str) -> Any:
    """Save after each epoch or every few steps, and then resume from one of the checkpoints."""
    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=project)
    net, opt, batches, schedule = _prepared(accelerator)
    first = _run(accelerator, (net, opt, batches, schedule), when)
    accelerator.wait_for_everyone()  # Accelerate may return from saving before all files are written.
    accelerator.load_state("project/checkpoints/checkpoint_1")
    done = len(batches) if when == "epoch" else 2 * int(when)
    batches.set_epoch(done // len(batches))
    rest = accelerator.skip_first_batches(batches, done % len(batches))
    second = _run(accelerator, (net, opt, rest, schedule), "")
    return (
        first,
        second,
        sorted(path.name for path in Path("project/checkpoints").iterdir()),
        _weights(accelerator, net),
    )


def _run(accelerator: Any, parts: Any, when: str) -> list[float]:
    net, opt, batches, schedule = parts
    losses = []
    for epoch in range(2 if when else 1):
        for batch in batches:
            loss = _loss(net, batch)
            accelerator.backward(loss)
            opt.step()
            schedule.step()
            opt.zero_grad()
            losses.append(loss.item())
            if when.isdigit() and len(losses) % int(when) == 0:
                accelerator.save_state()
        if when == "epoch":
            accelerator.save_state()
        del epoch
    return losses


def _metrics() -> Any:
    """Evaluate with an incomplete last batch. Metrics must count each sample once."""
    accelerator = Accelerator(cpu=True)
    net, batches = accelerator.prepare(model(), _loader(13, shuffle=False, batch_size=4))
    net.eval()
    found = []
    with torch.no_grad():
        for inputs, targets in batches:
            outputs = net(inputs)
            found.append(accelerator.gather_for_metrics((outputs, targets)))
    outputs, targets = (torch.cat(each) for each in zip(*found, strict=True))
    return len(outputs), outputs, targets, accelerator.gather_for_metrics(["object"] * 2, use_gather_object=True)


class _Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.records

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.records.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.records.append((values, step, kwargs))


def _tracked() -> Any:
    recorder = _Recorder()
    accelerator = Accelerator(cpu=True, log_with=recorder)
    net, opt, batches, _ = _prepared(accelerator)
    accelerator.init_trackers("project", config={"lr": 0.1})
    total = torch.zeros(())
    for step, batch in enumerate(batches):
        loss = _loss(net, batch)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        total += loss.detach()
        accelerator.log({"total": total.item() / (step + 1)}, step=step, log_kwargs={"recorder": {"commit": True}})
    return recorder.records, accelerator.get_tracker("recorder", unwrap=True)


def _early_stopping() -> Any:
    accelerator = Accelerator(cpu=True)
    net, opt, batches, _ = _prepared(accelerator)
    steps = 0
    for batch in batches:
        accelerator.backward(_loss(net, batch))
        opt.step()
        opt.zero_grad()
        steps += 1
        if accelerator.process_index == 1 and steps == 3:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return steps, accelerator.check_trigger(), _weights(accelerator, net)


def _cross_validation() -> Any:
    accelerator = Accelerator(cpu=True)
    samples = data(18)
    folds = []
    for fold in range(3):
        set_seed(fold)
        held = set(range(fold, 18, 3))
        net = model()
        opt = optimizer(net)
        seen = DataLoader(Subset(samples, [at for at in range(18) if at not in held]), batch_size=2, shuffle=True)
        kept = DataLoader(Subset(samples, sorted(held)), batch_size=2)
        net, opt, seen, kept = accelerator.prepare(net, opt, seen, kept)
        for batch in seen:
            accelerator.backward(_loss(net, batch))
            opt.step()
            opt.zero_grad()
        net.eval()
        with torch.no_grad():
            folds.append(torch.cat([accelerator.gather_for_metrics(net(inputs)) for inputs, _ in kept]))
        accelerator.free_memory()
    return torch.stack(folds).mean(0), [len(fold) for fold in folds]


def _communication_hook(hook: str, wrapper: str = "NO") -> Any:
    kwargs = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType[hook],
        comm_wrapper=DDPCommunicationHookType[wrapper],
        comm_state_option={"matrix_approximation_rank": 1, "start_powerSGD_iter": 2} if "POWER" in hook else {},
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    net, opt, batches, _ = _prepared(accelerator)
    for batch in batches:
        accelerator.backward(_loss(net, batch))
        opt.step()
        opt.zero_grad()
    return _weights(accelerator, net)


def _profiled() -> Any:
    traces: list[int] = []
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 1}
    kwargs = ProfileKwargs(
        activities=["cpu"],
        schedule_option=schedule,
        on_trace_ready=lambda profile: traces.append(profile.step_num),
        record_shapes=True,
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    net, opt, batches, _ = _prepared(accelerator)
    with accelerator.profile() as profile:
        for batch in batches:
            accelerator.backward(_loss(net, batch))
            opt.step()
            opt.zero_grad()
            profile.step()
    names = {each.key for each in profile.key_averages()}
    return traces, {"aten::addmm", "aten::mse_loss"} <= names, _weights(accelerator, net)


def _inference() -> Any:
    accelerator = Accelerator(cpu=True)
    prompts = [f"prompt {number}" for number in range(5)]
    with accelerator.split_between_processes(prompts, apply_padding=True) as mine:
        answers = gather_object([text.upper() for text in mine])
    with accelerator.split_between_processes({"a": prompts, "b": torch.arange(5)}) as mine:
        part = dict(mine)
    return answers, part
