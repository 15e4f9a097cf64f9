"""Wraps a model's forward in autocast, and restores it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from notebook_accelerate.collectives import ConvertOutputsToFp32, convert_to_fp32


class AutocastForward(ConvertOutputsToFp32):
    """A forward that runs under autocast and returns float32.

    Args:
        model_forward: The original.
        settings: Arguments of `torch.autocast`.
    """

    def __init__(self, model_forward: Callable[..., Any], settings: dict[str, Any]) -> None:
        super().__init__(model_forward)
        self.settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original under autocast, and convert what it returns."""
        with torch.autocast(**self.settings):
            outputs = self.model_forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> AutocastForward:
        return AutocastForward(copy.deepcopy(self.model_forward, memo), dict(self.settings))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles as the original, which a process without this package can load. The copy is the original itself for a
        # function; for a bound method, pickle has looked it up in the new object's class.
        return copy.copy, (self.model_forward,)


def restore_forward(model: torch.nn.Module) -> None:
    """Restore the forward that a precision replaced; a model that was not wrapped is unchanged.

    Args:
        model: The model.
    """
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = original
