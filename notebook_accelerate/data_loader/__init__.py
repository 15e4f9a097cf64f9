"""Loaders that give every rank its share of the data, put it on the device, and can start in the middle."""

from __future__ import annotations

from notebook_accelerate.data_loader.base import DataLoaderAdapter, DataLoaderStateMixin
from notebook_accelerate.data_loader.dispatch import DataLoaderDispatcher
from notebook_accelerate.data_loader.iterable import IterableDatasetShard
from notebook_accelerate.data_loader.prepare import prepare_data_loader
from notebook_accelerate.data_loader.samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
)
from notebook_accelerate.data_loader.sequences import SequenceLoader
from notebook_accelerate.data_loader.shard import DataLoaderShard
from notebook_accelerate.data_loader.skip import SkipDataLoader, skip_first_batches

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
