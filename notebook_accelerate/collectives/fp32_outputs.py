"""Forwards that return float32; objects rather than closures, so that models can still be pickled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from notebook_accelerate.collectives.local_operations import convert_to_fp32


class ConvertOutputsToFp32:
    """A forward that returns float32 instead of float16 or bfloat16.

    Args:
        model_forward: The original.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, model_forward)
        self.model_forward = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original and convert its result."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Make a forward return float32 instead of float16 or bfloat16.

    Args:
        model_forward: A function or a bound method.

    Returns:
        A callable with the same signature; it can be pickled if the original can.
    """
    return ConvertOutputsToFp32(model_forward)
