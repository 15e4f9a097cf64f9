"""What an `Accelerator` tells its strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.config.training_config import DataLoaderConfiguration
from notebook_accelerate.precision import Precision
from notebook_accelerate.state import AcceleratorState, GradientState


@dataclass(kw_only=True)
class Setup:
    """The settings of one `Accelerator`, as its strategy needs them."""

    state: AcceleratorState
    """The world."""
    gradient_state: GradientState
    """Where training is in a window of accumulation."""
    precision: Precision
    """What models compute in."""
    scaler: torch.amp.GradScaler | None
    """The scaler of losses; None in precisions that need none."""
    device: torch.device
    """The device of this rank, as it was when the `Accelerator` was made."""
    dynamo_plugin: Any = None
    """How models are compiled (`TorchDynamoPlugin`); None: not."""
    device_placement: bool = True
    """Whether models, batches and optimizer states go to the device of the rank."""
    dataloader_config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    """How loaders are shared between ranks."""
    rng_types: list[Any] | None = None
    """Generators that are made equal over ranks at the start of each pass; None means the strategy's choice."""
    step_scheduler_with_optimizer: bool = True
    """Whether schedulers move only when optimizers step."""
    ddp_handler: Any = None
    """`DistributedDataParallelKwargs`; None means torch's defaults."""
