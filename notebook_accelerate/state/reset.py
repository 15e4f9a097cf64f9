"""Forgetting everything: what a fresh or inline worker starts from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from notebook_accelerate.state import process_group
from notebook_accelerate.state.accelerator_state import AcceleratorState
from notebook_accelerate.state.gradient_state import GradientState
from notebook_accelerate.state.partial_state import PartialState
from notebook_accelerate.state.shared_dict import SharedDict, Slots
from notebook_accelerate.state.warn_once import forget_notices


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


def replace_shared_state(with_: tuple[Slots, Slots, Slots] | None = None) -> tuple[Slots, Slots, Slots]:
    """Give the state classes other dictionaries and return the ones they had; objects made before keep theirs.

    Args:
        with_: Dictionaries of `PartialState`, `AcceleratorState` and `GradientState`; None means fresh ones.
    """
    before = PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state
    after = with_ or (SharedDict(), SharedDict(), SharedDict())
    PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state = after
    return before


def start_afresh() -> None:
    """Drop the state of an inline run that was the first to use this room: what it has left is the run's own."""
    process_group.end_group_of_one()
    replace_shared_state()


@contextmanager
def isolated_shared_state() -> Iterator[None]:
    """Put this process's state aside, for a run that has its own, and bring it back afterwards."""
    had_group = process_group.group_exists()
    before = replace_shared_state()
    try:
        yield
    finally:
        if not had_group:
            process_group.end_group()
        replace_shared_state(before)
