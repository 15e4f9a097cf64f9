"""Random states of one rank: those of Python, numpy, torch and the rank's device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from notebook_accelerate.state.warn_once import warn_once


class _Generator(NamedTuple):
    """How the state of one random generator is read and set."""

    read: Callable[[], Any]
    restore: Callable[[Any], None]


# The keys are those of Accelerate's files. numpy's global generator is the one that training code uses.
_HOST_GENERATORS = {
    "random_state": _Generator(random.getstate, random.setstate),
    "numpy_random_seed": _Generator(np.random.get_state, np.random.set_state),
    "torch_manual_seed": _Generator(torch.get_rng_state, torch.set_rng_state),
}
_DEVICES_WITH_ALL_STATES = {"cuda", "xpu", "npu", "mlu", "sdaa", "musa", "hpu", "neuron"}
"""Device modules of torch with get_rng_state_all."""


def rng_state(device_type: str) -> dict[str, Any]:
    """Return the random states of this process in the form of Accelerate's files.

    Args:
        device_type: Device type that this rank trains on: "cpu", "cuda", ... The generators of an accelerator are read
            only where the rank trains on it: reading them would initialize the accelerator.
    """
    states = {key: generator.read() for key, generator in _generators(device_type).items()}
    if device_type in _DEVICES_WITH_ALL_STATES:
        module = getattr(torch, device_type)
        states[_all_states(device_type)] = module.get_rng_state_all()
        states[_own_device(device_type)] = module.current_device()
    return states


def restore_rng_state(state: dict[str, Any], device_type: str) -> None:
    """Set the random states of this process.

    Args:
        state: States from `rng_state` or from a file of Accelerate; those of other devices are ignored.
        device_type: Device type that this rank trains on.
    """
    for key, generator in _generators(device_type).items():
        if key in state:
            generator.restore(state[key])
    if _all_states(device_type) in state and device_type in _DEVICES_WITH_ALL_STATES:
        _restore_devices(state, device_type)


def _all_states(device_type: str) -> str:
    return f"torch_{device_type}_manual_seed"


def _own_device(device_type: str) -> str:
    return f"torch_{device_type}_device"


def _restore_devices(state: dict[str, Any], device_type: str) -> None:
    """Set the generators of the devices that this process sees, which may be fewer, or others, than those saved.

    The rank's own device gets the state of the one that it was saved on; files of Accelerate do not name that one.
    """
    module, saved = getattr(torch, device_type), state[_all_states(device_type)]
    own = module.current_device()
    by_device = dict(enumerate(saved[: module.device_count()]))
    source = state.get(_own_device(device_type), own)
    if source < len(saved):
        by_device[own] = saved[source]
    else:
        warn_once(
            f"The random states were saved with {len(saved)} visible {device_type} devices, and this rank uses "
            f"{device_type}:{own}: its random numbers on the device do not continue where they were saved."
        )
    for device, values in by_device.items():
        module.set_rng_state(values, device)


def _generators(device_type: str) -> dict[str, _Generator]:
    if device_type == "mps":
        key, generator = "torch_mps_manual_seed", _Generator(torch.mps.get_rng_state, torch.mps.set_rng_state)
    elif device_type == "tpu":
        key = "torch_tpu_manual_seed"
        generator = _Generator(lambda: _tpu_generator().get_state(), _restore_tpu)
    elif device_type == "xla":
        import torch_xla.core.xla_model as xm

        key, generator = "xm_seed", _Generator(xm.get_rng_state, xm.set_rng_state)
    else:
        return _HOST_GENERATORS
    return {**_HOST_GENERATORS, key: generator}


def _restore_tpu(state: torch.Tensor) -> None:
    _tpu_generator().set_state(state)


def _tpu_generator() -> torch.Generator:
    """Return the generator of this process's TPU: torch_tpu lets only torch call ``torch.tpu.get_rng_state``."""
    accelerator: Any = torch.accelerator
    return torch.tpu.default_generators[accelerator.current_device_index()]  # type: ignore[attr-defined, no-any-return]
