"""Persistent workers: they follow the loader's epoch, and restart after a resume without drawing random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

_READING = ("__iter__", "__getitem__", "__getitems__")


class EpochFollower:
    """A `worker_init_fn` that keeps a worker's copy of the dataset in the loader's epoch.

    A persistent worker copies the dataset once, so a later `set_epoch` in the loader's process does not change the
    copy. The epoch is in shared memory, and the worker reads it before it reads samples.

    Args:
        function: The user's `worker_init_fn`, called first.

    Attributes:
        epoch: The epoch, in shared memory.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function: Callable[[int], None] | None = function
        if isinstance(function, EpochFollower):
            self.function = function.function
        self.epoch: torch.Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, worker: int) -> None:
        """Make the worker's dataset follow the epoch.

        Args:
            worker: Number of the worker.
        """
        if self.function is not None:
            self.function(worker)
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        try:
            dataset.__class__ = _following(type(dataset), self.epoch)
        except TypeError as error:
            warnings.warn(
                f"A {type(dataset).__name__} in persistent workers stays in the epoch in which they started: {error}. "
                "Pass DataLoader(..., persistent_workers=False).",
                stacklevel=1,
            )


def _following(cls: type, epoch: torch.Tensor) -> type:
    """Return a subclass whose objects set the shared epoch before they are read."""

    def reading(name: str) -> Any:
        read = getattr(cls, name)

        def read_in_epoch(self: Any, *args: Any) -> Any:
            if (now := int(epoch)) != vars(self).get("_epoch_followed"):
                vars(self)["_epoch_followed"] = now
                self.set_epoch(now)
            return read(self, *args)

        return read_in_epoch

    return type(cls.__name__, (cls,), {name: reading(name) for name in _READING if hasattr(cls, name)})


def follow_epochs(dataloader: DataLoader[Any]) -> None:
    """Let a loader's persistent workers follow its epoch, if its dataset has `set_epoch`.

    Args:
        dataloader: A loader whose workers have not been started.
    """
    if dataloader.persistent_workers and hasattr(dataloader.dataset, "set_epoch"):
        vars(dataloader)["worker_init_fn"] = EpochFollower(dataloader.worker_init_fn)


def send_epoch(dataloader: DataLoader[Any], epoch: int) -> None:
    """Send the epoch of the next pass to a loader's workers; no worker reads between two passes.

    Args:
        dataloader: The loader.
        epoch: Number of the epoch.
    """
    if isinstance(dataloader.worker_init_fn, EpochFollower):
        dataloader.worker_init_fn.epoch.fill_(epoch)


@contextmanager
def separate_worker_seed(dataloader: DataLoader[Any], numbers: torch.Tensor | None = None) -> Iterator[None]:
    """Draw the seed of the workers from a separate generator.

    torch draws it from the loader's generator, or from the global one, which would change the random numbers of
    training and samplers.

    Args:
        dataloader: The loader that starts its workers inside the context.
        numbers: State of the separate generator; None: the generator that torch would use has it.
    """
    own = dataloader.generator
    separate = torch.Generator()
    if numbers is None:
        numbers = torch.get_rng_state() if own is None else own.get_state()
    separate.set_state(numbers)
    vars(dataloader)["generator"] = separate
    try:
        yield
    finally:
        vars(dataloader)["generator"] = own
