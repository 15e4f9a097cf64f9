"""What a process knows about itself: its place in the world, the precision it trains in, where it is in a window.

Each class is a view on one dictionary per process, as in Accelerate: every instance sees what the first one found out.
"""

from __future__ import annotations

from notebook_accelerate.state.accelerator_state import AcceleratorState
from notebook_accelerate.state.gradient_state import GradientState
from notebook_accelerate.state.partial_state import PartialState, is_initialized
from notebook_accelerate.state.reset import (
    isolated_shared_state,
    replace_shared_state,
    reset_shared_state,
    start_afresh,
)
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
    "replace_shared_state",
    "reset_shared_state",
    "start_afresh",
]
