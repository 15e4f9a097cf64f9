"""Wrappers of DeepSpeed's engine, optimizer and scheduler for a training loop of Accelerate."""

from __future__ import annotations

import math
from typing import Any

import torch

from notebook_accelerate.strategies.engine_strategy import EngineOptimizer, EngineScheduler


class DeepSpeedEngineWrapper:
    """Backward, clipping and step of an engine.

    The optimizer takes the step; or the clipping before it does, because DeepSpeed clips inside its step.

    Args:
        engine: The engine.
        clipping: The largest norm in the configuration; None: the argument of `clip`.
    """

    def __init__(self, engine: Any, clipping: float | None = None) -> None:
        self.engine = engine
        self.clipping = clipping
        self.pending = False

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients; every rank must call this.

        Args:
            loss: The loss.
            sync_gradients: Whether this batch completes a window of accumulation.
            kwargs: As for the engine's backward: `retain_graph`, and `scale_wrt_gas`, which divides the loss by the
                batches of a window.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        self.pending = sync_gradients

    def step(self) -> None:
        """Take the step of a complete window, once."""
        if self.pending:
            self.pending = False
            self.engine.step()

    def clip(self, max_norm: float) -> None:
        """Take the step, its gradients scaled so that their norm is at most `max_norm`.

        Args:
            max_norm: The largest norm; a number in the configuration has precedence.
        """
        if not self.pending:
            return
        if self.clipping is not None:
            self.step()
            return
        try:
            self._set_clipping(0.0 if math.isinf(max_norm) else float(max_norm))
            self.step()
        finally:
            self._set_clipping(0.0)

    def _set_clipping(self, max_norm: float) -> None:
        # The engine clips gradients of plain optimizers, DeepSpeed's optimizers clip their own.
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def get_global_grad_norm(self) -> Any:
        """Return the norm of all gradients in the last step, before clipping; None where DeepSpeed computes no norm."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


class DeepSpeedOptimizerWrapper(EngineOptimizer):
    """DeepSpeed's optimizer: `step` takes the engine's step, and `zero_grad` does nothing: the engine does it."""

    library = "DeepSpeed"

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were infinite."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(EngineScheduler):
    """DeepSpeed's schedule: `step` does nothing, because the engine steps it and saves it in its checkpoint."""
