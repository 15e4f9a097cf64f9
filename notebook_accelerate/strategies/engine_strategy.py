"""Base classes for the strategies of libraries that train with their own engine: DeepSpeed and Megatron-LM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.strategy import NOTHING, Strategy

PREPARE_TOGETHER = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
"""The line of code that error messages suggest."""


class EngineOptimizer(AcceleratedOptimizer):
    """An engine's optimizer. Its steps are the engine's steps, which also clear the gradients.

    Args:
        optimizer: The engine's optimizer.
        engine: The object whose `step` takes the engine's step. If None, the optimizer's `step` does nothing.
    """

    library: ClassVar[str] = ""
    """The name of the engine's library, for messages."""

    def __init__(self, optimizer: Any, engine: Any = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine

    def _take_step(self, closure: Callable[[], float] | None) -> Any:
        if closure is not None:
            raise ValueError(f"{self.library}'s optimizers accept no closure; call optimizer.step()")
        if self.engine is not None:
            self.engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing, because the engine clears the gradients.

        Args:
            set_to_none: Not used.
        """


class EngineScheduler(AcceleratedScheduler):
    """A schedule that the engine steps and saves in its own checkpoint.

    Args:
        scheduler: The engine's schedule.
        optimizers: The prepared optimizer or optimizers.
    """

    saved_by_strategy = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because the engine steps the schedule.

        Args:
            args: Not used.
            kwargs: Not used.
        """


class EngineStrategy(Strategy):
    """Creates one engine from a model and its optimizer. The engine scales losses, clips gradients and takes steps.

    Attributes:
        models: A list with the engine, once a model is prepared.
        engine: The object that takes the engine's steps, or None before a model is prepared.
    """

    library: ClassVar[str] = ""
    """The name of the engine's library, for messages."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.engine: Any = None
        setup.scaler = None  # The engine scales losses itself.
        if setup.state.mixed_precision != "fp8":
            setup.precision.native_amp = False  # The engine casts to half precision itself.

    def _is_prepared_optimizer(self, optimizer: Any) -> bool:
        return any(optimizer is prepared for prepared in self.optimizers)

    def _new_optimizers(self, objects: Sequence[Any], indices: Mapping[str, list[int]]) -> list[int]:
        """Return the indices of the optimizers that are not prepared yet."""
        return [at for at in indices["optimizer"] if not self._is_prepared_optimizer(objects[at])]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return an optimizer that was prepared together with its model.

        Args:
            optimizer: The optimizer to look up.
            device_placement: Not used, because the engine places the optimizer's state.

        Returns:
            The prepared optimizer that was created for it.

        Raises:
            ValueError: The optimizer was not prepared together with its model.
        """
        if self._is_prepared_optimizer(optimizer):
            return optimizer  # type: ignore[no-any-return]
        raise self._incomplete(optimizer)

    def _incomplete(self, item: Any) -> ValueError:
        return ValueError(
            f"{self.library} creates one engine from a model and its optimizer, but {type(item).__name__} was "
            f"prepared alone: {PREPARE_TOGETHER}"
        )

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Warn that the call has no effect, because a rank without a batch would miss the engine's collectives.

        Args:
            joinables: Not used.
            even_batches: Not used.

        Returns:
            A context manager that does nothing.
        """
        warn_once(
            f"join_uneven_inputs has no effect with {self.library}: every rank must run every batch; keep "
            "even_batches=True"
        )
        return NOTHING

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Take the engine's step with gradients clipped to a norm of `max_norm`; every rank must call this.

        The engine clips inside its step. The step is therefore taken here, and the `optimizer.step()` that follows
        does nothing.

        Args:
            parameters: Not used, because the engine computes the norm over all of its parameters.
            max_norm: The maximum norm. A number in the plugin or its configuration takes precedence.
            norm_type: The type of the norm, which must be 2.

        Returns:
            The norm of all ranks' gradients before clipping. If the accumulation window is not complete, the previous
            step's norm is returned.

        Raises:
            ValueError: `norm_type` is not 2.
        """
        if self.engine is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type} is not allowed with {self.library}, which clips by the 2-norm")
        norm, advice = self._configured_norm()
        if norm is not None and not math.isinf(max_norm) and max_norm != norm:
            warn_once(f"clip_grad_norm_ is called with {max_norm}, but {advice}")
        return self._step_clipped(max_norm)

    def _configured_norm(self) -> tuple[float | None, str]:
        """Return the configured maximum norm or None, and a hint for the warning that this norm takes precedence."""
        raise NotImplementedError

    def _step_clipped(self, max_norm: float) -> torch.Tensor:
        """Take the step with clipped gradients, and return their norm before clipping."""
        raise NotImplementedError

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Raise an error, because engines cannot clip the values of gradients.

        Args:
            parameters: Not used.
            clip_value: Not used.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{self.library} cannot clip single gradients; call accelerator.clip_grad_norm_ instead")
