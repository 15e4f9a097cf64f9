"""The state of a process: its rank and device, precision and plugins, and gradient accumulation.

As in Accelerate, all instances of a class share one dictionary per process, which the first instance fills.
"""

from __future__ import annotations

from notebook_accelerate.state.accelerator_state import (
    AcceleratorState,
    is_initialized,
    isolated_shared_state,
    reset_shared_state,
    start_afresh,
)
from notebook_accelerate.state.gradient_state import GradientState
from notebook_accelerate.state.partial_state import (
    PartialState,
    SharedDict,
    ThreadLocalSharedDict,
    do_nothing,
)

__all__ = [  # Without this list, `import *` would also import submodules.
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "SharedDict",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
    "isolated_shared_state",
    "reset_shared_state",
    "start_afresh",
]
