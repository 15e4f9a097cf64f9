"""Turning a torch DataLoader into this rank's loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from notebook_accelerate.config.enums import RNGType
from notebook_accelerate.data_loader.iterable import IterableDatasetShard
from notebook_accelerate.data_loader.samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
    innermost,
)
from notebook_accelerate.data_loader.shard import DataLoaderShard
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
    count = PartialState().num_processes if num_processes is None else num_processes
    rank = PartialState().process_index if process_index is None else process_index
    return _shard(dataloader, count, rank, split_batches, even_batches, use_seedable_sampler, data_seed,
        device=device if put_on_device else None, rng_types=rng_types, _non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader, torch_device_mesh=torch_device_mesh)  # fmt: skip


def _shard(dataloader, count, rank, split_batches, even_batches, use_seedable_sampler, data_seed, **own):
    generator = None
    if isinstance(dataloader.dataset, IterableDataset):
        raise NotImplementedError
    batch_sampler = dataloader.batch_sampler
    sampler = get_sampler(dataloader)
    if type(sampler) is RandomSampler and use_seedable_sampler:
        sampler = SeedableRandomSampler(
            sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, data_seed=data_seed
        )
        innermost(batch_sampler).sampler = sampler
    elif isinstance(sampler, RandomSampler) and count > 1:
        if sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        generator = sampler.generator
    if count > 1:
        batch_sampler = BatchSamplerShard(batch_sampler, count, rank, split_batches, even_batches)
    rng_types = own.pop("rng_types")
    if rng_types and generator is None:
        rng_types = [kind for kind in rng_types if kind != "generator"]
    return DataLoaderShard(dataloader.dataset, batch_sampler=batch_sampler, rng_types=rng_types, synchronized_generator=generator,
        _drop_last=dataloader.drop_last, **own, **carried(dataloader, own["use_stateful_dataloader"]))  # fmt: skip
