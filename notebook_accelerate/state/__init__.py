"""The state of a process: rank and device, precision and plugins, gradient accumulation.

All instances of a class share one dictionary per process, as in Accelerate: the first one fills it.
"""

from __future__ import annotations

from notebook_accelerate.state.accelerator_state import AcceleratorState
from notebook_accelerate.state.gradient_state import GradientState
from notebook_accelerate.state.partial_state import PartialState, is_initialized
from notebook_accelerate.state.reset import isolated_shared_state, reset_shared_state, start_afresh
from notebook_accelerate.state.shared_dict import SharedDict, ThreadLocalSharedDict, do_nothing

__all__ = [
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
