"""One rank's share of an iterable dataset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset


def check_divisible(batch_size: int | None, num_processes: int) -> None:
    """Check that `split_batches` can split batches into equal parts.

    Args:
        batch_size: Samples per batch; None: unknown.
        num_processes: Number of ranks that share a batch.

    Raises:
        ValueError: The batch size is unknown, or not a multiple of the number of ranks.
    """
    if batch_size is None or batch_size % num_processes:
        raise ValueError(
            f"split_batches=True splits every batch into num_processes={num_processes} equal parts, but the batch size "
            f"is {batch_size}; use a multiple of {num_processes}, or pass DataLoaderConfiguration(split_batches=False)"
        )


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's share of an iterable dataset.

    All ranks iterate over the complete dataset, in windows of one global batch; each yields its own part of a window.
    The last window is padded from the first one, so that all ranks yield the same number of samples.

    Args:
        dataset: The dataset to divide. It must yield the same samples in the same order on every rank.
        batch_size: Samples per batch of one rank, or of all ranks with `split_batches`.
        drop_last: Drop a last window that is not full.
        num_processes: Number of ranks that share the dataset.
        process_index: This rank.
        split_batches: `batch_size` is that of all ranks together.

    Attributes:
        last_round: After an iteration, the samples of its last window without padding; 0 if it was full. None before,
            and in a process that has started workers, unless `share_last_round` was called.

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
        self._last_round = torch.full((), -1, dtype=torch.int64, device="cpu")

    @property
    def last_round(self) -> int | None:
        """Samples of the last window; see the class."""
        samples = int(self._last_round)
        return None if samples < 0 else samples

    def share_last_round(self) -> None:
        """Share `last_round` between the worker and its parent process. Supports one worker only."""
        self._last_round.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def window(self) -> int:
        """Number of samples in a window, of all ranks together."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset, if it has `set_epoch`.

        Args:
            epoch: Number of the epoch, from 0.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        length = len(self.dataset)  # type: ignore[arg-type]
        windows = length // self.window if self.drop_last else math.ceil(length / self.window)
        return windows * (self.window // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        self._last_round.fill_(-1)
        window, part = self.window, self.window // self.num_processes
        first = part * self.process_index
        samples = iter(self.dataset)
        opening = current = list(itertools.islice(samples, window))
        while len(current) == window:
            yield from current[first : first + part]
            current = list(itertools.islice(samples, window))
        self._last_round.fill_(len(current))
        if current and not self.drop_last:
            padded = itertools.islice(itertools.chain(current, itertools.cycle(opening)), first, first + part)
            yield from padded
