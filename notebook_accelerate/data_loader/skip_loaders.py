"""Loaders that leave out their first batches, to go on in the middle of an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_accelerate.data_loader.dispatch_loader import DataLoaderDispatcher
from notebook_accelerate.data_loader.prepare import carried
from notebook_accelerate.data_loader.prepared_loader import DataLoaderAdapter, DataLoaderStateMixin, PreparedDataLoader
from notebook_accelerate.data_loader.samplers import SkipBatchSampler, index_source
from notebook_accelerate.data_loader.sequence_loader import SequenceLoader
from notebook_accelerate.data_loader.stream_skipping import advance
from notebook_accelerate.state import GradientState


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that reads its first batches and leaves them out, for datasets that can only be iterated.

    Args:
        dataset: The dataset to load from.
        skip_batches: How many batches are left out at the start of every pass.
        use_stateful_dataloader: Build on torchdata's StatefulDataLoader.
        **kwargs: What torch's DataLoader takes.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return advance(iter(self.batches()), self.skip_batches)

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Make a loader like another one that leaves out the first batches of every pass.

    Use it for the rest of an interrupted epoch, and the loader itself from the next epoch on: finishing the new loader
    moves both to the next epoch. For datasets with indices nothing is loaded for what is skipped.

    Args:
        dataloader: A prepared loader, or a torch DataLoader.
        num_batches: How many batches to leave out, as this rank counts them.

    Returns:
        A loader of the same class with all attributes of the given one; a SkipDataLoader for an unprepared loader of an
        iterable dataset.

    Raises:
        ValueError: Not a DataLoader, or a negative number.
    """
    if not isinstance(dataloader, DataLoader):
        raise ValueError(f"skip_first_batches takes a DataLoader; got {type(dataloader).__name__}.")
    if num_batches < 0:
        raise ValueError(f"num_batches is {num_batches}; it may be 0 or more.")
    if isinstance(dataloader, SequenceLoader):
        return dataloader.skipping(skip_first_batches, num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        return _skipping_by_reading(dataloader, num_batches)
    rounds = 1
    if isinstance(dataloader, DataLoaderDispatcher) and not dataloader.split_batches:
        rounds = dataloader.count
    skipping: DataLoader[Any] = _twin(dataloader)
    name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
    vars(skipping)[name] = SkipBatchSampler(index_source(dataloader), num_batches * rounds)
    return skipping


def _twin(dataloader: DataLoader[Any]) -> Any:
    """Copy a loader with all its attributes; the copy has workers of its own."""
    twin = copy.copy(dataloader)
    vars(twin)["_iterator"] = None
    if isinstance(dataloader, PreparedDataLoader):
        vars(twin)["_original"] = dataloader
        for name in ("_read_ahead", "_state_before", "end_of_dataloader", "remainder"):  # of the pass of the original
            vars(twin).pop(name, None)
    return twin


def _skipping_by_reading(dataloader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    if isinstance(dataloader, PreparedDataLoader | SkipDataLoader):
        twin: DataLoader[Any] = _twin(dataloader)
        vars(twin)["skip_batches"] += num_batches
        return twin
    loader = SkipDataLoader(
        dataloader.dataset,
        skip_batches=num_batches,
        batch_size=dataloader.batch_size,
        drop_last=dataloader.drop_last,
        **carried(dataloader, stateful=False),
    )
    for name, value in vars(dataloader).items():
        vars(loader).setdefault(name, value)
    return loader
