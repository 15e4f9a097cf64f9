"""Turning a torch DataLoader into this rank's loader."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from notebook_accelerate.config.enums import RNGType
from notebook_accelerate.data_loader.dispatch_loader import DataLoaderDispatcher
from notebook_accelerate.data_loader.iterable_shard import IterableDatasetShard
from notebook_accelerate.data_loader.mesh_ranks import data_parallel_place
from notebook_accelerate.data_loader.prepared_loader import NOTHING
from notebook_accelerate.data_loader.samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    get_sampler,
    index_source,
    innermost,
)
from notebook_accelerate.data_loader.shard_loader import DataLoaderShard
from notebook_accelerate.state import PartialState

# What a new loader takes over from the one it is made of, beside the dataset, the samplers and the batch size.
CARRIED = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order", "snapshot_every_n_steps",
)  # fmt: skip


def carried(dataloader: DataLoader[Any], stateful: bool) -> dict[str, Any]:
    """Collect the arguments that make a loader like another one.

    Args:
        dataloader: The loader to be like.
        stateful: Whether the new loader takes those of torchdata's StatefulDataLoader, too.

    Returns:
        Arguments of DataLoader; those that its version of torch does not know are left out.
    """
    own = {name: getattr(dataloader, name) for name in CARRIED if hasattr(dataloader, name)}
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
    """Make the loader that gives one rank its share of another loader's batches.

    Args:
        dataloader: The loader to divide.
        device: Where batches go with `put_on_device`.
        num_processes: How many ranks share the data; None asks the state.
        process_index: This rank; None asks the state.
        split_batches: Cut every batch into equal parts for the ranks; otherwise every rank gets whole batches, and the
            global batch is `num_processes` times as large.
        put_on_device: Put batches on `device`.
        rng_types: Random number generators to synchronise over the ranks at the start of every pass.
        dispatch_batches: Read on rank 0 only, and send every rank its part. None: so for iterable datasets with
            `put_on_device`.
        even_batches: Give all ranks equally many, equally large batches, by going on with the start of the epoch.
        slice_fn_for_dispatch: Cuts a rank's part out of a dispatched batch, called as `slice_tensors`.
        use_seedable_sampler: Shuffle by seed and epoch only (SeedableRandomSampler).
        data_seed: The seed for it; None: torch's initial seed.
        non_blocking: Copy to the device without waiting.
        use_stateful_dataloader: Build on torchdata's StatefulDataLoader, whose position can be saved and restored.
        torch_device_mesh: A device mesh; ranks that differ only in its model-parallel dimensions get the same data.

    Returns:
        A DataLoaderShard or, for dispatched batches, a DataLoaderDispatcher.

    Raises:
        ValueError: Not a DataLoader, `dispatch_batches` without `put_on_device`, or `split_batches` with a batch size
            that the number of ranks does not divide.
    """
    if not isinstance(dataloader, DataLoader):
        raise ValueError(f"prepare_data_loader takes a torch DataLoader; got {type(dataloader).__name__}.")
    iterable = isinstance(dataloader.dataset, IterableDataset)
    dispatch = iterable and put_on_device if dispatch_batches is None else dispatch_batches
    if dispatch and not put_on_device:
        raise ValueError("dispatch_batches=True sends batches from device to device: it needs put_on_device=True.")
    count = PartialState().num_processes if num_processes is None else num_processes
    place = PartialState().process_index if process_index is None else process_index
    count, place = data_parallel_place(torch_device_mesh, count, place)
    share = Share(count, place, split_batches, even_batches)
    share.check(dataloader)
    common = {
        **carried(dataloader, use_stateful_dataloader),
        "use_stateful_dataloader": use_stateful_dataloader,
        "_non_blocking": non_blocking,
        "_drop_last": drops_last(dataloader),
        "torch_device_mesh": torch_device_mesh,
    }
    if not iterable:
        dataloader = _shuffled(dataloader, use_seedable_sampler, data_seed, synchronized=count > 1 and not dispatch)
    if dispatch:
        return DataLoaderDispatcher(
            dataloader.dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            **_batching(dataloader, index_source(dataloader)),
            **common,
        )
    generator = _generator_of(dataloader) if count > 1 else None
    return DataLoaderShard(
        device=device if put_on_device else None,
        rng_types=_without_generator(rng_types) if generator is None else rng_types,
        synchronized_generator=generator,
        **(share.of_iterable(dataloader) if iterable else share.of_indices(dataloader)),
        **common,
    )


@dataclasses.dataclass(frozen=True)
class Share:
    """How the data is divided, and which share is this rank's.

    Attributes:
        count: How many ranks read different data.
        place: This rank's number among them.
        split_batches: Batches are cut into parts.
        even_batches: The end is filled up.
    """

    count: int
    place: int
    split_batches: bool
    even_batches: bool

    def check(self, dataloader: DataLoader[Any]) -> None:
        """Refuse to cut batches into parts that cannot be equal.

        Args:
            dataloader: The loader to divide.

        Raises:
            ValueError: `split_batches` and a batch size that the number of ranks does not divide.
        """
        size = dataloader.batch_size or getattr(index_source(dataloader), "batch_size", None)
        if self.split_batches and self.count > 1 and (size is None or size % self.count):
            raise ValueError(
                f"split_batches=True cuts every batch into {self.count} equal parts, one per process, but the batch "
                f"size of the loader is {size}. Take a multiple of {self.count}, or "
                "DataLoaderConfiguration(split_batches=False)."
            )

    def of_iterable(self, dataloader: DataLoader[Any]) -> dict[str, Any]:
        """Divide an iterable dataset.

        Args:
            dataloader: A loader of one.

        Returns:
            Arguments of DataLoader for this rank's share.
        """
        if self.count == 1:
            return {"dataset": dataloader.dataset, **_batching(dataloader, None)}
        size, drop_last = dataloader.batch_size, dataloader.drop_last
        # Without a batch size the dataset gives whole batches: they are handed out in turn.
        shard = IterableDatasetShard(
            dataloader.dataset,  # type: ignore[arg-type]
            batch_size=size or 1,
            drop_last=drop_last,
            num_processes=self.count,
            process_index=self.place,
            split_batches=self.split_batches,
        )
        if size is None:
            return {"dataset": shard, "batch_size": None}
        part = size // self.count if self.split_batches else size
        return {"dataset": shard, "batch_size": part, "drop_last": drop_last}

    def of_indices(self, dataloader: DataLoader[Any]) -> dict[str, Any]:
        """Divide the indices of a dataset.

        Args:
            dataloader: A loader of one.

        Returns:
            Arguments of DataLoader for this rank's share.
        """
        source = index_source(dataloader)
        if self.count > 1:
            source = BatchSamplerShard(source, self.count, self.place, self.split_batches, self.even_batches)
        return {"dataset": dataloader.dataset, **_batching(dataloader, source)}


def drops_last(dataloader: DataLoader[Any]) -> bool:
    """Tell whether a loader drops its last incomplete batch, by itself or by a batch sampler of the user's.

    Args:
        dataloader: A torch DataLoader.

    Returns:
        Whether it does.
    """
    return bool(dataloader.drop_last or getattr(innermost(index_source(dataloader)), "drop_last", False))


def _batching(dataloader: DataLoader[Any], source: Any) -> dict[str, Any]:
    """Say how a new loader groups samples: by a batch sampler, by a number, or not at all."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {"batch_size": None, "sampler": source}
    return {"batch_sampler": source}


def _shuffled(
    dataloader: DataLoader[Any], seedable: bool, data_seed: int | None, synchronized: bool
) -> DataLoader[Any]:
    """Give a loader that shuffles a sampler whose order all ranks can agree on."""
    sampler = get_sampler(dataloader)
    if isinstance(sampler, SeedableRandomSampler):
        return dataloader
    if seedable and _permutes(sampler):
        sampler = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
            data_seed=data_seed,
        )
    elif synchronized and getattr(sampler, "generator", NOTHING) is None:
        # Without a generator of its own a sampler draws from torch's, which is not in the same state on all ranks.
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    else:
        return dataloader
    return _with_sampler(dataloader, sampler)


def _permutes(sampler: Any) -> bool:
    """Whether a sampler is the one that `shuffle=True` makes, by torch or by torchdata."""
    return isinstance(sampler, RandomSampler) or (
        type(sampler).__name__ == "RandomSampler" and type(sampler).__module__.startswith("torchdata.")
    )


def _with_sampler(dataloader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Copy a loader with another sampler; the given one stays as it is, but for batch samplers of the user's class."""
    twin = copy.copy(dataloader)
    batches = innermost(index_source(dataloader))
    if batches is get_sampler(dataloader):
        vars(twin)["sampler"] = sampler
    elif batches is dataloader.batch_sampler and type(batches) is BatchSampler:
        vars(twin)["batch_sampler"] = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    else:
        batches.sampler = sampler
    return twin


def _generator_of(dataloader: DataLoader[Any]) -> torch.Generator | None:
    """Find the generator that must be in the same state on all ranks."""
    if isinstance(dataloader.dataset, IterableDataset):
        generator = getattr(dataloader.dataset, "generator", None)
    else:
        sampler = get_sampler(dataloader)
        generator = None if isinstance(sampler, SeedableRandomSampler) else getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _without_generator(rng_types: list[str | RNGType] | None) -> list[str | RNGType] | None:
    return None if rng_types is None else [kind for kind in rng_types if kind != RNGType.GENERATOR]
