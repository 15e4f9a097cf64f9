"""Workers that persist: they are told the epoch, and started anew after a resume without drawing random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

_READING = ("__iter__", "__getitem__", "__getitems__")


class EpochFollower:
    """A `worker_init_fn` that keeps the copy of the dataset in a worker in the epoch of the loader.

    A worker that persists has copied the dataset once; what `set_epoch` changes in the loader's process does not reach
    it. The number of the epoch is in shared memory, and read before samples are.

    Args:
        function: The user's `worker_init_fn`, called first.

    Attributes:
        epoch: The shared number.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function: Callable[[int], None] | None = function
        if isinstance(function, EpochFollower):
            self.function = function.function
        self.epoch: torch.Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, worker: int) -> None:
        """Start following, in a worker.

        Args:
            worker: Its number.
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
                f"A {type(dataset).__name__} in workers that persist stays in the epoch they were started in: {error}. "
                "Use persistent_workers=False.",
                stacklevel=1,
            )


def _following(cls: type, epoch: torch.Tensor) -> type:
    """Make a class whose objects go to the shared epoch before they are read."""

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
    """Let workers of a loader that persist follow its epoch, where its dataset has one.

    Args:
        dataloader: A loader whose workers have not been started.
    """
    if dataloader.persistent_workers and hasattr(dataloader.dataset, "set_epoch"):
        vars(dataloader)["worker_init_fn"] = EpochFollower(dataloader.worker_init_fn)


def tell_epoch(dataloader: DataLoader[Any], epoch: int) -> None:
    """Tell the workers of a loader the epoch of the next pass; no worker reads between two passes.

    Args:
        dataloader: The loader.
        epoch: Number of the epoch.
    """
    if isinstance(dataloader.worker_init_fn, EpochFollower):
        dataloader.worker_init_fn.epoch.fill_(epoch)


@contextmanager
def seeding_apart(dataloader: DataLoader[Any]) -> Iterator[None]:
    """Let the seed of the workers be drawn from numbers that nothing else uses.

    torch draws it from the loader's generator, or from the global one; training and samplers then go on with other
    numbers than before.

    Args:
        dataloader: The loader that starts its workers inside the block.
    """
    own = dataloader.generator
    apart = torch.Generator()
    apart.set_state(torch.get_rng_state() if own is None else own.get_state())
    vars(dataloader)["generator"] = apart
    try:
        yield
    finally:
        vars(dataloader)["generator"] = own
