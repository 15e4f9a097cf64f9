"""A small model and its training, with everything that a checkpoint may hold, for tests of saving and resuming."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator
from notebook_accelerate.precision.fp8 import has_ao_layers


class Counter:
    """A custom object that has a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Net(nn.Module):
    """A model with tied weights, dropout that draws random numbers, and a normalization with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        hidden = nn.functional.dropout(self.norm(self.first(inputs)).relu(), 0.3, self.training)
        scores: torch.Tensor = self.last(hidden)
        return scores


class Training:
    """A prepared model, optimizer, schedule and shuffled loader, and a counter.

    Args:
        seed: The seed for all random numbers.
        options: The arguments for `Accelerator`.
    """

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        seed_everything(seed)
        self.raw = Net()
        optimizer = torch.optim.AdamW(self.raw.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        data = TensorDataset(torch.randn(48, 8), torch.randn(48, 8))
        loader = DataLoader(data, batch_size=4, shuffle=True)
        prepared = self.accelerator.prepare(self.raw, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.losses: list[float] = []

    def epoch(self, skip: int = 0, stop: int | None = None) -> None:
        """Train one epoch.

        Args:
            skip: The number of batches to skip at the start.
            stop: The index of the batch before which to stop.
        """
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for index, (inputs, targets) in enumerate(loader, start=skip):
            self.train_on(inputs, targets)
            if stop is not None and index + 1 == stop:
                return

    def train_on(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Train on one batch, with a loss that depends on Python's and numpy's random numbers."""
        with self.accelerator.accumulate(self.model):
            noise = random.random() + float(np.random.rand())  # noqa: NPY002 - checkpoints keep the global generator
            loss = nn.functional.mse_loss(self.model(inputs), targets * (1 + 0.01 * noise))
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.counter.count += 1
        self.losses.append(loss.item())

    def weights(self) -> list[torch.Tensor]:
        """Return copies of the model's parameters and buffers."""
        return [tensor.detach().clone() for tensor in self.raw.state_dict().values()]

    def everything(self) -> list[Any]:
        """Return everything that must match after identical training, from weights to random numbers."""
        state = self.optimizer.state_dict()
        tensors = [value for key in sorted(state["state"]) for value in state["state"][key].values()]
        return [
            *self.weights(),
            *(tensor.clone() for tensor in tensors),
            torch.tensor(self.schedule.get_last_lr()),
            torch.tensor([self.counter.count, random.random(), float(np.random.rand())]),  # noqa: NPY002
            torch.rand(2),
        ]


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Return whether two lists of tensors are bitwise equal."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in pairs(left, right))


def pairs(left: list[Any], right: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Iterate over two lists of equal length in parallel."""
    return zip(left, right, strict=True)


def fp8_net() -> nn.Sequential:
    """Return a small model whose layers have shapes that fp8 supports, with the same weights in each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def losses_on_one_batch(accelerator: Accelerator, rate: float) -> list[float]:
    """Train on the same batch on all ranks, so that the losses do not depend on the number of ranks."""
    raw = fp8_net()
    inputs, labels = torch.randn(32, 16), torch.randint(0, 4, (32,))
    loader = DataLoader(TensorDataset(inputs), batch_size=32)  # DeepSpeed takes the batch size from a loader.
    inputs, labels = inputs.to(accelerator.device), labels.to(accelerator.device)
    model, optimizer, _ = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=rate), loader)
    assert has_ao_layers(accelerator.unwrap_model(model)) == (accelerator.mixed_precision == "fp8")
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
