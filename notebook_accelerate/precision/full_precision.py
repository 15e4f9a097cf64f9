"""The null object: float32 all through. Other precisions override what they change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from notebook_accelerate.precision.autocast_forward import restore_forward


class Precision:
    """Full precision, and the base class of the others.

    Args:
        device_type: Type of the device that computes: cpu, cuda, ...
        autocast_handler: `AutocastKwargs`; None means torch's defaults.
        scaler_handler: `GradScalerKwargs`; None means torch's defaults.
        fp8_recipe: How fp8 is computed; None in other precisions.
    """

    name: ClassVar[str] = "no"
    compute_dtype: ClassVar[torch.dtype | None] = None
    """What the model computes in; None means what its parameters have."""

    def __init__(
        self, device_type: str, autocast_handler: Any = None, scaler_handler: Any = None, fp8_recipe: Any = None
    ) -> None:
        self.device_type = device_type
        self.autocast_handler = autocast_handler
        self.scaler_handler = scaler_handler
        self.fp8_recipe = fp8_recipe

    def join(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Change models and optimizers that only change together, before anything else is done to them.

        Args:
            models: The models of one `prepare`.
            optimizers: Its optimizers.

        Returns:
            What stands for them from now on, in the same order.
        """
        return models, optimizers

    def convert_layers(self, model: torch.nn.Module) -> None:
        """Have a model's layers compute in this precision, in place, for an engine that casts what is around them.

        Args:
            model: The model, before the engine takes it. Its parameters stay the same objects.
        """

    def wrap_model(self, model: torch.nn.Module, sharded: bool = False) -> torch.nn.Module:
        """Make the model compute in this precision, in place; what another precision did to it is undone.

        Args:
            model: The model, before it is wrapped for several ranks.
            sharded: Whether FSDP 2 will shard its parameters, which may be replaced then.

        Returns:
            The model.
        """
        restore_forward(model)
        return model

    def autocast(self, handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context in which code outside of a prepared model computes in this precision.

        Args:
            handler: `AutocastKwargs` for this block; None means those of the constructor.

        Returns:
            A context manager.
        """
        return nullcontext()

    def after_step(self, model: torch.nn.Module) -> None:
        """Do what this precision needs after a step of the optimizer of a sharded model; every rank must call this.

        Args:
            model: The model.
        """

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return a new scaler of losses, where this precision needs one.

        Returns:
            The scaler, or None.
        """
        return None
