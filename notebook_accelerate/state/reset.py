"""Forgetting everything: what a fresh or inline worker starts from."""

from __future__ import annotations

from notebook_accelerate.state import process_group
from notebook_accelerate.state.accelerator_state import AcceleratorState
from notebook_accelerate.state.gradient_state import GradientState
from notebook_accelerate.state.notices import forget_notices
from notebook_accelerate.state.partial_state import PartialState


def reset_shared_state() -> None:
    """Forget this process's state: the next `Accelerator` or `PartialState` reads the environment anew.

    A process group that this process started is destroyed; one inherited through a fork is only forgotten, because its
    threads and sockets belong to the parent.
    """
    AcceleratorState._shared_state.clear()
    PartialState._shared_state.clear()
    # The old dictionary may still serve objects prepared before; they keep it.
    GradientState._shared_state = {}
    process_group.forget_group()
    forget_notices()
