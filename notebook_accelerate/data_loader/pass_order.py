"""Records the random numbers behind the order of a pass, so that an interrupted pass resumes in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from notebook_accelerate.data_loader.samplers import SeedableRandomSampler, get_sampler, index_source, innermost


class PassOrder:
    """The random numbers behind the order of a loader's current pass; copies that skip batches share it.

    Attributes:
        rng_state: State of the random numbers before the pass drew its order; None between passes.
        resumed: That of an interrupted pass, whose order the next pass repeats; None: a new order.
        exhausted: Whether the current pass has yielded its last batch.
        completed_epoch: Epoch of a resumed pass that had yielded its last batch: only a copy that skips all of its
            batches repeats it. None: there is none.
    """

    def __init__(self) -> None:
        self.rng_state: torch.Tensor | None = None
        self.resumed: torch.Tensor | None = None
        self.exhausted = False
        self.completed_epoch: int | None = None


def draws_order(dataloader: DataLoader[Any]) -> bool:
    """Return whether a loader's order depends on random numbers that are not recorded elsewhere.

    Args:
        dataloader: A loader.

    Returns:
        False for iterable datasets, and for orders that are fixed or determined by a seed and an epoch.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return False
    sampler = get_sampler(dataloader)
    return not isinstance(sampler, SequentialSampler | SeedableRandomSampler) and hasattr(sampler, "generator")


def draw_order(dataloader: DataLoader[Any]) -> None:
    """Draw from torch's generator what the order of a pass draws from it, without reading the pass.

    Args:
        dataloader: A loader.
    """
    sampler = get_sampler(dataloader)
    fixed = isinstance(sampler, SequentialSampler | SeedableRandomSampler)
    if fixed or isinstance(dataloader.dataset, IterableDataset) or getattr(sampler, "generator", None) is not None:
        return
    if isinstance(sampler, RandomSampler):  # it draws a seed, and the order from that
        torch.empty((), dtype=torch.int64).random_()
    else:
        next(iter(index_source(dataloader)), None)


class RecordedSource:
    """A loader's source of indices, which records the random numbers that each order is drawn from.

    It keeps no reference to the loader: persistent workers end when the last reference to the loader goes.

    Args:
        source: A batch sampler or sampler.
        order: The record.
    """

    def __init__(self, source: Any, order: PassOrder) -> None:
        self.source = source
        self.order = order

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        # A generator: torch creates this iterator, draws the seed of its workers, and then reads the first item.
        yield from self._items()

    def _items(self) -> Iterator[Any]:
        source = self.source
        bottom = innermost(source)
        generator = getattr(bottom, "sampler", bottom).generator
        resumed, self.order.resumed = self.order.resumed, None
        if resumed is None:
            self.order.rng_state = torch.get_rng_state() if generator is None else generator.get_state()
            return iter(source)
        self.order.rng_state = resumed
        if generator is not None:
            generator.set_state(resumed)
            return iter(source)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(resumed)
            items = iter(source)
            first = list(itertools.islice(items, 1))
        return itertools.chain(first, items)
