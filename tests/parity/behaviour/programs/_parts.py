"""Small models, data and helper functions that programs share."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A model of two layers with a normalization between them, which has buffers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 2)
        self.note = "kept"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(inputs)))

    def extra(self) -> str:
        """Return a string. nn.Module has no such method."""
        return f"extra {self.note}"


def model(width: int = 4) -> Net:
    torch.manual_seed(1)
    return Net(width)


def data(samples: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(samples, 3, generator=generator), torch.randn(samples, 2, generator=generator))


def loader(samples: int = 10, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data(samples), **{"batch_size": 2, **settings})


def optimizer(net: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW((net or model()).parameters(), lr=0.1)


def parts(samples: int = 10) -> tuple[Any, Any, Any, Any]:
    """Return a model, its optimizer, a loader and a scheduler."""
    net = model()
    opt = optimizer(net)
    return net, opt, loader(samples), torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)


def on_gpus(**settings: Any) -> Accelerator:
    """Return an Accelerator of ranks that Accelerate treats as if each had a GPU, but whose tensors are on the CPU."""
    AcceleratorState._reset_state()
    PartialState().distributed_type = DistributedType.MULTI_GPU
    return Accelerator(**settings)


def train(accelerator: Any, net: Any, opt: Any, batches: Any, schedule: Any = None) -> list[float]:
    """Train for an epoch. Return the losses."""
    losses = []
    for inputs, targets in batches:
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(inputs).float(), targets)
            accelerator.backward(loss)
            opt.step()
            if schedule is not None:
                schedule.step()
            opt.zero_grad()
        losses.append(loss.item())
    return losses


def local_sgd(
    accelerator: Any, net: Any, opt: Any, batches: Any, *, steps: int, schedule: Any = None, **settings: Any
) -> Any:
    """Train for an epoch with LocalSGD. Return the weights."""
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=steps, **settings) as local:
        for inputs, targets in batches:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
                opt.step()
                if schedule is not None:
                    schedule.step()
                opt.zero_grad()
                local.step()
    return accelerator.get_state_dict(net)


def with_variables(variables: dict[str, str], call: Callable[[], Any]) -> Any:
    """Set environment variables for the rest of this program's process, and return the result of a call."""
    os.environ.update(variables)
    return call()


def warned(call: Callable[[], Any]) -> tuple[list[str], Any]:
    """Return the categories of the warnings that a call issues, and its result."""
    caught: list[str] = []
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        caught.append(category.__name__)
        shown(message, category, *place)

    warnings.showwarning = show
    try:
        result = call()
    finally:
        warnings.showwarning = shown
    return caught, result


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.levels: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "accelerate" in record.name:
            self.levels.append(record.levelname)


def logged(call: Callable[[], Any], level: int = logging.WARNING) -> list[str]:
    """Return the levels of the records that the package logs during a call."""
    kept = _Kept()
    root = logging.getLogger()
    kept.setLevel(level)
    root.addHandler(kept)
    try:
        call()
    finally:
        root.removeHandler(kept)
    return kept.levels


def raised(call: Callable[[], Any]) -> Any:
    """Return the exception that a call raises, or its result if it raises none."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - any is a result
        return error


def files(folder: str | Path = ".") -> dict[str, Any]:
    """Map each file below a folder to its tensors if it has weights, to its content if it is JSON, or else to None."""
    return {str(path.relative_to(folder)): _content(path) for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".bin":
        return torch.load(path, weights_only=False)
    return None
