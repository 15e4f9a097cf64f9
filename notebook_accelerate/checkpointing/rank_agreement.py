"""Agreement among ranks: who sees which file system, and whether everybody got through."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from notebook_accelerate.collectives import gather_object
from notebook_accelerate.errors import CheckpointError, NotebookAccelerateError
from notebook_accelerate.state import PartialState

_PATIENCE = 60.0
_log = logging.getLogger(__name__)


def exchange(value: Any, what: str) -> list[Any]:
    """Return every rank's value, by rank; every rank must call this.

    Args:
        value: This rank's, picklable.
        what: The call the user made, for the message when other ranks do not come.
    """
    if PartialState().num_processes == 1:
        return [value]
    with _say_when_alone(what):
        return list(gather_object([value]))


@contextmanager
def _say_when_alone(what: str) -> Iterator[None]:
    """Say after a minute which call this rank is stuck in: a guard around it on one rank is a common mistake."""
    text = (
        f"Rank {PartialState().process_index} has waited {_PATIENCE:.0f} s in {what} for the other ranks. Every rank "
        f"must call {what}: take it out of `if accelerator.is_main_process:`."
    )
    timer = threading.Timer(_PATIENCE, _log.warning, args=(text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_own: dict[str, Any] = {}


def own_group() -> Any:
    """Return a process group that a thread may use while training uses the others; every rank must call this.

    It is made once, on the CPU: what the ranks exchange while they write are plans and results.

    Returns:
        The group; None in a world of one process.
    """
    if not dist.is_initialized():
        return None
    if _own.get("world") is not dist.group.WORLD:
        _own.update(world=dist.group.WORLD, group=dist.new_group(backend="gloo"))
    return _own["group"]


def forget_own_group() -> None:
    """Let go of the group, before all groups are ended."""
    _own.clear()


def failures_in(group: Any, failure: str) -> dict[int, str]:
    """Return what failed, by rank; every rank's thread must call this.

    Args:
        group: The process group of the threads.
        failure: What happened on this rank; "" where nothing did.
    """
    found: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(found, failure, group=group)
    return {rank: text for rank, text in enumerate(found) if text}


def agree(error: BaseException | None, what: str) -> None:
    """Raise on every rank when one failed; every rank must call this.

    Args:
        error: What happened on this rank.
        what: The call the user made.

    Raises:
        CheckpointError: This rank's error, or a copy of the first failed rank's.
    """
    found = exchange(None if error is None else (type(error), str(error)), what)
    if error is not None:
        raise error
    for rank, failure in enumerate(found):
        if failure is not None:
            kind, text = failure
            kind = kind if issubclass(kind, NotebookAccelerateError) else CheckpointError
            raise kind(f"Rank {rank}: {text}")
