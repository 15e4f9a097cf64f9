"""Loaders that skip their first batches, to resume within an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_accelerate.data_loader.dispatch_loader import DataLoaderDispatcher
from notebook_accelerate.data_loader.persistent_workers import SequenceLoader
from notebook_accelerate.data_loader.prepare import loader_arguments
from notebook_accelerate.data_loader.prepared_loader import DataLoaderAdapter, DataLoaderStateMixin, PreparedDataLoader
from notebook_accelerate.data_loader.samplers import SkipBatchSampler, index_source
from notebook_accelerate.data_loader.stateful_loaders import resumed_batches
from notebook_accelerate.data_loader.stream_skipping import advance
from notebook_accelerate.state import GradientState


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that reads and drops its first batches, for iterable datasets.

    Args:
        dataset: The dataset to load from.
        skip_batches: Number of batches to skip at the start of every pass.
        use_stateful_dataloader: Use torchdata's StatefulDataLoader.
        **kwargs: Arguments of torch's DataLoader.
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
    """Return a copy of a loader that skips the first batches of every pass.

    Use it for the rest of an interrupted epoch, and the loader itself from the next epoch on: the end of the copy's
    pass moves both to the next epoch. For map-style datasets the skipped batches are not loaded.

    A stateful loader that has loaded a state skips its batches already; they count as skipped here, and the copy takes
    over the loaded state.

    Args:
        dataloader: A prepared loader, or a torch DataLoader.
        num_batches: Number of this rank's batches to skip.

    Returns:
        A loader of the same class and attributes; a SkipDataLoader for an unprepared loader of an iterable dataset.

    Raises:
        ValueError: `dataloader` is not a DataLoader, or `num_batches` is negative.
    """
    if not isinstance(dataloader, DataLoader):
        raise ValueError(
            f"dataloader is a {type(dataloader).__name__}; pass a torch DataLoader: skip_first_batches(dataloader, 10)"
        )
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is not allowed; pass a whole number of at least 0")
    if isinstance(dataloader, SequenceLoader):
        return dataloader.skipping(skip_first_batches, num_batches)
    copied = _skipping(dataloader, num_batches)
    if isinstance(dataloader, PreparedDataLoader) and isinstance(copied, PreparedDataLoader):
        copied.resume_pass_of(dataloader, num_batches)
    return copied


def _skipping(dataloader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    rounds = 1
    if isinstance(dataloader, DataLoaderDispatcher) and not dataloader.split_batches:
        rounds = dataloader.dp_size
    num_batches = max(num_batches - resumed_batches(dataloader) // rounds, 0)
    if isinstance(dataloader.dataset, IterableDataset):
        return _skipping_by_reading(dataloader, num_batches)
    skipping: DataLoader[Any] = _copy_loader(dataloader)
    name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
    vars(skipping)[name] = SkipBatchSampler(index_source(dataloader), num_batches * rounds)
    return skipping


def _copy_loader(dataloader: DataLoader[Any]) -> Any:
    """Copy a loader with all its attributes; the copy starts its own workers."""
    copied = copy.copy(dataloader)
    vars(copied)["_iterator"] = None
    if getattr(dataloader, "next_iter_state", None) is not None:
        vars(dataloader)["next_iter_state"] = None  # else the original's next pass, the next epoch, skips them again
    if isinstance(dataloader, PreparedDataLoader):
        for name in (  # of the pass of the original
            "_read_ahead", "_state_before", "_first_numbers", "end_of_dataloader", "remainder",
        ):  # fmt: skip
            vars(copied).pop(name, None)
    return copied


def _skipping_by_reading(dataloader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    if isinstance(dataloader, PreparedDataLoader | SkipDataLoader):
        copied: DataLoader[Any] = _copy_loader(dataloader)
        vars(copied)["skip_batches"] += num_batches
        return copied
    loader = SkipDataLoader(
        dataloader.dataset,
        skip_batches=num_batches,
        batch_size=dataloader.batch_size,
        drop_last=dataloader.drop_last,
        **loader_arguments(dataloader, stateful=False),
    )
    for name, value in vars(dataloader).items():
        vars(loader).setdefault(name, value)
    return loader
