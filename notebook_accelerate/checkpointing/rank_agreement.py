"""Exchange values and errors between the ranks of a save or load, so that either all continue or all raise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from notebook_accelerate.collectives import gather_object
from notebook_accelerate.errors import CheckpointError, NotebookAccelerateError
from notebook_accelerate.state import PartialState

T = TypeVar("T")
_WARN_AFTER = 60.0
"""Seconds that a rank waits for the others before it logs a warning."""
_log = logging.getLogger(__name__)


def gather_values(value: T, call: str) -> list[T]:
    """Return every rank's value, by rank; every rank must call this.

    Args:
        value: This rank's value, which must be picklable.
        call: The name of the function that the user called, for the warning if other ranks do not arrive.
    """
    if PartialState().num_processes == 1:
        return [value]
    with _warning_when_stuck(call):
        return list(gather_object([value]))


@contextmanager
def _warning_when_stuck(call: str) -> Iterator[None]:
    """Log a warning that names the call, if this rank is still waiting in it after a minute.

    A common cause is a condition that lets only one rank call the function.
    """
    text = (
        f"Rank {PartialState().process_index} has waited {_WARN_AFTER:.0f} s in {call} for the other ranks. They may "
        f"be slow, or at a breakpoint. Every rank must call {call}: if only one does, take it out of "
        "`if accelerator.is_main_process:`."
    )
    timer = threading.Timer(_WARN_AFTER, _log.warning, args=(text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def raise_on_all_ranks(error: BaseException | None, call: str) -> None:
    """Raise on every rank if one rank has failed; every rank must call this.

    Args:
        error: This rank's error, or None.
        call: The name of the function that the user called, for messages.

    Raises:
        CheckpointError: This rank's error, or a copy of the error of the first rank that failed.
    """
    _gather_or_raise(error, None, call)


def gather_results(function: Callable[[], T], call: str, *kinds: type[Exception]) -> list[T]:
    """Call a function on every rank, and return the results by rank. If it fails on one rank, raise on every rank.

    Every rank must call this. Ranks wait for each other only once, because results and failures are sent together.

    Args:
        function: A function that returns this rank's result, which must be picklable.
        call: The name of the function that the user called, for messages.
        kinds: The exceptions that are sent to the other ranks.

    Raises:
        CheckpointError: This rank's exception, or a copy of the exception of the first rank that failed.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = function()
    except kinds as error:
        failure = error
    return _gather_or_raise(failure, result, call)


def _gather_or_raise(error: BaseException | None, value: T, call: str) -> list[T]:
    found = gather_values((None if error is None else (type(error), str(error)), value), call)
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(found):
        if failure is not None:
            kind, text = failure
            kind = kind if issubclass(kind, NotebookAccelerateError) else CheckpointError
            raise kind(f"Rank {rank}: {text}")
    return [value for _, value in found]


@contextmanager
def raising_on_all_ranks(call: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise on every rank if a block fails on one rank; every rank must enter the block.

    Args:
        call: The name of the function that the user called, for messages.
        kinds: The exceptions that are sent to the other ranks.

    Raises:
        CheckpointError: This rank's exception, or a copy of the exception of the first rank that failed.
    """
    failure: Exception | None = None
    try:
        yield
    except kinds as error:
        failure = error
    raise_on_all_ranks(failure, call)


_background: dict[str, Any] = {}


def background_group() -> Any:
    """Return a process group for the writing threads, separate from training's; every rank must call this.

    The group is created only once. It communicates through the CPU, because ranks only exchange plans and results while
    they write.

    Returns:
        The group, or None if there is only one process.
    """
    if not dist.is_initialized():
        return None
    if _background.get("world") is not dist.group.WORLD:
        _background.update(world=dist.group.WORLD, group=dist.new_group(backend="gloo"))
    return _background["group"]


def release_background_group() -> None:
    """Drop the reference to the background group, before all groups are destroyed."""
    _background.clear()


def gather_failures(group: Any, failure: str) -> dict[int, str]:
    """Return the failures of all ranks, by rank; the thread of every rank must call this.

    Args:
        group: The process group of the threads.
        failure: The message of this rank's failure, or "" for success.
    """
    found: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(found, failure, group=group)
    return {rank: text for rank, text in enumerate(found) if text}
