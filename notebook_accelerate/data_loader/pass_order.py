"""What the order of a pass was drawn from, so that an interrupted pass can be read in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from notebook_accelerate.data_loader.samplers import SeedableRandomSampler, get_sampler, innermost


class PassOrder:
    """The random numbers behind the order of the pass that a loader reads. A loader and those that skip share it.

    Attributes:
        drawn_from: State of the random numbers before the pass drew its order; None between passes.
        resumed: The same of an interrupted pass, which the next pass repeats; None for a new order.
    """

    def __init__(self) -> None:
        self.drawn_from: torch.Tensor | None = None
        self.resumed: torch.Tensor | None = None


def draws_order(dataloader: DataLoader[Any]) -> bool:
    """Tell whether the order of a loader hangs on random numbers that nothing else remembers.

    Args:
        dataloader: A loader.

    Returns:
        False for datasets without indices, and for orders that are fixed or follow from a seed and an epoch.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return False
    sampler = get_sampler(dataloader)
    return not isinstance(sampler, SequentialSampler | SeedableRandomSampler) and hasattr(sampler, "generator")


class RememberedSource:
    """The source of indices of a loader, which notes what an order is drawn from.

    It keeps no reference to the loader: workers that persist end as soon as nobody has the loader any more.

    Args:
        source: A batch sampler or sampler.
        order: Where it is noted.
    """

    def __init__(self, source: Any, order: PassOrder) -> None:
        self.source = source
        self.order = order

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        # A generator: torch makes this iterator, draws the seed of its workers, and then asks for the first item.
        yield from self._items()

    def _items(self) -> Iterator[Any]:
        source = self.source
        bottom = innermost(source)
        generator = getattr(bottom, "sampler", bottom).generator
        resumed, self.order.resumed = self.order.resumed, None
        if resumed is None:
            self.order.drawn_from = torch.get_rng_state() if generator is None else generator.get_state()
            return iter(source)
        self.order.drawn_from = resumed
        if generator is not None:
            generator.set_state(resumed)
            return iter(source)
        current = torch.get_rng_state()
        torch.set_rng_state(resumed)
        items = iter(source)
        first = list(itertools.islice(items, 1))
        torch.set_rng_state(current)
        return itertools.chain(first, items)
