"""The same training with either package: `train` saves, `go_on` loads, and both return values that must be equal."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def prepared(package: str, seed: int, precision: str = "no", loading: str = "in order") -> tuple[Any, ...]:
    """Prepare a model with tied weights, an optimizer, a schedule and a loader, and register a counter."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    configuration = import_module(f"{package}.utils").DataLoaderConfiguration(
        use_stateful_dataloader=loading == "stateful"
    )
    accelerator = import_module(package).Accelerator(
        cpu=True, mixed_precision=precision, dataloader_config=configuration
    )
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
    loader = DataLoader(tensors, batch_size=4, shuffle=loading == "shuffled")
    parts = accelerator.prepare(model, optimizer, schedule, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, counter, *parts


def with_scaler(accelerator: Any, scale: float, action: Any) -> float:
    """Call a function while the Accelerator has a scaler, which it creates on GPUs only. Return the final scale."""
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(1))
    accelerator.scaler = scaler
    action()
    accelerator.scaler = None
    return float(scaler.get_scale())


def epoch(accelerator: Any, counter: Counter, model: Any, optimizer: Any, schedule: Any, loader: Any) -> list[float]:
    """Train on the batches of a loader, and return the losses."""
    import numpy as np

    losses: list[float] = []
    for inputs, targets in loader:
        noise = random.random() + float(np.random.rand())  # noqa: NPY002 - checkpoints keep the global generator
        loss = ((model(inputs) - targets) ** 2).mean() * (1 + noise)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.count += 1
        losses.append(loss.item())
    return losses


def train(package: str, folder: str, safe: bool, precision: str = "no", loading: str = "in order") -> list[float]:
    """Train, save, and continue. Return the losses after the checkpoint, the counter, the rate and the scale.

    The checkpoint is saved between two epochs, or within the first epoch if the loader is stateful.
    """
    parts = prepared(package, 0, precision, loading)
    accelerator, counter, _, _, schedule, _ = parts
    if loading != "stateful":
        epoch(*parts)
        scale = with_scaler(accelerator, 8.0, lambda: accelerator.save_state(folder, safe_serialization=safe))
        losses = epoch(*parts)
    else:
        losses = interrupted(parts, folder, safe)
        scale = 8.0
    return [*losses, counter.count, *schedule.get_last_lr(), scale]


def interrupted(parts: tuple[Any, ...], folder: str, safe: bool) -> list[float]:
    """Train for an epoch, and save a checkpoint after the third batch. Return the losses after that batch."""
    accelerator, *_, loader = parts
    losses: list[float] = []
    for done, batch in enumerate(loader, start=1):
        losses += epoch(*parts[:-1], [batch])
        if done == 3:
            with_scaler(accelerator, 8.0, lambda: accelerator.save_state(folder, safe_serialization=safe))
    return losses[3:]


def go_on(package: str, folder: str, precision: str = "no", loading: str = "in order") -> list[float]:
    """Load the checkpoint and train an epoch. Return the same values as `train`."""
    parts = prepared(package, 77, precision, loading)
    accelerator, counter, _, _, schedule, _ = parts
    scale = with_scaler(accelerator, 2.0, lambda: accelerator.load_state(folder))
    return [*epoch(*parts), counter.count, *schedule.get_last_lr(), scale]


DTYPES = {"half": "bfloat16", "scalar": "int64", "whole.weight": "float32", "flags": "bool", "small": "float16"}


def _weights() -> dict[str, Any]:
    import torch

    values = torch.randn(len(DTYPES), 3, 4, generator=torch.Generator().manual_seed(0))
    found = {name: value.to(getattr(torch, dtype)) for value, (name, dtype) in zip(values, DTYPES.items(), strict=True)}
    found["scalar"] = torch.tensor(7)
    return found


def offload(package: str, folder: str) -> None:
    """Write weights to a folder for offloading."""
    import_module(f"{package}.utils").offload_state_dict(folder, _weights())


def offloaded(package: str, folder: str) -> dict[str, str]:
    """Read the folder of offloaded weights. Return the dtypes of the weights that are unchanged."""
    import torch

    loader = import_module(f"{package}.utils").OffloadedWeightsLoader(save_folder=folder)
    same = {name: loader[name] for name, weight in _weights().items() if torch.equal(loader[name], weight)}
    return {name: str(weight.dtype).removeprefix("torch.") for name, weight in same.items()}


def _layers(numbers: Any) -> Any:
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    for number, parameter in zip(numbers, model.parameters(), strict=True):
        torch.nn.init.constant_(parameter, float(number))
    return model


def save_model(package: str, folder: str, safe: bool) -> None:
    """Write a model to several files."""
    accelerator = import_module(package).Accelerator(cpu=True)
    accelerator.save_model(_layers(range(6)), folder, max_shard_size="5KB", safe_serialization=safe)


def loaded_model(package: str, folder: str) -> list[float]:
    """Load the model that `save_model` wrote. Return the value of each of its parameters."""
    model = _layers([9] * 6)
    import_module(f"{package}.utils").load_checkpoint_in_model(model, folder)
    return [parameter.flatten()[0].item() for parameter in model.parameters()]
