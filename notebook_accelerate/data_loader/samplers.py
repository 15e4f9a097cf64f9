"""Samplers that shuffle, divide and skip: they decide which rank gets which index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from notebook_accelerate.collectives import broadcast_object_list
from notebook_accelerate.data_loader.iterable_shard import check_divisible
from notebook_accelerate.data_loader.stream_skipping import iterate_from, open_from


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends only on its seed and epoch.

    The order of epoch `e` is drawn from a generator seeded with ``initial_seed + e``, on every rank and after every
    restart. The end of an iteration moves the sampler to the next epoch.

    Args:
        *args: Arguments of torch's RandomSampler.
        **kwargs: Arguments of torch's RandomSampler, and `data_seed` (int or None): the seed of epoch 0; torch's
            initial seed by default.

    Attributes:
        initial_seed: The seed of epoch 0.
        is_seed_shared: Whether `initial_seed` is known to be the same on all ranks. Without `data_seed` it may differ,
            after ``set_seed(seed, device_specific=True)``: the first pass of a prepared loader takes rank 0's seed.
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
        """Use rank 0's seed, unless `data_seed` was given. Every rank must call this; later calls do nothing."""
        if not self.is_seed_shared:
            (self.initial_seed,) = broadcast_object_list([self.initial_seed])
            self.is_seed_shared = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """One rank's share of the batches of a batch sampler.

    Without `split_batches` rank `r` gets the batches `r`, `r + num_processes`, …; with it every batch is cut into
    `num_processes` equal parts. Batches are never changed in place.

    Args:
        batch_sampler: The batch sampler to divide. Its `batch_size` (default: None) and `drop_last` (default: False)
            decide how the last batches are divided.
        num_processes: Number of ranks that share the batches.
        process_index: This rank.
        split_batches: Split every batch, instead of giving each rank complete batches.
        even_batches: If the last batches do not suffice for all ranks, pad them with indices from the start of the
            epoch, so that all ranks get the same number of equally large batches. Otherwise some ranks get a smaller
            batch, or one batch less.

    Attributes:
        last_round: After an iteration, the indices of its last round (one batch of every rank) without padding; 0 if
            nothing was padded. None before, and if items are not lists of indices.

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
        self.batch_size: Any = batch_size  # None: batches of any size
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.last_round: int | None = None

    @property
    def total_length(self) -> int:
        """Number of batches of the divided batch sampler, for all ranks together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length - int(self._gets_nothing_of_last_batch())
        rounds, left = divmod(self.total_length, self.num_processes)
        if left == 0 or self.drop_last:
            return rounds
        return rounds + int(self.even_batches or self.process_index < left)

    def _gets_nothing_of_last_batch(self) -> bool:
        """Return whether a short last batch is used up by lower ranks; False if samplers do not show its size."""
        source: Any = innermost(self.batch_sampler)
        if self._pads or self.drop_last or not isinstance(source, BatchSampler) or not self.total_length:
            return False
        left = len(source.sampler) % self.batch_size if isinstance(source.sampler, Sized) else 0
        return bool(0 < left <= self.process_index * (self.batch_size // self.num_processes))

    def __iter__(self) -> Iterator[list[int]]:
        return self.iterate_from(0)

    def iterate_from(self, skipped: int) -> Iterator[list[int]]:
        """Iterate over this rank's share without its first batches.

        Args:
            skipped: Number of this rank's batches to skip.

        Returns:
            An iterator over the rest; its padding is the same as without skipping.
        """
        return self._split_batches(skipped) if self.split_batches else self._whole_batches(skipped)

    def _whole_batches(self, skipped: int) -> Iterator[list[int]]:
        """Yield this rank's batch of every round."""
        self.last_round = None
        count, rank = self.num_processes, self.process_index
        opening, batches = open_from(self.batch_sampler, skipped * count, count if self._pads else 0)
        current = list(itertools.islice(batches, count))
        while current:
            full = len(current) == count and (self.batch_size is None or len(current[-1]) >= self.batch_size)
            # A sampler draws random numbers at its end: a pass that is left early must not have read to there.
            following = [] if full else list(itertools.islice(batches, count))
            if following or full:
                self.last_round = 0
                yield current[rank]
            elif not self.drop_last:
                self.last_round = sum(len(batch) for batch in current) if isinstance(current[0], Sized) else None
                yield from self._last_round(current, opening)
            current = list(itertools.islice(batches, count)) if full else following

    def _last_round(self, batches: list[list[int]], opening: list[list[int]]) -> Iterator[list[int]]:
        """Yield this rank's part of the last batches, which do not suffice for every rank."""
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
        """Yield this rank's part of every batch."""
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
    """Return `count` indices of endlessly repeated batches, from position `start` on."""
    indices = list(itertools.chain.from_iterable(batches))
    return [indices[position % len(indices)] for position in range(start, start + count)]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches; other attributes are those of the inner batch sampler.

    Args:
        batch_sampler: The inner batch sampler.
        skip_batches: Number of batches to skip.
    """

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def total_length(self) -> int:
        """Number of batches, the skipped ones included."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(self.total_length - self.skip_batches, 0)

    def __iter__(self) -> Iterator[list[int]]:
        return self.iterate_from(0)

    def iterate_from(self, skipped: int) -> Iterator[list[int]]:
        """Iterate over the batches without the skipped ones.

        Args:
            skipped: Number of batches to skip in addition to `skip_batches`.

        Returns:
            An iterator over the rest.
        """
        return iterate_from(self.batch_sampler, self.skip_batches + skipped)


def innermost(batch_sampler: Any) -> Any:
    """Return the batch sampler below those that divide and skip.

    Args:
        batch_sampler: A batch sampler, or a stack of BatchSamplerShard and SkipBatchSampler over one.

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
        Its batch sampler, or its sampler with `batch_size=None`.
    """
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler that orders a loader's indices.

    Args:
        dataloader: A loader, prepared or not.

    Returns:
        The sampler; None for custom batch samplers without one.
    """
    source = innermost(index_source(dataloader))
    return getattr(source, "sampler", source if dataloader.batch_sampler is None else None)
