"""Accelerate's helper functions for autocast and gradient scalers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from notebook_accelerate.precision.precision_table import make_precision
from notebook_accelerate.state import AcceleratorState


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return the autocast context of the process's precision.

    Args:
        native_amp: False returns a context that does nothing.
        autocast_kwargs: `AutocastKwargs`.
    """
    state = AcceleratorState()
    precision = make_precision(state.mixed_precision, state.device.type)
    precision.native_amp = native_amp
    return precision.autocast(autocast_kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """Return a gradient scaler.

    Args:
        distributed_type: The kind of parallelism; sharded parameters need a scaler that checks all ranks.
        kwargs: Arguments of the scaler.
    """
    if getattr(distributed_type, "value", distributed_type) == "FSDP":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    accelerator = torch.accelerator.current_accelerator()
    # Without an accelerator the scaler does nothing.
    return torch.amp.GradScaler(accelerator.type if accelerator is not None else "cuda", **kwargs)
