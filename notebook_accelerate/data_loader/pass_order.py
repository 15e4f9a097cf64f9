"""Record the random numbers behind the order of a pass, so that an interrupted pass resumes in the same order."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from notebook_accelerate.data_loader.samplers import (
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
    index_source,
    innermost,
)
from notebook_accelerate.state import PartialState
from notebook_accelerate.state.warn_once import warn_once

_KNOWN = ("torch.utils.data.", "torchdata.", f"{__package__}.", "builtins")
"""The modules whose samplers draw random numbers only from torch, or from their attribute `generator`."""


class PassOrder:
    """The random numbers behind the order of a loader's current pass. Copies of the loader share this object.

    Attributes:
        numbers: The random numbers before the pass drew its order (see `read_numbers`), or None between passes.
        last_read: The number of the last item that was read, and the item itself, if the user's class determines the
            order.
        resumed: The state of an interrupted pass whose order the next pass repeats, or None for a new order.
        exhausted: Whether the current pass has yielded its last batch.
        completed_epoch: The epoch of a resumed pass that had already yielded its last batch, or None. The loader's
            next pass belongs to the next epoch, and only a copy that skips all batches repeats the completed one.
    """

    def __init__(self) -> None:
        self.numbers: Any = None
        self.last_read: tuple[int, Any] | None = None
        self.resumed: Any = None
        self.exhausted = False
        self.completed_epoch: int | None = None

    def state(self) -> Any:
        """Return plain data for `resumed`: the random numbers, and an item that shows whether the order is the same."""
        return with_last_read(self.numbers, self.last_read)


def is_own_order(source: Any) -> bool:
    """Return whether the user's class determines the order, and may therefore use any random number generator.

    Args:
        source: A batch sampler or sampler, which may be inside BatchSamplerShard and SkipBatchSampler.
    """
    bottom = innermost(source)
    parts = (bottom, getattr(bottom, "sampler", bottom))
    return not all(f"{type(part).__module__}.".startswith(_KNOWN) for part in parts)


def draws_order(dataloader: DataLoader[Any]) -> bool:
    """Return whether a loader's order may depend on random numbers that are not recorded elsewhere.

    Args:
        dataloader: A loader, prepared or not.

    Returns:
        False for iterable datasets, and for torch's samplers whose order is fixed or depends only on a seed and an
        epoch. Otherwise True.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return False
    sampler = get_sampler(dataloader)
    is_fixed = isinstance(sampler, SequentialSampler | SeedableRandomSampler) or not hasattr(sampler, "generator")
    return not is_fixed or is_own_order(index_source(dataloader))


def draw_order(dataloader: DataLoader[Any]) -> None:
    """Draw the global random numbers that a pass would draw for its order, without reading any data.

    Args:
        dataloader: A loader, prepared or not.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return
    sampler = get_sampler(dataloader)
    is_drawn = not isinstance(sampler, SequentialSampler | SeedableRandomSampler) and (
        getattr(sampler, "generator", None) is None
    )
    if isinstance(sampler, RandomSampler) and is_drawn and not is_own_order(index_source(dataloader)):
        torch.empty((), dtype=torch.int64).random_()  # The sampler draws a seed, and the order depends on it.
    elif is_drawn or is_own_order(index_source(dataloader)):
        next(iter(index_source(dataloader)), None)


# ---- random numbers


def read_numbers(source: Any) -> Any:
    """Return the states of the random number generators that an order is drawn from.

    Args:
        source: The loader's source of indices.

    Returns:
        The state of the sampler's generator, or of torch's if the sampler has none. If the user's class determines the
        order, a dict of all random states that the class may draw from.
    """
    generator = _generator(source)
    if not is_own_order(source):
        return torch.get_rng_state() if generator is None else generator.get_state()
    own = {} if generator is None else {"generator": generator.get_state()}
    return {**own, **_global_numbers()}


@contextmanager
def drawing_again(source: Any, numbers: Any) -> Iterator[None]:
    """Draw an order from earlier random numbers inside the block, and then restore the global ones.

    Args:
        source: The source of indices. If its sampler has a generator, the generator continues with the earlier numbers.
        numbers: The result of `read_numbers`.
    """
    generator = _generator(source)
    if not isinstance(numbers, dict):
        numbers = {"torch" if generator is None else "generator": numbers}
    if generator is not None and "generator" in numbers:
        generator.set_state(numbers["generator"])
    with unchanged_numbers():
        _set_global_numbers(numbers)
        yield


@contextmanager
def unchanged_numbers() -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy after the block."""
    numbers = _global_numbers()
    try:
        yield
    finally:
        _set_global_numbers(numbers)


def _global_numbers() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - np.random.shuffle draws from this state
    }


def _are_equal(numbers: dict[str, Any], others: dict[str, Any]) -> bool:
    (_, words, *rest), (_, other_words, *other_rest) = numbers["numpy"], others["numpy"]
    return (
        all(torch.equal(numbers[name], others[name]) for name in numbers if isinstance(numbers[name], torch.Tensor))
        and (numbers["python"], rest) == (others["python"], other_rest)
        and np.array_equal(words, other_words)
    )


def _set_global_numbers(numbers: dict[str, Any]) -> None:
    if "torch" in numbers:
        torch.set_rng_state(numbers["torch"])
    if "python" in numbers:
        random.setstate(numbers["python"])
        np.random.set_state(numbers["numpy"])  # noqa: NPY002


def _generator(source: Any) -> torch.Generator | None:
    """Return the generator of the sampler that orders the indices, or None if the sampler has no generator.

    The generator of a seedable sampler is not returned, because the sampler seeds it in each epoch.
    """
    bottom = innermost(source)
    sampler = getattr(bottom, "sampler", bottom)
    generator = None if isinstance(sampler, SeedableRandomSampler) else getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


# ---- whether the order is the same


def with_last_read(numbers: Any, last_read: tuple[int, Any] | None) -> Any:
    """Add a checksum of the last item that this rank has read to the random numbers of an order.

    Args:
        numbers: The result of `read_numbers`.
        last_read: The number of the item in the pass, and the item.
    """
    if last_read is None or not isinstance(numbers, dict):
        return numbers
    number, item = last_read
    return {**numbers, "last_read": (_place(), number, _short(item))}


def expected_item(numbers: Any) -> int | None:
    """Return the number of the item that verifies a resumed order, or None if this rank cannot check it.

    Only the rank that saved the order can check it, and only with the same number of ranks, because each rank reads
    different items, which depend on the number of ranks.

    Args:
        numbers: The result of `with_last_read`.
    """
    if not isinstance(numbers, dict) or "last_read" not in numbers:
        return None
    place, number, _ = numbers["last_read"]
    return int(number) if place == _place() else None


def check_order(source: Any, numbers: Any, item: Any) -> None:
    """Warn once if a resumed pass does not have the order of the interrupted pass.

    Args:
        source: The loader's source of indices.
        numbers: The result of `with_last_read`.
        item: The item whose number `expected_item` has returned.
    """
    if _short(item) == numbers["last_read"][2]:
        return
    bottom = innermost(source)
    names = " or ".join(dict.fromkeys(type(part).__name__ for part in (bottom, getattr(bottom, "sampler", bottom))))
    warn_once(
        f"The resumed pass has a different order than the interrupted one, so some samples are read twice and others "
        f"never: {names} draws its order from numbers that a checkpoint does not contain, or between batches. Draw the "
        "whole order at the start of __iter__, from torch's, Python's or NumPy's global random numbers, or from a "
        "torch.Generator in the sampler's attribute `generator`; or seed it with the epoch: def set_epoch(self, epoch)."
    )


def _place() -> tuple[int, int]:
    """Return the index of this rank, and the number of ranks."""
    return PartialState().process_index, PartialState().num_processes


def _short(item: Any) -> int:
    return zlib.crc32(repr(item).encode())


class RecordedSource:
    """A loader's source of indices that records the random numbers that each order is drawn from.

    It has no reference to the loader, because persistent workers must exit when the last reference to the loader is
    dropped.

    Args:
        source: A batch sampler or sampler.
        order: The object that stores the random numbers.

    Attributes:
        draws_late: Whether an order is drawn when its first item is read, not when torch creates the iterator.
    """

    def __init__(self, source: Any, order: PassOrder) -> None:
        self.source = source
        self.order = order
        self.draws_late = not is_own_order(source)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        if self.draws_late or self.order.resumed is not None:
            return self._recorded()
        # Draw at the same time as without this class: an __iter__ that is not a generator function may draw when torch
        # creates the iterator.
        self.order.numbers = read_numbers(self.source)
        items = iter(self.source)
        return self._watched(items, drawn=not _are_equal(self.order.numbers, read_numbers(self.source)))

    def _recorded(self) -> Iterator[Any]:
        # This must be a generator: torch creates the iterator, draws the seed of its workers, and only then reads the
        # first item, which draws the order.
        resumed, self.order.resumed = self.order.resumed, None
        items = self._items(resumed)
        yield from items if self.draws_late else self._watched(items, resumed)

    def _items(self, resumed: Any) -> Iterator[Any]:
        if resumed is None:
            self.order.numbers = read_numbers(self.source)
            return iter(self.source)
        self.order.numbers = resumed
        with drawing_again(self.source, resumed):
            items = iter(self.source)
            first = list(itertools.islice(items, 1))
        return itertools.chain(first, items)

    def _watched(self, items: Iterator[Any], resumed: Any = None, drawn: bool = True) -> Iterator[Any]:
        """Remember the last item that was read, and check the item that the interrupted pass read last."""
        if not drawn:
            self.order.numbers = read_numbers(self.source)
        expected = expected_item(resumed)
        for number, item in enumerate(items, _skipped(self.source)):
            self.order.last_read = number, item
            if number == expected:
                check_order(self.source, resumed, item)
            yield item


def _skipped(source: Any) -> int:
    """Return how many items a source skips."""
    skipped = 0
    while isinstance(source, SkipBatchSampler):
        skipped, source = skipped + source.skip_batches, source.batch_sampler
    return skipped
