"""The state of a process: rank and device, precision and plugins, gradient accumulation.

All instances of a class share one dictionary per process, as in Accelerate: the first one fills it.
"""

from __future__ import annotations

from notebook_accelerate.state.accelerator_state import (
    AcceleratorState as AcceleratorState,
    GradientState as GradientState,
    isolated_shared_state as isolated_shared_state,
    reset_shared_state as reset_shared_state,
    start_afresh as start_afresh,
)
from notebook_accelerate.state.partial_state import (
    PartialState as PartialState,
    SharedDict as SharedDict,
    ThreadLocalSharedDict as ThreadLocalSharedDict,
    do_nothing as do_nothing,
    is_initialized as is_initialized,
)
