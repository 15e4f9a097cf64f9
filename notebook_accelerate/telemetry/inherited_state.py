"""What of the kernel's own state every rank starts with, whatever its start method.

The policy for random numbers: all ranks start from the kernel's state at launch, so that a model built in the
function is the same on every rank, a kernel that was seeded gives the same run again, and fork and zygote agree.
Launching does not advance the kernel's own generators.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass
class InheritedState:
    """States of generators and torch settings, None where the kernel has not loaded the library."""

    python_rng: Any = None
    numpy_rng: Any = None
    torch_rng: Any = None
    settings: dict[str, Any] = field(default_factory=dict)


def capture() -> InheritedState:
    """Return the kernel's state; imports nothing."""
    ambient = InheritedState(python_rng=random.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        ambient.numpy_rng = numpy.random.get_state()
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_default_device"):
        ambient.torch_rng = torch.get_rng_state().numpy().tobytes()
        ambient.settings = {
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "default_device": str(torch.get_default_device()),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }
    return ambient


def apply(ambient: InheritedState) -> None:
    """Put this process into the captured state."""
    random.setstate(ambient.python_rng)
    if ambient.numpy_rng is not None:
        import numpy as np

        np.random.set_state(ambient.numpy_rng)  # noqa: NPY002 - the same
    if ambient.torch_rng is not None:
        import torch

        torch.set_rng_state(torch.frombuffer(bytearray(ambient.torch_rng), dtype=torch.uint8))
        settings = ambient.settings
        torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
        # The default device is kept per thread: a rank forked from another thread does not inherit it.
        if settings["default_device"] != "cpu":
            torch.set_default_device(settings["default_device"])
        if settings["deterministic"] != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(settings["deterministic"])  # imports the compiler, which takes a second
        torch.set_float32_matmul_precision(settings["matmul_precision"])
