"""Random states of one rank: Python's, numpy's, torch's, and its accelerators'."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# Device modules of torch with get_rng_state_all/set_rng_state_all, and the key of Accelerate's files.
_DEVICE_KEYS = {
    "cuda": "torch_cuda_manual_seed",
    "xpu": "torch_xpu_manual_seed",
    "npu": "torch_npu_manual_seed",
    "mlu": "torch_mlu_manual_seed",
    "sdaa": "torch_sdaa_manual_seed",
    "musa": "torch_musa_manual_seed",
    "hpu": "torch_hpu_manual_seed",
    "neuron": "torch_neuron_manual_seed",
}


def rng_state(device_type: str) -> dict[str, Any]:
    """Return the random states of this process in the form of Accelerate's files.

    Args:
        device_type: What this rank trains on: "cpu", "cuda", ...; an accelerator's generators are read only there, so
            that none is started on a machine that trains on its CPU.
    """
    state: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),  # noqa: NPY002 - the global generator is the one to save
        "torch_manual_seed": torch.get_rng_state(),
    }
    if (key := _DEVICE_KEYS.get(device_type)) is not None:
        state[key] = getattr(torch, device_type).get_rng_state_all()
    elif device_type == "mps":
        state["torch_mps_manual_seed"] = torch.mps.get_rng_state()
    elif device_type == "xla":
        import torch_xla.core.xla_model as xm

        state["xm_seed"] = xm.get_rng_state()
    return state


def restore_rng_state(state: dict[str, Any], device_type: str) -> None:
    """Set the random states of this process.

    Args:
        state: What `rng_state` returned, or a file of Accelerate holds. States of devices that are not here are left.
        device_type: What this rank trains on.
    """
    for key, setter in _setters(device_type).items():
        if key in state:
            setter(state[key])


def _setters(device_type: str) -> dict[str, Callable[[Any], None]]:
    setters: dict[str, Callable[[Any], None]] = {
        "random_state": random.setstate,
        "numpy_random_seed": np.random.set_state,
        "torch_manual_seed": torch.set_rng_state,
    }
    if (key := _DEVICE_KEYS.get(device_type)) is not None:
        setters[key] = getattr(torch, device_type).set_rng_state_all
    elif device_type == "mps":
        setters["torch_mps_manual_seed"] = torch.mps.set_rng_state
    elif device_type == "xla":
        import torch_xla.core.xla_model as xm

        setters["xm_seed"] = xm.set_rng_state
    return setters
