"""One training for both packages: `train` saves, `go_on` loads, both return what must be equal."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def prepared(package: str, seed: int, precision: str = "no") -> tuple[Any, ...]:
    """Prepare a model with tied weights, an optimizer, a schedule, a loader and a counter."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = import_module(package).Accelerator(cpu=True, mixed_precision=precision)
    data = torch.Generator().manual_seed(1)
    tensors = TensorDataset(torch.randn(32, 6, generator=data), torch.randn(32, 6, generator=data))
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - checkpoints keep the global generator
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 6)
    )
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    parts = accelerator.prepare(model, optimizer, schedule, DataLoader(tensors, batch_size=4))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, counter, *parts


def epoch(accelerator: Any, counter: Counter, model: Any, optimizer: Any, schedule: Any, loader: Any) -> list[float]:
    """Train one epoch and return its losses."""
    losses = []
    for inputs, targets in loader:
        loss = ((model(inputs) - targets) ** 2).mean() * (1 + random.random())
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.count += 1
        losses.append(loss.item())
    return losses


def train(package: str, folder: str, safe: bool, precision: str = "no") -> list[float]:
    """Train an epoch, save, train another one; return its losses and the counter."""
    parts = prepared(package, 0, precision)
    epoch(*parts)
    parts[0].save_state(folder, safe_serialization=safe)
    return [*epoch(*parts), parts[1].count]


def go_on(package: str, folder: str, precision: str = "no") -> list[float]:
    """Load and train an epoch; return its losses and the counter."""
    parts = prepared(package, 77, precision)
    parts[0].load_state(folder)
    return [*epoch(*parts), parts[1].count]
