"""Resets and isolates the shared state, for new and inline workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from notebook_accelerate.state import process_group
from notebook_accelerate.state.accelerator_state import AcceleratorState
from notebook_accelerate.state.gradient_state import GradientState
from notebook_accelerate.state.partial_state import PartialState
from notebook_accelerate.state.shared_dict import SharedDict, Slots
from notebook_accelerate.state.warn_once import reset_warnings


def reset_shared_state() -> None:
    """Clear this process's state: the next `Accelerator` or `PartialState` reads the environment again.

    A process group that this process started is destroyed; one inherited by a fork is only dropped, because its threads
    and sockets belong to the parent.
    """
    AcceleratorState._shared_state.clear()
    PartialState._shared_state.clear()
    # Objects prepared before keep the old dictionary.
    GradientState._shared_state = {}
    process_group.forget_group()
    reset_warnings()


def replace_shared_state(with_: tuple[Slots, Slots, Slots] | None = None) -> tuple[Slots, Slots, Slots]:
    """Replace the dictionaries of the state classes; objects created before keep theirs.

    Args:
        with_: Dictionaries of `PartialState`, `AcceleratorState` and `GradientState`; None: empty ones.

    Returns:
        The previous dictionaries.
    """
    before = PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state
    after = with_ or (SharedDict(), SharedDict(), SharedDict())
    PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state = after
    return before


def start_afresh() -> None:
    """Discard the state that an inline run left, if the run was the first to import this package."""
    process_group.end_group_of_one()
    replace_shared_state()


@contextmanager
def isolated_shared_state() -> Iterator[None]:
    """Replace this process's state for the time of a run that has its own, and restore it afterwards."""
    had_group = process_group.group_exists()
    before = replace_shared_state()
    try:
        yield
    finally:
        if not had_group:
            process_group.end_group()
        replace_shared_state(before)
