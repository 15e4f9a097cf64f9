"""The files of a checkpoint, and their content."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch

from notebook_accelerate.checkpointing.manifest import WHOLE
from notebook_accelerate.config import constants
from notebook_accelerate.data_loader import SeedableRandomSampler, get_sampler
from notebook_accelerate.state.warn_once import warn_once

if TYPE_CHECKING:
    from notebook_accelerate.strategies.accelerator_properties import AcceleratorProperties
    from notebook_accelerate.strategies.sharding.write_plans import StatePart
    from notebook_accelerate.strategies.strategy import Strategy

CUSTOM_OBJECT_NAME = "custom_checkpoint"
DATALOADER_STATE_NAME = "dl_state_dict"


@dataclass
class StateFile:
    """A file of a checkpoint before it is written."""

    name: str
    """The path of the file, relative to the checkpoint."""
    value: Any
    """The content to write. The suffix of the name determines the format."""
    optimizer: torch.optim.Optimizer | None = None
    """The torch optimizer if only its steps change the content, otherwise None."""
    write: Callable[[Any, Path, Any], dict[str, tuple[int, int]]] | None = None
    """The function that writes a folder together with the other ranks (see `StatePart.write`), or None for a file."""

    def optimizer_state(self) -> Any:
        """Return the part of the content that only the optimizer's steps change, or None if there is no such part."""
        if self.optimizer is None:
            return None
        state = self.value if self.write is None else self.value.get("optimizer", {})
        return state.get("state")


def numbered(name: str, index: int, suffix: str) -> str:
    """Return the file name of the `index`-th object of a kind. The first one has no number.

    Args:
        name: The kind, such as ``optimizer``.
        index: The position of the object among the objects of its kind, counted from 0.
        suffix: The file suffix including the dot, such as ``.bin``.
    """
    return f"{name}{suffix}" if index == 0 else f"{name}_{index}{suffix}"


def model_file(index: int, safe: bool) -> str:
    """Return the name of a model's file.

    Args:
        index: The position of the model, counted from 0.
        safe: Whether the model is written as safetensors.
    """
    name, suffix = (constants.SAFE_MODEL_NAME, ".safetensors") if safe else (constants.MODEL_NAME, ".bin")
    return numbered(name, index, suffix)


def model_files(weights: Sequence[Any], safe: bool) -> list[StateFile]:
    """Return the files with the weights of the models.

    Args:
        weights: One state dict for each model.
        safe: Whether to write safetensors. A state dict with values other than tensors is written in torch's format.
    """
    files = []
    for index, state in enumerate(weights):
        fits = safe and all(isinstance(value, torch.Tensor) for value in state.values())
        files.append(StateFile(model_file(index, fits), state))
    return files


def training_files(accelerator: AcceleratorProperties, with_optimizers: bool) -> list[StateFile]:
    """Return the files that one rank writes for all ranks.

    The files contain the optimizers, the schedulers, the loaders, the scaler and the registered objects.

    Args:
        accelerator: The Accelerator whose objects are written.
        with_optimizers: Whether to include the optimizers, which some strategies write themselves.
    """
    files = [
        StateFile(
            numbered(constants.OPTIMIZER_NAME, index, ".bin"), optimizer.state_dict(), _unwrap_optimizer(optimizer)
        )
        for index, optimizer in enumerate(accelerator._optimizers if with_optimizers else [])
    ]
    files += [
        StateFile(numbered(constants.SCHEDULER_NAME, index, ".bin"), scheduler.state_dict())
        for index, scheduler in enumerate(schedulers_to_save(accelerator._schedulers))
    ]
    for index, loader in enumerate(accelerator._dataloaders):
        files += loader_files(loader, index)
    if accelerator.scaler is not None:
        files.append(StateFile(constants.SCALER_NAME, accelerator.scaler.state_dict()))
    files += [
        StateFile(custom_file(index), custom.state_dict()) for index, custom in enumerate(accelerator._custom_objects)
    ]
    return files


def strategy_files(parts: Sequence[StatePart]) -> list[StateFile]:
    """Return the files and folders of a strategy that shards its state.

    Args:
        parts: The result of the strategy's `state_parts`.
    """
    return [
        StateFile(part.name, part.value, part.optimizer, None if part.wrappers is None else part.write)
        for part in parts
    ]


def _unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside a wrapper, or None if the wrapper contains no torch optimizer.

    Only a torch optimizer's step can run hooks.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def custom_file(index: int) -> str:
    """Return the file name of the `index`-th object registered for checkpointing."""
    return f"{CUSTOM_OBJECT_NAME}_{index}.pkl"


def loader_files(loader: Any, index: int) -> list[StateFile]:
    """Return the files of a data loader, with its epoch and sampler, and its position if the loader keeps track of it.

    Args:
        loader: The prepared loader whose state is written.
        index: The position of the loader among the prepared loaders.
    """
    state = sampler_state(loader)
    files = [StateFile(numbered(constants.SAMPLER_NAME, index, ".bin"), state)]
    if getattr(loader, "use_stateful_dataloader", False):
        position = loader.state_dict()
        state["position"] = position.own
        files.append(StateFile(numbered(DATALOADER_STATE_NAME, index, ".bin"), dict(position)))
    return files


def sampler_state(loader: Any) -> dict[str, Any]:
    """Return the epoch of a loader, and the state that determines the order of its samples.

    Args:
        loader: The prepared loader to read the state from.

    Returns:
        Plain data with the key `iteration`. Further keys depend on the loader: `epoch` and `initial_seed` of a seedable
        sampler, or the state of the `generator` of another sampler; the sampler's `state_dict`; within an epoch,
        `order`, the random state that the order was drawn from; `exhausted` after the last batch of an epoch; and
        `workers_seeded` if workers are persistent.
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
    if getattr(loader, "exhausted", False):
        state["exhausted"] = True
    if getattr(loader, "workers_seeded", False):
        state["workers_seeded"] = True
    return state


def restore_sampler(loader: Any, state: Any) -> None:
    """Set a loader to the epoch and order that a checkpoint contains.

    Args:
        loader: The prepared loader to set.
        state: The result of `sampler_state`.
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
        loader.load_order_state(state.get("order"), state.get("exhausted", False))
    if hasattr(loader, "workers_seeded"):
        loader.workers_seeded = state.get("workers_seeded", False)


def rng_file(rank: int) -> str:
    """Return the name of a rank's random states file."""
    return f"{constants.RNG_STATE_NAME}_{rank}.pkl"


def rank_file(accelerator: AcceleratorProperties) -> StateFile:
    """Return the file that each rank writes, with the rank's step number and random states.

    Args:
        accelerator: The Accelerator of this rank.
    """
    state = {"step": accelerator.step, **rng_state(accelerator.device.type)}
    return StateFile(rng_file(accelerator.process_index), state)


def count_files(names: Sequence[str], pattern: str) -> int:
    """Return the number of names that fully match a regular expression."""
    return sum(re.fullmatch(pattern, name) is not None for name in names)


# ---- strategies that choose the files for models and optimizers, because they shard them


class HasOwnLayout(Protocol):
    """A strategy whose `checkpoint_layout` is not "whole".

    Every such strategy is also a `SavesOwnState` or a `ReturnsStateParts`.
    """

    name: str
    checkpoint_layout: str
    """The name of the layout. The manifest contains it, because a checkpoint must be loaded with the same layout."""

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """Read models and optimizers from a folder; every rank calls this.

        Args:
            folder: The folder of the checkpoint, which has been verified.
            models: The prepared models that no hook has loaded.
            options: The additional arguments that the user passed to `load_state`.
        """


class SavesOwnState(HasOwnLayout, Protocol):
    """A strategy whose engine itself writes models and optimizers, in the foreground."""

    def save_state(self, folder: Path, safe_serialization: bool, **options: Any) -> None:
        """Write models and optimizers to files with any names in a folder; every rank calls this.

        All files must be complete when this method returns.

        Args:
            folder: An existing staging folder, which is shared by all ranks on a file system.
            safe_serialization: Whether to prefer safetensors.
            options: The additional arguments that the user passed to `save_state`.
        """


class ReturnsStateParts(HasOwnLayout, Protocol):
    """A strategy that returns the shards of models and optimizers, so that a thread can write them."""

    def state_parts(self, safe_serialization: bool, **options: Any) -> Sequence[StatePart]:
        """Return the parts of models and optimizers that this rank writes; every rank calls this.

        Args:
            safe_serialization: Whether to prefer safetensors.
            options: The additional arguments that the user passed to `save_state`.

        Returns:
            The parts. Folders are in the same order on every rank.
        """


def has_own_layout(strategy: Strategy) -> TypeGuard[HasOwnLayout]:
    """Return whether a strategy chooses the files for models and optimizers."""
    return strategy.checkpoint_layout != WHOLE


def returns_state_parts(strategy: Strategy) -> TypeGuard[ReturnsStateParts]:
    """Return whether a strategy returns parts for `save_state` to write, possibly in a thread."""
    return has_own_layout(strategy) and hasattr(strategy, "state_parts")


def saves_own_state(strategy: Strategy) -> TypeGuard[SavesOwnState]:
    """Return whether a strategy's engine itself writes models and optimizers."""
    return strategy.checkpoint_layout != WHOLE and not returns_state_parts(strategy)


def schedulers_to_save(schedulers: Sequence[Any]) -> list[Any]:
    """Return the schedulers that the strategy does not save itself, which are those without `saved_by_strategy`.

    Args:
        schedulers: The prepared schedulers to choose from.
    """
    return [scheduler for scheduler in schedulers if not getattr(scheduler, "saved_by_strategy", False)]


# ---- the random states of a rank: Python's, numpy's, torch's and the device's


class _Generator(NamedTuple):
    """The functions that read and set the state of a random number generator."""

    read: Callable[[], Any]
    restore: Callable[[Any], None]


# The keys are the same as in Accelerate's files. For numpy, only the global generator is saved, because that is the one
# that training code uses.
_HOST_GENERATORS = {
    "random_state": _Generator(random.getstate, random.setstate),
    "numpy_random_seed": _Generator(np.random.get_state, np.random.set_state),
    "torch_manual_seed": _Generator(torch.get_rng_state, torch.set_rng_state),
}
_DEVICES_WITH_ALL_STATES = {"cuda", "xpu", "npu", "mlu", "sdaa", "musa", "hpu", "neuron"}
"""The names of torch's device modules that have get_rng_state_all."""


def rng_state(device_type: str) -> dict[str, Any]:
    """Return the random states of this process, in the form of Accelerate's files.

    Args:
        device_type: The type of the device that this rank trains on: "cpu", "cuda", ... The generators of a GPU or
            another accelerator are only read if the rank trains on it, because reading them initializes the device.
    """
    states = {key: generator.read() for key, generator in _generators(device_type).items()}
    if device_type in _DEVICES_WITH_ALL_STATES:
        module = getattr(torch, device_type)
        states[_all_states(device_type)] = module.get_rng_state_all()
        states[_own_device(device_type)] = module.current_device()
    return states


def restore_rng_state(state: dict[str, Any], device_type: str) -> None:
    """Set the random states of this process.

    Args:
        state: The states from `rng_state` or from a file that Accelerate wrote. States of other device types are
            ignored.
        device_type: The type of the device that this rank trains on.
    """
    for key, generator in _generators(device_type).items():
        if key in state:
            generator.restore(state[key])
    if _all_states(device_type) in state and device_type in _DEVICES_WITH_ALL_STATES:
        _restore_devices(state, device_type)


def _all_states(device_type: str) -> str:
    return f"torch_{device_type}_manual_seed"


def _own_device(device_type: str) -> str:
    return f"torch_{device_type}_device"


def _restore_devices(state: dict[str, Any], device_type: str) -> None:
    """Set the generators of the devices that this process sees, which need not be the devices that were saved.

    The rank's own device gets the state of the device that the rank used when the checkpoint was saved. Accelerate's
    files do not record which device this was.
    """
    module, saved = getattr(torch, device_type), state[_all_states(device_type)]
    own = module.current_device()
    by_device = dict(enumerate(saved[: module.device_count()]))
    source = state.get(_own_device(device_type), own)
    if source < len(saved):
        by_device[own] = saved[source]
    else:
        warn_once(
            f"The random states were saved with {len(saved)} visible {device_type} devices, but this rank uses "
            f"{device_type}:{own}, so its random numbers on the device do not continue from the checkpoint."
        )
    for device, values in by_device.items():
        module.set_rng_state(values, device)


def _generators(device_type: str) -> dict[str, _Generator]:
    if device_type == "mps":
        key, generator = "torch_mps_manual_seed", _Generator(torch.mps.get_rng_state, torch.mps.set_rng_state)
    elif device_type == "tpu":
        key = "torch_tpu_manual_seed"
        generator = _Generator(lambda: _tpu_generator().get_state(), _restore_tpu)
    elif device_type == "xla":
        import torch_xla.core.xla_model as xm

        key, generator = "xm_seed", _Generator(xm.get_rng_state, xm.set_rng_state)
    else:
        return _HOST_GENERATORS
    return {**_HOST_GENERATORS, key: generator}


def _restore_tpu(state: torch.Tensor) -> None:
    _tpu_generator().set_state(state)


def _tpu_generator() -> torch.Generator:
    """Return the generator of this process's TPU, which gives access to the random state.

    ``torch.tpu.get_rng_state`` cannot be used, because only torch itself may call it.
    """
    accelerator: Any = torch.accelerator
    return torch.tpu.default_generators[accelerator.current_device_index()]  # type: ignore[attr-defined, no-any-return]
