"""Loaders that give each rank its share of the data, move batches to the device, and can resume within an epoch."""

from __future__ import annotations

from notebook_accelerate.data_loader.dispatch_loader import DataLoaderDispatcher
from notebook_accelerate.data_loader.prepare import SkipDataLoader, prepare_data_loader, skip_first_batches
from notebook_accelerate.data_loader.prepared_loader import DataLoaderAdapter, DataLoaderStateMixin
from notebook_accelerate.data_loader.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
)
from notebook_accelerate.data_loader.shard_loader import DataLoaderShard, SequenceLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SequenceLoader",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
