"""Which files a checkpoint has and what goes into them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.checkpointing import checkpoint_layout
from notebook_accelerate.checkpointing.rng_states import rng_state
from notebook_accelerate.checkpointing.sharded_protocol import Part, schedules_to_save
from notebook_accelerate.config import constants
from notebook_accelerate.data_loader import SeedableRandomSampler, get_sampler


@dataclass
class StateFile:
    """A file of a checkpoint before it is written."""

    name: str
    """Path relative to the checkpoint."""
    value: Any
    """What goes in; the suffix of the name decides the format."""
    optimizer: Any = None
    """The torch optimizer whose steps alone change it; None for everything else."""
    write: Callable[[Any, Path, Any], dict[str, tuple[int, int]]] | None = None
    """Writes a folder together with the other ranks (see `contract.Part`); None for a file of this rank."""

    def slow(self) -> Any:
        """Return the part of the value that only the optimizer's steps change; None where there is none."""
        state = self.value if self.write is None else self.value.get("optimizer", {})
        return state.get("state") if self.optimizer is not None else None


def model_file(index: int, safe: bool) -> str:
    """Return the name of a model's file.

    Args:
        index: Position of the model, from 0.
        safe: Whether it is written as safetensors.
    """
    name, suffix = (constants.SAFE_MODEL_NAME, ".safetensors") if safe else (constants.MODEL_NAME, ".bin")
    return checkpoint_layout.numbered(name, index, suffix)


def model_files(weights: Sequence[Any], safe: bool) -> list[StateFile]:
    """Return the files of the models' weights.

    Args:
        weights: One state dict per model.
        safe: Whether to write safetensors. A state dict that holds more than tensors is written in torch's format.
    """
    files = []
    for index, state in enumerate(weights):
        fits = safe and all(isinstance(value, torch.Tensor) for value in state.values())
        files.append(StateFile(model_file(index, fits), state))
    return files


def training_files(accelerator: Any, with_optimizers: bool) -> list[StateFile]:
    """Return the files that one rank writes for all: optimizers, schedules, loaders, scaler, custom objects.

    Args:
        accelerator: The Accelerator.
        with_optimizers: False where the strategy writes the optimizers itself.
    """
    optimizers = accelerator._optimizers if with_optimizers else []
    files = [
        StateFile(
            checkpoint_layout.numbered(constants.OPTIMIZER_NAME, index, ".bin"),
            optimizer.state_dict(),
            _bare(optimizer),
        )
        for index, optimizer in enumerate(optimizers)
    ]
    files += [
        StateFile(checkpoint_layout.numbered(constants.SCHEDULER_NAME, index, ".bin"), scheduler.state_dict())
        for index, scheduler in enumerate(schedules_to_save(accelerator._schedulers))
    ]
    for index, loader in enumerate(accelerator._dataloaders):
        files += loader_files(loader, index)
    if accelerator.scaler is not None:
        files.append(StateFile(constants.SCALER_NAME, accelerator.scaler.state_dict()))
    files += [
        StateFile(custom_file(index), custom.state_dict()) for index, custom in enumerate(accelerator._custom_objects)
    ]
    return files


def strategy_files(parts: Sequence[Part]) -> list[StateFile]:
    """Return the files and folders that a strategy with a state in pieces has.

    Args:
        parts: What it wants written.
    """
    return [
        StateFile(part.name, part.value, part.optimizer, None if part.dresses is None else part.write) for part in parts
    ]


def _bare(optimizer: Any) -> Any:
    """Return the torch optimizer inside, where it can tell before it steps."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def custom_file(index: int) -> str:
    """Return the name of the file of the `index`-th object registered for checkpointing."""
    return f"{checkpoint_layout.CUSTOM_OBJECT_NAME}_{index}.pkl"


def loader_files(loader: Any, index: int) -> list[StateFile]:
    """Return the files of one data loader: its epoch and sampler, and its position where it knows that.

    Args:
        loader: The prepared loader.
        index: Its position among the prepared loaders.
    """
    files = [StateFile(checkpoint_layout.numbered(constants.SAMPLER_NAME, index, ".bin"), sampler_state(loader))]
    if getattr(loader, "use_stateful_dataloader", False):
        state = loader.state_dict()
        files.append(
            StateFile(checkpoint_layout.numbered(checkpoint_layout.DATALOADER_STATE_NAME, index, ".bin"), state)
        )
    return files


def sampler_state(loader: Any) -> dict[str, Any]:
    """Return the epoch of a loader and what decides the order of its samples.

    Args:
        loader: The prepared loader.

    Returns:
        Plain data: `iteration`; for a seedable sampler its `epoch` and `initial_seed`; for another sampler with a
        generator of its own the `generator` state; `state_dict` of a sampler that has one; within an epoch, `order`:
        the random numbers its order was drawn from; `workers_seeded` where workers persist.
    """
    state: dict[str, Any] = {"iteration": getattr(loader, "iteration", 0)}
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        state.update(epoch=sampler.epoch, initial_seed=sampler.initial_seed)
    elif isinstance(getattr(sampler, "generator", None), torch.Generator):
        state["generator"] = sampler.generator.get_state()
    if callable(getattr(sampler, "state_dict", None)):
        state["state_dict"] = sampler.state_dict()
    if (order := getattr(loader, "order_state", lambda: None)()) is not None:
        state["order"] = order
    if getattr(loader, "workers_seeded", False):
        state["workers_seeded"] = True
    return state


def restore_sampler(loader: Any, state: Any) -> None:
    """Put a loader back to the epoch and order of a checkpoint.

    Args:
        loader: The prepared loader.
        state: What `sampler_state` returned.
    """
    sampler = get_sampler(loader)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(state["iteration"])
    if isinstance(sampler, SeedableRandomSampler) and "epoch" in state:
        sampler.initial_seed = state["initial_seed"]
        sampler.set_epoch(state["epoch"])
    elif "generator" in state and isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.set_state(state["generator"])
    if "state_dict" in state and callable(getattr(sampler, "load_state_dict", None)):
        sampler.load_state_dict(state["state_dict"])
    if hasattr(loader, "load_order_state"):
        loader.load_order_state(state.get("order"))
    if hasattr(loader, "workers_seeded"):
        loader.workers_seeded = state.get("workers_seeded", False)


def rng_file(rank: int) -> str:
    """Return the name of the file of one rank's random states."""
    return f"{constants.RNG_STATE_NAME}_{rank}.pkl"


def rank_file(accelerator: Any) -> StateFile:
    """Return the file that every rank writes: its step and its random states.

    Args:
        accelerator: The Accelerator.
    """
    state = {"step": accelerator.step, **rng_state(accelerator.device.type)}
    return StateFile(rng_file(accelerator.process_index), state)


def count_files(names: Sequence[str] | list[str], pattern: str) -> int:
    """Count the names that match a regular expression wholly."""
    return sum(re.fullmatch(pattern, name) is not None for name in names)


def names_in(folder: AnyPath, known: Sequence[str] | None) -> list[str]:
    """List the files of a checkpoint: those of its manifest, or those that are there."""
    return list(known) if known is not None else [path.name for path in folder.iterdir()]
