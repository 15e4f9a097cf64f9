"""The same training in plain torch and with an Accelerator. Both return losses and final weights."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

Result = tuple[list[float], list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """The model, data and options of a training run."""

    samples: int = 24
    batch_size: int = 4
    epochs: int = 2
    accumulation: int = 1
    precision: str = "no"
    clip: float | None = None
    clip_value: float | None = None
    schedule: bool = False
    adam: bool = True


class Net(nn.Module):
    """A small nonlinear model: two layers with a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.body(inputs)


def dataset(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(case.samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (case.samples,), generator=generator))


def parts(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = Net()
    if case.adam:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) if case.schedule else None
    return model, optimizer, scheduler


def batches_of_rank(case: Case, rank: int, size: int) -> list[list[int]]:
    """Divide the dataset as prepared loaders do: ranks take turns, and the first samples fill up the last batches."""
    order = list(range(case.samples))
    rounds = -(-case.samples // (case.batch_size * size))
    filled = [order[i % case.samples] for i in range(rounds * case.batch_size * size)]
    if size == 1:
        filled = order
    batches = [filled[i : i + case.batch_size] for i in range(0, len(filled), case.batch_size)]
    return batches[rank::size]


def plain(case: Case) -> Result:
    """Train in plain torch, with DDP if a process group exists."""
    grouped = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    model, optimizer, scheduler = parts(case)
    data = dataset(case).tensors
    trained: Any = DistributedDataParallel(model) if grouped else model
    scaler = torch.amp.GradScaler("cpu") if case.precision == "fp16" else None
    losses = []
    batches = batches_of_rank(case, rank, size)
    for _ in range(case.epochs):
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            closes = (index + 1) % case.accumulation == 0 or last
            apart = trained.no_sync() if grouped and not closes else contextlib.nullcontext()
            with apart:
                loss = _loss(case, trained, [values[batch] for values in data])
                scaled = loss / case.accumulation if case.accumulation > 1 else loss
                (scaler.scale(scaled) if scaler else scaled).backward()
            losses.append(loss.item())
            if closes:
                _step(case, model, optimizer, scheduler, scaler, size)
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def _loss(case: Case, model: Any, batch: list[torch.Tensor]) -> torch.Tensor:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
        scores = model(batch[0])
    return nn.functional.cross_entropy(scores.float(), batch[1])


def _step(case: Case, model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, size: int) -> None:
    if scaler:
        scaler.unscale_(optimizer)
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    if case.clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), case.clip_value)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    for _ in range(size if scheduler else 0):
        scheduler.step()
    optimizer.zero_grad()


def accelerated(case: Case, package: str = "notebook_accelerate") -> Result:
    """Train with an Accelerator from this package, or from another package with the same API."""
    from importlib import import_module

    accelerator = import_module(package).Accelerator(
        cpu=True, mixed_precision=case.precision, gradient_accumulation_steps=case.accumulation
    )
    raw, optimizer, scheduler = parts(case)
    loader = DataLoader(dataset(case), batch_size=case.batch_size)
    model, optimizer, scheduler, loader = accelerator.prepare(raw, optimizer, scheduler, loader)
    losses = []
    for _ in range(case.epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients and case.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                if accelerator.sync_gradients and case.clip_value is not None:
                    accelerator.clip_grad_value_(model.parameters(), case.clip_value)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()]


def both_on_a_rank(case: Case) -> tuple[Result, Result]:
    """Train both ways on one rank of a world. Plain torch comes second, in the group that the Accelerator created."""
    ours = accelerated(case)
    return ours, plain(case)
