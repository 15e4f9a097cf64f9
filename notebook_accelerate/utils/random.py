"""Seed and synchronise random number generators."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from notebook_accelerate._lazy import reexport
from notebook_accelerate.hardware import detect, device_table
from notebook_accelerate.state import PartialState

if TYPE_CHECKING:
    from notebook_accelerate.data_loader.shard_loader import (
        synchronize_rng_state as synchronize_rng_state,
        synchronize_rng_states as synchronize_rng_states,
    )

reexport(__name__)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's, torch's and the device's random number generators.

    Args:
        seed: The seed, from 0 to 2**32 - 1 (numpy's range).
        device_specific: Whether each rank adds its index to the seed, so that ranks draw different numbers.
        deterministic: Whether torch must use deterministic algorithms. Operations without a deterministic one raise an
            error.

    Raises:
        ValueError: The seed is not a whole number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r} is not allowed; pass a whole number: set_seed(42)")
    if device_specific:
        seed += PartialState().process_index
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - libraries draw from the global generator
    torch.manual_seed(seed)  # This seeds the CPU now, and CUDA, MPS and XPU once they are used.
    _seed_device(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _seed_device(seed: int) -> None:
    """Seed the generators that ``torch.manual_seed`` does not seed."""
    row = device_table.row(detect().accelerator)
    if row.type == "xla":
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(seed)
    elif row.extension:
        row.call("manual_seed_all", seed)
