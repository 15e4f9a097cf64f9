"""Protocols of the `Accelerator` for the rooms below it; use the smallest one that has what you need."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from notebook_accelerate.config.cluster import ProjectConfiguration
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.strategies.strategy import Strategy


class HasState(Protocol):
    """An object with the state of the world."""

    state: AcceleratorState


class PreparesDataLoaders(HasState, Protocol):
    """An object that prepares data loaders."""

    def prepare_data_loader(self, data_loader: DataLoader[Any]) -> DataLoader[Any]:
        """Prepare a loader; see `Strategy.prepare_data_loader`."""


class RankControl(Protocol):
    """This rank among the others."""

    @property
    def process_index(self) -> int:
        """This rank, from 0."""

    @property
    def num_processes(self) -> int:
        """Number of ranks."""

    @property
    def local_process_index(self) -> int:
        """This rank's index on its machine."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called this; every rank must call this."""


class HasStrategy(HasState, RankControl, Protocol):
    """A rank with its strategy."""

    strategy: Strategy

    @property
    def device(self) -> torch.device:
        """The device of this rank."""


class PreparedObjects(HasStrategy, Protocol):
    """The prepared objects, and everything else that a checkpoint contains.

    The lists with a leading underscore have Accelerate's names, which libraries on top of it read.
    """

    scaler: torch.amp.GradScaler | None
    step: int
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    _models: list[torch.nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[DataLoader[Any]]
    _custom_objects: list[Any]
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]]
    _load_model_state_pre_hook: OrderedDict[int, Callable[..., None]]

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state; every rank must call this."""


class HasTrackers(RankControl, Protocol):
    """A rank with its trackers."""

    trackers: list[Any]
    log_with: list[Any]

    @property
    def logging_dir(self) -> str | None:
        """Folder of logs."""
