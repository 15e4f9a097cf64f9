"""Base classes of the strategies whose library trains with its own engine: DeepSpeed and Megatron-LM."""

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
"""The line to type, for messages."""


class EngineOptimizer(AcceleratedOptimizer):
    """An engine's optimizer: it steps through the engine, which also clears the gradients.

    Args:
        optimizer: The engine's optimizer.
        engine: An object whose `step` takes the engine's step; None: `step` does nothing.
    """

    library: ClassVar[str] = ""
    """Name of the engine's library, for messages."""

    def __init__(self, optimizer: Any, engine: Any = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine

    def _take_step(self, closure: Callable[[], float] | None) -> Any:
        if closure is not None:
            raise ValueError(f"{self.library}'s optimizers accept no closure; call optimizer.step()")
        if self.engine is not None:
            self.engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients.

        Args:
            set_to_none: Not used.
        """


class EngineScheduler(AcceleratedScheduler):
    """An engine's schedule: the engine steps it, and saves it in its own checkpoint.

    Args:
        scheduler: The engine's schedule.
        optimizers: The prepared optimizer, or optimizers.
    """

    saved_by_strategy = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps the schedule.

        Args:
            args: Not used.
            kwargs: Not used.
        """


class EngineStrategy(Strategy):
    """Makes one engine of a model and its optimizer, which scales losses, clips and steps.

    Attributes:
        models: The engine, once a model was prepared.
        engine: The object that takes its steps; None before.
    """

    library: ClassVar[str] = ""
    """Name of the engine's library, for messages."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.engine: Any = None
        setup.scaler = None  # the engine scales losses
        if setup.state.mixed_precision != "fp8":
            setup.precision.native_amp = False  # the engine casts to half precision

    def _is_prepared_optimizer(self, optimizer: Any) -> bool:
        return any(optimizer is prepared for prepared in self.optimizers)

    def _new_optimizers(self, objects: Sequence[Any], indices: Mapping[str, list[int]]) -> list[int]:
        """Return the indices of the optimizers that are not prepared yet."""
        return [at for at in indices["optimizer"] if not self._is_prepared_optimizer(objects[at])]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return an optimizer that was prepared with its model.

        Args:
            optimizer: The optimizer.
            device_placement: Not used: the engine places its state.

        Returns:
            The prepared optimizer.

        Raises:
            ValueError: It was not prepared with its model.
        """
        if self._is_prepared_optimizer(optimizer):
            return optimizer  # type: ignore[no-any-return]
        raise self._incomplete(optimizer)

    def _incomplete(self, item: Any) -> ValueError:
        return ValueError(
            f"{self.library} creates one engine from a model and its optimizer, and {type(item).__name__} was "
            f"prepared alone: {PREPARE_TOGETHER}"
        )

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Warn that the call has no effect: with an engine, a rank without a batch would miss a collective.

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
        """Take the step with gradients scaled to a norm of at most `max_norm`; every rank must call this.

        The engine clips inside its step, so the step is taken here, and `optimizer.step()` does nothing afterwards.

        Args:
            parameters: Not used: the norm is that of all the engine's parameters.
            max_norm: The largest norm allowed; a number in the plugin or its configuration has precedence.
            norm_type: 2, the only norm of engines.

        Returns:
            The norm before clipping, over all ranks; the norm of the last step, where no window is complete.

        Raises:
            ValueError: `norm_type` is not 2.
        """
        if self.engine is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type} is not allowed with {self.library}, which clips by the 2-norm")
        norm, advice = self._configured_norm()
        if norm is not None and not math.isinf(max_norm) and max_norm != norm:
            warn_once(f"clip_grad_norm_ is called with {max_norm}, and {advice}")
        return self._step_clipped(max_norm)

    def _configured_norm(self) -> tuple[float | None, str]:
        """Return the configured norm, which has precedence, or None; and how to use the argument instead."""
        raise NotImplementedError

    def _step_clipped(self, max_norm: float) -> torch.Tensor:
        """Take the step with clipped gradients; return their norm before."""
        raise NotImplementedError

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Raise an error: engines cannot clip single gradients.

        Args:
            parameters: Not used.
            clip_value: Not used.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{self.library} cannot clip single gradients; call accelerator.clip_grad_norm_ instead")
