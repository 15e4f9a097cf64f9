"""Samplers and streams that shuffle, divide and skip: they determine which rank reads which samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from types import GeneratorType
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from notebook_accelerate.collectives import broadcast_object_list


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends only on its seed and epoch.

    The order of epoch `e` is drawn from a generator seeded with ``initial_seed + e``, on every rank and after every
    restart. When an iteration ends, the sampler moves on to the next epoch.

    Args:
        *args: Arguments of torch's RandomSampler.
        **kwargs: Arguments of torch's RandomSampler, and `data_seed` (int or None): the seed of epoch 0, which is
            torch's initial seed by default.

    Attributes:
        initial_seed: The seed of epoch 0.
        is_seed_shared: Whether `initial_seed` is known to be the same on all ranks. Without `data_seed`, it may differ
            after ``set_seed(seed, device_specific=True)``. If so, the first pass of a prepared loader uses rank 0's
            seed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else data_seed
        self.is_seed_shared = data_seed is not None
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def share_seed(self) -> None:
        """Use rank 0's seed unless `data_seed` was given; every rank must call this. Later calls do nothing."""
        if not self.is_seed_shared:
            (self.initial_seed,) = broadcast_object_list([self.initial_seed])
            self.is_seed_shared = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Args:
            epoch: The number of the epoch, counted from 0.
        """
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """One rank's share of a batch sampler's batches.

    Without `split_batches`, rank `r` gets the batches `r`, `r + num_processes`, and so on. With `split_batches`, each
    batch is cut into `num_processes` equal parts. Batches are never changed in place.

    Args:
        batch_sampler: The batch sampler to divide. Its `batch_size` (by default None) and `drop_last` (by default
            False) determine how the last batches are divided.
        num_processes: The number of ranks that share the batches.
        process_index: The index of this rank.
        split_batches: Whether to split each batch, instead of giving each rank whole batches.
        even_batches: Whether to pad the last batches with indices from the start of the epoch if there are not enough
            for all ranks, so that all ranks get the same number of equally large batches. If False, some ranks get a
            smaller batch, or one batch less.

    Attributes:
        last_round: After an iteration, the number of indices in its last round (one batch of each rank) that are not
            padding, or 0 if nothing was padded. None before an iteration, and if items are not lists of indices.

    Raises:
        ValueError: With `split_batches`, the batch size is not a multiple of the number of processes.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        batch_size = getattr(batch_sampler, "batch_size", None)
        if split_batches:
            check_divisible(batch_size, num_processes)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = batch_size  # If None, batches can have any size.
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.last_round: int | None = None

    @property
    def total_length(self) -> int:
        """The number of batches in the divided batch sampler, for all ranks together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length - int(self._gets_nothing_of_last_batch())
        rounds, left = divmod(self.total_length, self.num_processes)
        if left == 0 or self.drop_last:
            return rounds
        return rounds + int(self.even_batches or self.process_index < left)

    def _gets_nothing_of_last_batch(self) -> bool:
        """Return whether lower ranks use up a short last batch, or False if the size of the batch is unknown."""
        source: Any = innermost(self.batch_sampler)
        if self._pads or self.drop_last or not isinstance(source, BatchSampler) or not self.total_length:
            return False
        left = len(source.sampler) % self.batch_size if isinstance(source.sampler, Sized) else 0
        return bool(0 < left <= self.process_index * (self.batch_size // self.num_processes))

    def __iter__(self) -> Iterator[list[int]]:
        return self.iterate_from(0)

    def iterate_from(self, skipped: int) -> Iterator[list[int]]:
        """Iterate over this rank's share, skipping the first batches.

        Args:
            skipped: The number of this rank's batches to skip.

        Returns:
            An iterator over the remaining batches, with the same padding as without skipping.
        """
        return self._split_batches(skipped) if self.split_batches else self._whole_batches(skipped)

    def _whole_batches(self, skipped: int) -> Iterator[list[int]]:
        """Yield this rank's batch from each round."""
        self.last_round = None
        count, rank = self.num_processes, self.process_index
        opening, batches = open_from(self.batch_sampler, skipped * count, count if self._pads else 0)
        current = list(itertools.islice(batches, count))
        while current:
            full = len(current) == count and (self.batch_size is None or len(current[-1]) >= self.batch_size)
            # Some samplers draw random numbers when they end, so a pass that is left early must not have read that far.
            following = [] if full else list(itertools.islice(batches, count))
            if following or full:
                self.last_round = 0
                yield current[rank]
            elif not self.drop_last:
                self.last_round = sum(len(batch) for batch in current) if isinstance(current[0], Sized) else None
                yield from self._last_round(current, opening)
            current = list(itertools.islice(batches, count)) if full else following

    def _last_round(self, batches: list[list[int]], opening: list[list[int]]) -> Iterator[list[int]]:
        """Yield this rank's part of the last batches if there are not enough of them for all ranks."""
        rank = self.process_index
        if not self._pads:
            yield from batches[rank : rank + 1]
        elif self.batch_size is None:
            yield [*batches, *itertools.islice(itertools.cycle(opening), self.num_processes)][rank]
        else:
            every = batches + [[]] * (self.num_processes - len(batches))
            missing = [max(self.batch_size - len(batch), 0) for batch in every]
            yield [*every[rank], *_cycle(opening, sum(missing[:rank]), missing[rank])]

    def _split_batches(self, skipped: int) -> Iterator[list[int]]:
        """Yield this rank's part of each batch."""
        self.last_round = None
        opening, batches = open_from(self.batch_sampler, skipped, 1 if self._pads else 0)
        for batch in batches:
            if len(batch) < self.batch_size and self.drop_last:
                continue
            part = max(self.batch_size, len(batch) + -len(batch) % self.num_processes) // self.num_processes
            self.last_round = len(batch) if len(batch) < part * self.num_processes else 0
            first = part * self.process_index
            share = batch[first : first + part]
            if self._pads and len(share) < part:
                share = [*share, *_cycle(opening, max(first - len(batch), 0), part - len(share))]
            if share:
                yield share

    @property
    def _pads(self) -> bool:
        return self.even_batches and not self.drop_last


def _cycle(batches: list[list[int]], start: int, count: int) -> list[int]:
    """Return `count` indices from batches that are repeated endlessly, starting at position `start`."""
    indices = list(itertools.chain.from_iterable(batches))
    return [indices[position % len(indices)] for position in range(start, start + count)]


class SkipBatchSampler(BatchSampler):
    """A batch sampler that skips the first batches of another batch sampler, and otherwise has its attributes.

    Args:
        batch_sampler: The batch sampler whose first batches are skipped.
        skip_batches: The number of batches to skip.
    """

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # The attribute is not set yet while the object is unpickled.
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def total_length(self) -> int:
        """The number of batches, including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(self.total_length - self.skip_batches, 0)

    def __iter__(self) -> Iterator[list[int]]:
        return self.iterate_from(0)

    def iterate_from(self, skipped: int) -> Iterator[list[int]]:
        """Iterate over the batches without the skipped ones.

        Args:
            skipped: The number of batches to skip in addition to `skip_batches`.

        Returns:
            An iterator over the remaining batches.
        """
        return iterate_from(self.batch_sampler, self.skip_batches + skipped)


def innermost(batch_sampler: Any) -> Any:
    """Return the batch sampler inside all BatchSamplerShards and SkipBatchSamplers.

    Args:
        batch_sampler: A batch sampler, which may be inside BatchSamplerShard and SkipBatchSampler.

    Returns:
        The batch sampler that reads a sampler.
    """
    while isinstance(batch_sampler, BatchSamplerShard | SkipBatchSampler):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler


def index_source(dataloader: DataLoader[Any]) -> Any:
    """Return the source of a loader's indices.

    Args:
        dataloader: A loader, prepared or not.

    Returns:
        The loader's batch sampler, or its sampler if `batch_size` is None.
    """
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler that orders a loader's indices.

    Args:
        dataloader: A loader, prepared or not.

    Returns:
        The sampler, or None for a custom batch sampler that does not have one.
    """
    source = innermost(index_source(dataloader))
    return getattr(source, "sampler", source if dataloader.batch_sampler is None else None)


# ---- iterable datasets


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's share of an iterable dataset.

    All ranks iterate over the complete dataset in windows of one global batch, and each rank yields its own part of a
    window. The last window is padded from the first one, so that all ranks yield the same number of samples.

    Args:
        dataset: The dataset to divide. It must yield the same samples in the same order on every rank.
        batch_size: The number of samples per batch of one rank or, with `split_batches`, of all ranks together.
        drop_last: Whether to drop a last window that is not full.
        num_processes: The number of ranks that share the dataset.
        process_index: The index of this rank.
        split_batches: Whether `batch_size` is the number of samples of all ranks together.

    Attributes:
        last_round: After an iteration, the number of samples in its last window that are not padding, or 0 if the
            window was full. None before an iteration, and in a process that has started workers, unless
            `share_last_round` was called.

    Raises:
        ValueError: With `split_batches`, the batch size is not a multiple of the number of processes.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_divisible(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self._last_round: int | torch.Tensor = -1

    @property
    def last_round(self) -> int | None:
        """The number of samples in the last window (see the class)."""
        samples = int(self._last_round)
        return None if samples < 0 else samples

    def share_last_round(self) -> None:
        """Share `last_round` between the worker and its parent process. Only one worker is supported."""
        # Workers that are not forked would share a tensor even if this method is not called.
        if not isinstance(self._last_round, torch.Tensor):
            shared = torch.full((), -1, dtype=torch.int64, device="cpu")
            self._last_round = shared.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def window(self) -> int:
        """The number of samples in a window, for all ranks together."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset, if it has `set_epoch`.

        Args:
            epoch: The number of the epoch, counted from 0.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        length = len(self.dataset)  # type: ignore[arg-type]
        windows = length // self.window if self.drop_last else math.ceil(length / self.window)
        return windows * (self.window // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        self._set_last_round(-1)
        window, part = self.window, self.window // self.num_processes
        first = part * self.process_index
        samples = iter(self.dataset)
        opening = current = list(itertools.islice(samples, window))
        while len(current) == window:
            yield from current[first : first + part]
            current = list(itertools.islice(samples, window))
        self._set_last_round(len(current))
        if current and not self.drop_last:
            padded = itertools.islice(itertools.chain(current, itertools.cycle(opening)), first, first + part)
            yield from padded

    def _set_last_round(self, samples: int) -> None:
        if isinstance(self._last_round, torch.Tensor):
            self._last_round.fill_(samples)
        else:
            self._last_round = samples


def check_divisible(batch_size: int | None, num_processes: int) -> None:
    """Check that `split_batches` can split batches into equal parts.

    Args:
        batch_size: The number of samples per batch, or None if it is unknown.
        num_processes: The number of ranks that share a batch.

    Raises:
        ValueError: The batch size is unknown, or not a multiple of the number of ranks.
    """
    if batch_size is None or batch_size % num_processes:
        raise ValueError(
            f"split_batches=True splits every batch into num_processes={num_processes} equal parts, but the batch size "
            f"is {batch_size}; use a multiple of {num_processes}, or pass DataLoaderConfiguration(split_batches=False)"
        )


# ---- skipping the first items of an index stream in constant time


Item = TypeVar("Item")

_END: Any = object()
_JUMPING: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


def iterate_from(batches: Any, skipped: int) -> Iterator[Any]:
    """Iterate over a batch sampler, or any iterable, without its first batches.

    A batch sampler with an `iterate_from` method skips batches itself. For torch's own BatchSampler, the indices of the
    sampler are skipped instead of batches.

    Args:
        batches: A batch sampler, a sampler, or any other iterable.
        skipped: The number of batches to skip, 0 or more.

    Returns:
        An iterator over the remaining batches.
    """
    if hasattr(batches, "iterate_from"):
        own: Iterator[Any] = batches.iterate_from(skipped)
        return own
    if skipped and type(batches) is BatchSampler:
        moved = advance(iter(batches.sampler), skipped * batches.batch_size)
        return iter(BatchSampler(moved, batches.batch_size, batches.drop_last))
    return advance(iter(batches), skipped)


def open_from(batches: Iterable[Any], skipped: int, kept: int) -> tuple[list[Any], Iterator[Any]]:
    """Read the first batches of an epoch, then iterate from a later batch of the same epoch.

    The sampler is iterated only once, because a second iteration would draw another permutation.

    Args:
        batches: A batch sampler, or any iterable of batches.
        skipped: The number of batches that the iterator skips, 0 or more.
        kept: The maximum number of the epoch's first batches to return in the list.

    Returns:
        A list of the epoch's first `kept` batches, and an iterator over the batches after the first `skipped` ones.
    """
    if not kept:
        return [], iterate_from(batches, skipped)
    if type(batches) is BatchSampler:
        size, drop_last = batches.batch_size, batches.drop_last
        indices = iter(batches.sampler)
        opening = list(BatchSampler(itertools.islice(indices, kept * size), size, drop_last))
        rest = iter(BatchSampler(advance(indices, max(skipped - kept, 0) * size), size, drop_last))
    else:
        rest = iter(batches)
        opening = list(itertools.islice(rest, kept))
        rest = advance(rest, max(skipped - kept, 0))
    return opening, itertools.chain(opening[skipped:], rest)


def advance(iterator: Iterator[Item], count: int) -> Iterator[Item]:
    """Move an iterator forward by a number of items.

    An iterator over a list, tuple or range jumps to the new position. A generator that delegates to one of these
    iterators, as torch's RandomSampler does with ``yield from torch.randperm(n).tolist()``, jumps inside it. All other
    iterators are read item by item.

    Args:
        iterator: The iterator to move, which may have been started.
        count: The number of items to skip, 0 or more.

    Returns:
        The same iterator, moved by `count` items or to its end.
    """
    count -= _jump(iterator, count)
    if count and isinstance(iterator, GeneratorType) and next(iterator, _END) is not _END:
        inner = iterator.gi_yieldfrom
        while isinstance(inner, GeneratorType):
            inner = inner.gi_yieldfrom
        count -= 1 + _jump(inner, count - 1)
    next(itertools.islice(iterator, count, count), None)
    return iterator


def _jump(iterator: Any, count: int) -> int:
    """Move an iterator over a stored sequence forward by at most `count` items, and return the number of items."""
    if type(iterator) not in _JUMPING:
        return 0
    stride: int = min(count, iterator.__length_hint__())
    if stride > 0:
        # __setstate__ counts from the start of the sequence. Since Python 3.12, it counts from the current position for
        # ranges.
        _, _, *position = iterator.__reduce__()
        iterator.__setstate__((position[0] if position and position[0] is not None else 0) + stride)
    return stride
