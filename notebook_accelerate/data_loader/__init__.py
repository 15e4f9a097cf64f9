"""Loaders that give every rank its share of the data, move it to the device, and can resume within an epoch."""

from __future__ import annotations

from notebook_accelerate.data_loader.dispatch_loader import DataLoaderDispatcher as DataLoaderDispatcher
from notebook_accelerate.data_loader.iterable_shard import IterableDatasetShard as IterableDatasetShard
from notebook_accelerate.data_loader.prepare import prepare_data_loader as prepare_data_loader
from notebook_accelerate.data_loader.prepared_loader import (
    DataLoaderAdapter as DataLoaderAdapter,
    DataLoaderStateMixin as DataLoaderStateMixin,
)
from notebook_accelerate.data_loader.samplers import (
    BatchSamplerShard as BatchSamplerShard,
    SeedableRandomSampler as SeedableRandomSampler,
    SkipBatchSampler as SkipBatchSampler,
    get_sampler as get_sampler,
)
from notebook_accelerate.data_loader.sequence_loader import SequenceLoader as SequenceLoader
from notebook_accelerate.data_loader.shard_loader import DataLoaderShard as DataLoaderShard
from notebook_accelerate.data_loader.skip_loaders import (
    SkipDataLoader as SkipDataLoader,
    skip_first_batches as skip_first_batches,
)
