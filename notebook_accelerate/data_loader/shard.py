"""The loader of a rank that reads its own share of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from notebook_accelerate.collectives import send_to_device
from notebook_accelerate.data_loader.advancing import advance
from notebook_accelerate.data_loader.base import NOTHING, PreparedDataLoader
from notebook_accelerate.data_loader.iterable import IterableDatasetShard
from notebook_accelerate.data_loader.rng import synchronize_rng_states
from notebook_accelerate.data_loader.samplers import BatchSamplerShard, SkipBatchSampler
from notebook_accelerate.state import GradientState


class DataLoaderShard(PreparedDataLoader):
    """A loader that puts batches on a device and knows one batch ahead that it ends.

    Args:
        dataset: The dataset to load from.
        device: Where batches go; None leaves them where they are.
        rng_types: Random number generators to synchronise over the ranks at the start of every pass.
        synchronized_generator: The generator that ``"generator"`` in `rng_types` means.
        skip_batches: Batches to leave out at the start.
        use_stateful_dataloader: Build on torchdata's StatefulDataLoader.
        _drop_last: The last incomplete round is dropped, so there is no padding to count.
        _non_blocking: Copy to the device without waiting.
        torch_device_mesh: Accepted for the interface; the share is decided by `prepare_data_loader`.
        iteration: Epoch of the first pass.
        **kwargs: What torch's DataLoader takes.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.begin()
        self.set_epoch(self.iteration)
        try:
            batches = advance(self.batches(), self.skip_batches)
            yield from self._moved(batches) if _moves(self.device) else self._in_place(batches)
            self.iteration += 1
        finally:
            self.end()

    def _in_place(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand out batches one behind what is read. This loop is all that a batch costs."""
        reading = self.gradient_state.dataloader_references
        current = next(batches, NOTHING)
        if current is NOTHING:
            return
        for upcoming in batches:
            if reading[-1] is not self:
                self.gradient_state._add_dataloader(self)
            yield current
            current = upcoming
        self._note_end()
        yield current

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand out batches on the device; a copy starts before the next batch is read."""
        reading = self.gradient_state.dataloader_references
        upcoming = next(batches, NOTHING)
        while upcoming is not NOTHING:
            current = send_to_device(upcoming, self.device, non_blocking=self._non_blocking)
            upcoming = next(batches, NOTHING)
            if upcoming is NOTHING:
                self._note_end()
            elif reading[-1] is not self:
                self.gradient_state._add_dataloader(self)
            yield current

    def _note_end(self) -> None:
        """Say that the batch handed out next is the last one."""
        self.gradient_state._add_dataloader(self)
        self.end_of_dataloader = True
        if isinstance(self.dataset, IterableDatasetShard) and self.remainder < 0 and not self._drop_last:
            self.remainder = -1 if self.dataset.last_window is None else self.dataset.last_window

    @property
    def total_batch_size(self) -> int:
        """Number of samples that all ranks together read at a time."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.window
        batch_sampler = self.batch_sampler
        while isinstance(batch_sampler, SkipBatchSampler):
            batch_sampler = batch_sampler.batch_sampler
        if not isinstance(batch_sampler, BatchSamplerShard):
            return int(getattr(batch_sampler, "batch_size", 1))
        return int(batch_sampler.batch_size) * (1 if batch_sampler.split_batches else batch_sampler.num_processes)


def _moves(device: torch.device | None) -> bool:
    """Whether batches may have to be moved: not to the CPU where there is nothing else they could be on."""
    if device is None:
        return False
    return device.type != "cpu" or torch.accelerator.is_available()
