"""Create this rank's loader from a torch DataLoader, and create copies of loaders that skip their first batches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from notebook_accelerate.config.enums import RNGType
from notebook_accelerate.data_loader.dispatch_loader import DataLoaderDispatcher
from notebook_accelerate.data_loader.prepared_loader import (
    NOTHING,
    DataLoaderAdapter,
    DataLoaderStateMixin,
    PreparedDataLoader,
)
from notebook_accelerate.data_loader.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    advance,
    check_divisible,
    get_sampler,
    index_source,
    innermost,
)
from notebook_accelerate.data_loader.shard_loader import DataLoaderShard, SequenceLoader, data_parallel_rank
from notebook_accelerate.data_loader.stateful_loaders import resumed_batches
from notebook_accelerate.state import GradientState, PartialState
from notebook_accelerate.torch_internals import sampler_length

# The arguments that a new loader copies from the given one, in addition to the dataset, samplers and batch size.
COPIED_ARGUMENTS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order", "snapshot_every_n_steps",
)  # fmt: skip


def loader_arguments(dataloader: DataLoader[Any], stateful: bool) -> dict[str, Any]:
    """Return the arguments for creating a copy of a loader.

    Args:
        dataloader: The loader to copy.
        stateful: Whether to include arguments of torchdata's StatefulDataLoader.

    Returns:
        The arguments for DataLoader that the installed version of torch supports.
    """
    own = {name: getattr(dataloader, name) for name in COPIED_ARGUMENTS if hasattr(dataloader, name)}
    if not stateful:
        own.pop("snapshot_every_n_steps", None)
    return own


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Create a loader that yields a rank's share of another loader's batches.

    Args:
        dataloader: The loader whose data is shared.
        device: The device of the batches if `put_on_device` is True.
        num_processes: The number of ranks that share the data. None means the number in `PartialState`.
        process_index: The index of this rank. None means the index in `PartialState`.
        split_batches: Whether to split each batch into equal parts for the ranks. If False, each rank gets whole
            batches, so that the global batch is `num_processes` times as large.
        put_on_device: Whether to move batches to `device`.
        rng_types: The random number generators to synchronise across ranks at the start of each pass.
        dispatch_batches: Whether to read only on rank 0, and send each rank its part. If None, this is done for
            iterable datasets if `put_on_device` is True.
        even_batches: Whether to give all ranks the same number of equally large batches, by padding with samples from
            the start of the epoch.
        slice_fn_for_dispatch: A function with the arguments of `slice_tensors` that returns a rank's part of a
            dispatched batch.
        use_seedable_sampler: Whether the order depends only on a seed and the epoch (SeedableRandomSampler).
        data_seed: The seed for `use_seedable_sampler`. If None, torch's initial seed is used.
        non_blocking: Whether to copy batches to the device asynchronously.
        use_stateful_dataloader: Whether to use torchdata's StatefulDataLoader, whose position can be saved and
            restored.
        torch_device_mesh: A device mesh. Ranks that differ only in model-parallel dimensions get the same data.

    Returns:
        A DataLoaderShard or, for dispatched batches, a DataLoaderDispatcher.

    Raises:
        ValueError: `dataloader` is not a DataLoader, `dispatch_batches` is used without `put_on_device`, or
            `split_batches` is used with a batch size that is not a multiple of the number of ranks.
    """
    if not isinstance(dataloader, DataLoader):
        raise ValueError(
            f"dataloader is a {type(dataloader).__name__}; pass a torch DataLoader: "
            "prepare_data_loader(DataLoader(dataset, batch_size=8))"
        )
    iterable = isinstance(dataloader.dataset, IterableDataset)
    dispatch = iterable and put_on_device if dispatch_batches is None else dispatch_batches
    if dispatch and not put_on_device:
        raise ValueError(
            "put_on_device=False is not allowed with dispatch_batches=True, which sends batches between devices; pass "
            "put_on_device=True"
        )
    world_size = PartialState().num_processes if num_processes is None else num_processes
    rank = PartialState().process_index if process_index is None else process_index
    dp_size, dp_rank = data_parallel_rank(torch_device_mesh, world_size, rank)
    if split_batches and dp_size > 1:
        check_divisible(dataloader.batch_size or getattr(index_source(dataloader), "batch_size", None), dp_size)
    common = {
        **loader_arguments(dataloader, use_stateful_dataloader),
        "use_stateful_dataloader": use_stateful_dataloader,
        "_non_blocking": non_blocking,
        "_drop_last": _drops_last(dataloader),
        "torch_device_mesh": torch_device_mesh,
    }
    if not iterable:
        dataloader = _shuffled(dataloader, use_seedable_sampler, data_seed, synchronized=dp_size > 1 and not dispatch)
    prepared: PreparedDataLoader
    if dispatch:
        prepared = DataLoaderDispatcher(
            dataloader.dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            **_batching(dataloader, index_source(dataloader)),
            **common,
        )
    else:
        generator = _generator_of(dataloader) if dp_size > 1 else None
        if iterable:
            share = _iterable_share(dataloader, dp_size, dp_rank, split_batches)
        else:
            share = _indexed_share(dataloader, dp_size, dp_rank, split_batches, even_batches)
        prepared = DataLoaderShard(
            device=device if put_on_device else None,
            rng_types=_without_generator(rng_types) if generator is None else rng_types,
            synchronized_generator=generator,
            **share,
            **common,
        )
    prepared.is_only_rank = world_size == 1
    return prepared


def _iterable_share(dataloader: DataLoader[Any], dp_size: int, dp_rank: int, split_batches: bool) -> dict[str, Any]:
    """Return the arguments of DataLoader for a rank's share of an iterable dataset."""
    if dp_size == 1:
        return {"dataset": dataloader.dataset, **_batching(dataloader, None)}
    size, drop_last = dataloader.batch_size, dataloader.drop_last
    if (shards := _own_shards(dataloader.dataset, dp_size, dp_rank)) is not None:
        part = size // dp_size if size is not None and split_batches else size
        return {"dataset": shards, "batch_size": part, **({} if size is None else {"drop_last": drop_last})}
    # Without a batch size, the dataset yields whole batches, which the ranks get in turn.
    shard = IterableDatasetShard(
        dataloader.dataset,  # type: ignore[arg-type]
        batch_size=size or 1,
        drop_last=drop_last,
        num_processes=dp_size,
        process_index=dp_rank,
        split_batches=split_batches,
    )
    if size is None:
        return {"dataset": shard, "batch_size": None}
    part = size // dp_size if split_batches else size
    return {"dataset": shard, "batch_size": part, "drop_last": drop_last}


def _own_shards(dataset: Any, dp_size: int, dp_rank: int) -> Any:
    """Return a rank's shards of a datasets.IterableDataset, or None if there are fewer shards than ranks.

    None is also returned for any other dataset.
    """
    datasets: Any = sys.modules.get("datasets")  # If the dataset is from this library, it has been imported.
    if datasets is None or not isinstance(dataset, datasets.IterableDataset) or dataset.n_shards < dp_size:
        return None
    return dataset.shard(num_shards=dp_size, index=dp_rank)


def _indexed_share(
    dataloader: DataLoader[Any], dp_size: int, dp_rank: int, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    """Return the arguments of DataLoader for a rank's share of a map-style dataset's indices."""
    source = index_source(dataloader)
    if dp_size > 1:
        source = BatchSamplerShard(source, dp_size, dp_rank, split_batches, even_batches)
    return {"dataset": dataloader.dataset, **_batching(dataloader, source)}


def _drops_last(dataloader: DataLoader[Any]) -> bool:
    """Return whether a loader, or its custom batch sampler, drops the last incomplete batch."""
    return bool(dataloader.drop_last or getattr(innermost(index_source(dataloader)), "drop_last", False))


def _batching(dataloader: DataLoader[Any], source: Any) -> dict[str, Any]:
    """Return the arguments that group samples into batches: a batch sampler, a batch size, or None."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {"batch_size": None, "sampler": source}
    return {"batch_sampler": source}


def _shuffled(
    dataloader: DataLoader[Any], seedable: bool, data_seed: int | None, synchronized: bool
) -> DataLoader[Any]:
    """Return a loader that shuffles in the same order on all ranks, by replacing its sampler."""
    sampler = get_sampler(dataloader)
    if isinstance(sampler, SeedableRandomSampler):
        return dataloader
    if seedable and _permutes(sampler):
        sampler = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler_length(sampler),
            generator=sampler.generator,
            data_seed=data_seed,
        )
    elif synchronized and not seedable and getattr(sampler, "generator", NOTHING) is None:
        # A sampler without its own generator would draw from torch's, whose state differs between ranks.
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    else:
        return dataloader
    return _with_sampler(dataloader, sampler)


def _permutes(sampler: Any) -> bool:
    """Return whether a sampler has the class that `shuffle=True` creates, from torch or torchdata."""
    return isinstance(sampler, RandomSampler) or (
        type(sampler).__name__ == "RandomSampler" and type(sampler).__module__.startswith("torchdata.")
    )


def _with_sampler(dataloader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader with another sampler. A custom batch sampler is changed in place."""
    copied = copy.copy(dataloader)
    batches = innermost(index_source(dataloader))
    if batches is get_sampler(dataloader):
        vars(copied)["sampler"] = sampler
    elif batches is dataloader.batch_sampler and type(batches) is BatchSampler:
        vars(copied)["batch_sampler"] = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    else:
        batches.sampler = sampler
    return copied


def _generator_of(dataloader: DataLoader[Any]) -> torch.Generator | None:
    """Return the generator whose state must be the same on all ranks."""
    if isinstance(dataloader.dataset, IterableDataset):
        generator = getattr(dataloader.dataset, "generator", None)
    else:
        sampler = get_sampler(dataloader)
        generator = NOTHING if isinstance(sampler, SeedableRandomSampler) else getattr(sampler, "generator", NOTHING)
        if generator is None:
            # The sampler draws from torch's generator even though seedable sampling was requested, as transformers'
            # sampler for group_by_length does.
            return torch.default_generator
    return generator if isinstance(generator, torch.Generator) else None


def _without_generator(rng_types: list[str | RNGType] | None) -> list[str | RNGType] | None:
    return None if rng_types is None else [kind for kind in rng_types if kind != RNGType.GENERATOR]


# ---- skipping batches, to resume within an epoch


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader for iterable datasets that reads and drops its first batches.

    Args:
        dataset: The dataset to load from.
        skip_batches: The number of batches to skip at the start of each pass.
        use_stateful_dataloader: Whether to use torchdata's StatefulDataLoader.
        **kwargs: Arguments for torch's DataLoader.
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
    """Return a copy of a loader that skips the first batches of each pass.

    Use the copy for the rest of an interrupted epoch, and the loader itself from the next epoch on. When the copy's
    pass ends, both loaders move on to the next epoch. For map-style datasets, the skipped batches are not loaded.

    A stateful loader that has loaded a state already skips some batches. These are included in `num_batches`, and the
    loaded state is passed on to the copy.

    Args:
        dataloader: A prepared loader, or any torch DataLoader.
        num_batches: The number of this rank's batches to skip.

    Returns:
        A loader with the same class and attributes, or a SkipDataLoader for an unprepared loader of an iterable
        dataset.

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
    """Return a copy of a loader with all its attributes. The copy starts its own workers."""
    copied = copy.copy(dataloader)
    vars(copied)["_iterator"] = None
    if getattr(dataloader, "next_iter_state", None) is not None:
        # Otherwise, the original's next pass, which is the next epoch, would skip these batches again.
        vars(dataloader)["next_iter_state"] = None
    if isinstance(dataloader, PreparedDataLoader):
        for name in (  # These belong to the original's pass.
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
