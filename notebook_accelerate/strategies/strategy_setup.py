"""The settings that an `Accelerator` passes to its strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.config.cluster import DataLoaderConfiguration
from notebook_accelerate.config.kwargs_handlers import DistributedDataParallelKwargs
from notebook_accelerate.precision import Precision
from notebook_accelerate.state import AcceleratorState, GradientState


@dataclass(kw_only=True)
class Setup:
    """The settings of one `Accelerator`, as its strategy needs them."""

    state: AcceleratorState
    """The ranks and plugins."""
    gradient_state: GradientState
    """The position of training in a window of accumulation."""
    precision: Precision
    """The precision of models."""
    scaler: torch.amp.GradScaler | None
    """The scaler of losses; None in precisions without one."""
    device: torch.device
    """The device of this rank, as it was when the `Accelerator` was made."""
    dynamo_plugin: Any = None
    """How models are compiled (`TorchDynamoPlugin`); None: they are not."""
    device_placement: bool = True
    """Whether models, batches and optimizer states move to the device of the rank."""
    dataloader_config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    """How loaders are shared between ranks."""
    rng_types: list[Any] | None = None
    """Random generators that are synchronized at the start of each pass; None means the strategy's choice."""
    step_scheduler_with_optimizer: bool = True
    """Whether schedulers step only when optimizers do."""
    ddp_handler: DistributedDataParallelKwargs | None = None
    """Settings of DDP; None means torch's defaults."""
