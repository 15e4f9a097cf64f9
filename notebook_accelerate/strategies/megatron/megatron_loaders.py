"""Loaders for Megatron-LM: each batch is an accumulation window, which the schedule splits into micro-batches."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader

from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.strategies.accelerator_properties import HasState
from notebook_accelerate.strategies.megatron import megatron_setup


class MegatronLMDummyScheduler:
    """A placeholder for a learning rate schedule, which Megatron-LM creates and steps itself.

    Args:
        optimizer: The optimizer whose learning rate the schedule sets.
        total_num_steps: The total number of optimizer steps, counted as if one rank read all batches.
        warmup_num_steps: The number of initial steps during which the learning rate rises from 0.
        kwargs: Further settings, which are stored as they are.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader:
    """A placeholder for loaders of Megatron's indexed datasets.

    Pass the placeholder to `prepare` three times. `prepare` returns the loaders of the training, validation and test
    splits in its place, in this order.

    Args:
        dataset_kwargs: Megatron's arguments: `data_path` (prefixes of indexed datasets), `split` ("949,50,1"),
            `seq_length`, `micro_batch_size`, `seed`, `tokenizer`, `data_cache_path`.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dataset_kwargs
        self.built: list[Any] = []

    def set_megatron_data_args(self, plugin: MegatronLMPlugin | None = None) -> None:
        """Add this placeholder's arguments to a plugin's arguments.

        Args:
            plugin: The plugin to change. If None, the current state's plugin is changed.
        """
        if plugin is None:
            from notebook_accelerate.state import AcceleratorState

            plugin = megatron_setup.active_plugin(AcceleratorState())
        plugin.megatron_lm_default_args |= self.dataset_args

    def get_train_valid_test_datasets_provider(self, accelerator: HasState) -> Any:
        """Return a function that takes the number of samples in each split, and creates the three datasets.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
        """
        plugin = megatron_setup.active_plugin(accelerator.state)
        if plugin.custom_megatron_datasets_provider_function is not None:
            return plugin.custom_megatron_datasets_provider_function

        def provider(train_val_test_num_samples: list[int]) -> Any:
            return _datasets(plugin.megatron_lm_default_args, train_val_test_num_samples)

        return provider

    def build_train_valid_test_data_iterators(self, accelerator: HasState) -> tuple[Any, Any, Any]:
        """Create endless iterators over the micro-batches of the three splits; every rank must call this.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
        """
        loaders = self.build_loaders(accelerator)
        return tuple(_repeat(loader) if loader is not None else None for loader in loaders)  # type: ignore[return-value]

    def build_loaders(self, accelerator: HasState) -> list[DataLoader[Any] | None]:
        """Create the loaders of micro-batches for the three splits, at most once; every rank must call this.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.

        Raises:
            ValueError: The plugin does not specify the number of samples to train on.
        """
        if self.built:
            return self.built
        plugin = megatron_setup.active_plugin(accelerator.state)
        self.set_megatron_data_args(plugin)
        size = int(self.dataset_args.get("micro_batch_size", 1))
        plugin.set_training_args(size, megatron_setup.check_degrees(plugin, accelerator.state.num_processes))
        samples = plugin.train_samples or (plugin.train_iters or 0) * plugin.global_batch_size
        if not samples:
            raise ValueError(
                "Megatron's datasets need the number of samples; pass MegatronLMPlugin(train_iters=...) or "
                "train_samples=..."
            )
        steps = samples // plugin.global_batch_size
        evaluations = (steps // plugin.eval_interval + 1) * plugin.eval_iters
        wanted = [samples, evaluations * plugin.global_batch_size, plugin.eval_iters * plugin.global_batch_size]
        sets = self.get_train_valid_test_datasets_provider(accelerator)(wanted)
        consumed = list(plugin.consumed_samples or [])
        for index, dataset in enumerate(sets):
            done = consumed[index] if index < len(consumed) else 0
            self.built.append(None if dataset is None else _loader(dataset, size, done, wanted[index]))
        return self.built


def _loader(dataset: Any, size: int, consumed: int, wanted: int) -> DataLoader[Any]:
    """Return a loader of micro-batches for `wanted` samples, leaving out those that an earlier run has `consumed`."""
    end = min(wanted, len(dataset))
    remaining = torch.utils.data.Subset(dataset, range(consumed % max(end, 1), end))
    return DataLoader(remaining, batch_size=size, drop_last=True)


def _repeat(loader: DataLoader[Any]) -> Any:
    while True:
        yield from loader


def _datasets(arguments: dict[str, Any], samples: list[int]) -> Any:
    """Build Megatron's GPT datasets, first on the first rank of each machine, then on the other ranks."""
    kind = arguments.get("model_type_name")
    if kind != "gpt":
        raise ValueError(
            f"Megatron's datasets are supported for GPT only, but the model is {kind!r}; pass MegatronLMPlugin("
            "custom_megatron_datasets_provider_function=...) with a function that returns the three datasets"
        )
    gpt: Any = import_module("megatron.core.datasets.gpt_dataset")
    builder: Any = import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    paths = arguments.get("data_path") or []
    paths = paths if isinstance(paths, (list, tuple)) else [paths]
    config = gpt.GPTDatasetConfig(
        random_seed=arguments.get("seed", 1234),
        sequence_length=arguments["seq_length"],
        blend=([str(path) for path in paths], None) if paths else None,
        split=arguments.get("split", arguments.get("splits_string", "949,50,1")),
        path_to_cache=arguments.get("data_cache_path"),
        tokenizer=arguments.get("tokenizer"),
        reset_position_ids=bool(arguments.get("reset_position_ids")),
        reset_attention_mask=bool(arguments.get("reset_attention_mask")),
        eod_mask_loss=bool(arguments.get("eod_mask_loss")),
        create_attention_mask=False,
    )
    return builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, samples, lambda: True, config).build()


_LOADER_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def micro_batch_size(loader: Any, split_batches: bool, groups: int) -> int:
    """Return a rank's number of samples in one batch of a loader, which is one micro-batch.

    Args:
        loader: The DataLoader to read the batch size from.
        split_batches: Whether each batch is split across the groups of ranks that read different data.
        groups: The number of these groups.

    Raises:
        ValueError: The loader has no batch size.
    """
    size = getattr(loader, "batch_size", None)
    if size is None:
        raise ValueError(
            f"Megatron-LM uses a loader's batch_size as the size of micro-batches, but this {type(loader).__name__} "
            "has no batch_size; create it with DataLoader(dataset, batch_size=...)"
        )
    return size // groups if split_batches else int(size)


def window_loader(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return a loader whose batches are windows of several batches of another loader.

    Args:
        loader: The loader of micro-batches.
        count: The number of batches per window.

    Returns:
        A new loader with the same settings, or the loader itself if a window is one batch.
    """
    if count == 1:
        return loader
    settings = {name: getattr(loader, name) for name in _LOADER_SETTINGS if hasattr(loader, name)}
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        settings["sampler"] = loader.sampler
    return type(loader)(loader.dataset, batch_size=(loader.batch_size or 1) * count, **settings)
