"""Libraries that train by an engine of their own: what DeepSpeed and Megatron-LM have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.strategy import NOTHING, Strategy
from notebook_accelerate.strategies.strategy_setup import Setup


class EngineOptimizer(AcceleratedOptimizer):
    """An engine's optimizer: it steps through the engine, which also clears the gradients.

    Args:
        optimizer: The engine's optimizer.
        engine: An object whose `step` takes the engine's step; None: nothing is done by `step`.
    """

    library: ClassVar[str] = ""
    """Whose engine it is."""

    def __init__(self, optimizer: Any, engine: Any = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine

    def _take_step(self, closure: Callable[[], float] | None) -> Any:
        if closure is not None:
            raise ValueError(f"{self.library}'s optimizers take no closure: call optimizer.step()")
        if self.engine is not None:
            self.engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients.

        Args:
            set_to_none: Not used.
        """


class EngineScheduler(AcceleratedScheduler):
    """An engine's schedule: the engine moves it at each of its steps, and saves it with itself.

    Args:
        scheduler: The engine's schedule.
        optimizers: The prepared optimizer, or optimizers.
    """

    saved_by_strategy = True

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine moves the schedule.

        Args:
            args: Not used.
            kwargs: Not used.
        """


class EngineStrategy(Strategy):
    """A model and its optimizer become one engine, which scales losses, clips and steps.

    Attributes:
        models: The engine, once a model was prepared.
        engine: What takes its steps; None before.
    """

    library: ClassVar[str] = ""
    """Whose engine it is."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.engine: Any = None
        setup.scaler = None  # the engine scales losses

    def _knows(self, optimizer: Any) -> bool:
        return any(optimizer is kept for kept in self.optimizers)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Warn that engines cannot be joined: a rank without a batch would miss the others' exchange.

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

        The engine clips inside its step, so the step is taken here; `optimizer.step()` then has nothing left to do.

        Args:
            parameters: Not used: all of the engine's count.
            max_norm: The largest norm allowed; a number that the plugin or its configuration says holds in its place.
            norm_type: 2, which is the norm that engines know.

        Returns:
            The norm before clipping, over all ranks; that of the last step, where no window is complete.

        Raises:
            ValueError: Another norm is asked for.
        """
        if self.engine is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type} is not allowed with {self.library}, which clips by the 2-norm")
        held, advice = self._held_norm()
        if held is not None and not math.isinf(max_norm) and max_norm != held:
            warn_once(f"clip_grad_norm_ is called with {max_norm}, and {advice}")
        return self._clip(max_norm)

    def _held_norm(self) -> tuple[float | None, str]:
        """Return the norm that holds whatever the code says, None where none does, and what to do about it."""
        raise NotImplementedError

    def _clip(self, max_norm: float) -> torch.Tensor:
        """Take the step, clipped; return the norm before."""
        raise NotImplementedError

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Raise an error: engines do not clip single gradients.

        Args:
            parameters: Not used.
            clip_value: Not used.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{self.library} cannot clip single gradients; call accelerator.clip_grad_norm_ instead")


__all__ = ["EngineOptimizer", "EngineScheduler", "EngineStrategy"]
