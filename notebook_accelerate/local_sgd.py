"""`LocalSGD`, which lets ranks train independently for a number of steps before they average their parameters."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from notebook_accelerate.collectives import reduce
from notebook_accelerate.torch_internals import foreach_copy

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from typing_extensions import Self

    from notebook_accelerate.accelerator import Accelerator

_SUPPORTED = ("NO", "MULTI_")


class LocalSGD:
    """Trains without exchanging gradients, and averages parameters every few steps; every rank must enter the block.

    Source: Stich, "Local SGD Converges Fast and Communicates Little" (https://arxiv.org/abs/1805.09767).

    Args:
        accelerator: The `Accelerator` that has prepared the model.
        model: The prepared model whose parameters are averaged.
        local_sgd_steps: The number of optimizer steps between two averages.
        enabled: Whether to train in this way. If False, nothing is done.

    Raises:
        ValueError: The model is sharded, or `local_sgd_steps` is less than 1.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        kind = accelerator.distributed_type.value
        if enabled and not kind.startswith(_SUPPORTED):
            raise ValueError(f"LocalSGD averages whole models, but {kind} shards them; pass enabled=False")
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps={local_sgd_steps} is not allowed; pass a whole number of at least 1")
        self.enabled = enabled and kind != "NO"
        self.num_steps = 0
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self._no_sync: AbstractContextManager[None] | None = None

    def __enter__(self) -> Self:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._no_sync is None:
            return
        # After an error, other ranks may not reach the collective, and waiting for them would hide the error.
        if error is None:
            self._average()
        self._no_sync.__exit__(kind, error, trace)
        self._no_sync = None

    def step(self) -> None:
        """Count an optimizer step, and average the parameters after enough steps; every rank must call this."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        with torch.no_grad():
            foreach_copy(parameters, reduce(parameters, reduction="mean"))
