"""The Megatron-LM strategy: megatron-core handles precision, micro-batches, clipping, steps and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accelerate.collectives.communicator import start_watchdog
from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.accelerator_properties import HasState
from notebook_accelerate.strategies.engine_strategy import PREPARE_TOGETHER, EngineStrategy
from notebook_accelerate.strategies.megatron import megatron_checkpoint, megatron_setup
from notebook_accelerate.strategies.megatron.megatron_engine import (
    MegatronEngine,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
)
from notebook_accelerate.strategies.megatron.megatron_loaders import (
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    micro_batch_size,
    window_loader,
)
from notebook_accelerate.strategies.module_queries import without_wrappers
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.shard_report import ShardTally
from notebook_accelerate.strategies.strategy import NOTHING, indices_by_kind, inner_optimizer, kind_of
from notebook_accelerate.telemetry.sharding import ShardReport, ShardSizes

if TYPE_CHECKING:
    from notebook_accelerate.strategies.strategy import Strategy


def megatron_lm_initialize(accelerator: HasState, args_defaults: dict[str, Any] | None = None) -> None:
    """Initialize Megatron's process groups; every rank must call this.

    Args:
        accelerator: The Accelerator, or another object that has its `state`.
        args_defaults: Further arguments for Megatron.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The degrees do not fit the number of ranks.
    """
    plugin = megatron_setup.active_plugin(accelerator.state)
    plugin.megatron_lm_default_args |= args_defaults or {}
    megatron_setup.initialize_groups(accelerator.state, plugin)


def megatron_lm_prepare_model_optimizer_scheduler(accelerator: HasState) -> tuple[list[nn.Module], Any, Any]:
    """Create a model, an optimizer and a schedule from the plugin's arguments; every rank must call this.

    Args:
        accelerator: The Accelerator, or another object that has its `state`.

    Returns:
        This rank's parts of the model, Megatron's optimizer, and its schedule.
    """
    plugin = megatron_setup.active_plugin(accelerator.state)
    arguments = plugin.megatron_lm_default_args
    if plugin.custom_prepare_model_function is not None:
        chunks = _chunks(plugin.custom_prepare_model_function(accelerator))
    else:
        chunks = megatron_setup.make_chunks(plugin, accelerator.state.device)
    if not hasattr(chunks[0], "zero_grad_buffer"):
        chunks = megatron_setup.wrap_chunks(chunks, arguments)
    optimizer = megatron_setup.make_optimizer(chunks, plugin)
    return chunks, optimizer, megatron_setup.make_schedule(optimizer, plugin, plugin.scheduled)


def _chunks(model: Any) -> list[nn.Module]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


class MegatronLMStrategy(EngineStrategy):
    """Trains with layers split across `tp_degree` ranks, stages across `pp_degree` ranks, and data across all others.

    Megatron's model is created from the configuration of the given model. An accumulation window consists of
    `num_micro_batches` batches, which the prepared loader yields as one batch.

    Attributes:
        models: A list with the engine, once a model is prepared.
        engine: The engine, or None before a model is prepared.
    """

    name: ClassVar[str] = "megatron_lm"
    library: ClassVar[str] = "Megatron-LM"
    checkpoint_layout: ClassVar[str] = "megatron"
    all_ranks_save: ClassVar[bool] = True
    engine: MegatronEngine | None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.plugin.set_mixed_precision(setup.state.mixed_precision)
        self._set_window()
        megatron_lm_initialize(setup)
        self._groups = megatron_setup.check_degrees(self.plugin, setup.state.num_processes)
        if setup.state.num_processes > 1:
            # Each rank writes a part of a checkpoint. Without the watchdog, ranks would hang if only some called
            # save_state.
            start_watchdog()

    @property
    def plugin(self) -> MegatronLMPlugin:
        """The Megatron-LM plugin."""
        return megatron_setup.active_plugin(self.setup.state)

    def _set_window(self) -> None:
        """Turn the Accelerator's accumulation steps into micro-batches, so that a loader's batch is a whole window."""
        state, plugin = self.setup.gradient_state, self.plugin
        if state.num_steps > 1:
            if plugin._micro_batches_given and plugin.num_micro_batches != state.num_steps:
                raise ValueError(
                    f"gradient_accumulation_steps={state.num_steps} and num_micro_batches={plugin.num_micro_batches} "
                    "contradict each other: Megatron-LM accumulates over micro-batches; leave one of them out"
                )
            plugin.num_micro_batches = state.num_steps
            plugin.megatron_lm_default_args["num_micro_batches"] = state.num_steps
            plugin._micro_batches_given = True
        state.plugin_kwargs["num_steps"] = 1

    # ---- preparing

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """See `Strategy.prepare`. A model must be prepared together with its optimizer and schedule placeholder.

        Raises:
            ValueError: The objects do not fit each other or the plugin.
        """
        results = list(objects)
        indices = indices_by_kind(objects, _object_kind)
        new = [at for at in indices["model"] if results[at] is not self.engine]
        self._check_objects(results, indices, new)
        if new:
            self._set_arguments(results, indices, new[0])
        loaders = indices["data_loader"]
        for at, split in zip(loaders, _splits(results, loaders), strict=True):
            results[at] = self._prepare_loader(results[at], split, placements[at])
        if new:
            self._start_engine(results, indices, new[0])
        return results

    def _check_objects(self, objects: Sequence[Any], indices: Mapping[str, list[int]], models: list[int]) -> None:
        """Check that the objects are sufficient for one engine, or do not need an engine."""
        optimizers = self._new_optimizers(objects, indices)
        plain = [objects[at] for at in indices["scheduler"] if not _is_megatron_schedule(objects[at])]
        if plain:
            raise ValueError(
                f"Megatron-LM creates and steps the learning rate's schedule itself, but prepare() was given a "
                f"{type(plain[0]).__name__}; pass MegatronLMDummyScheduler(optimizer, total_num_steps=..., "
                "warmup_num_steps=...)"
            )
        if len(models) != len(optimizers) or len(models) > 1:
            raise ValueError(
                f"prepare() was given {len(models)} models and {len(optimizers)} optimizers; Megatron-LM "
                f"creates one engine from one model and its optimizer: {PREPARE_TOGETHER}"
            )
        if models and self.engine is not None:
            raise ValueError(
                "this Accelerator already trains a model with Megatron-LM; free it first: accelerator.free_memory()"
            )

    def _set_arguments(self, objects: Sequence[Any], indices: Mapping[str, list[int]], model: int) -> None:
        """Set Megatron's arguments from the given objects: the model's shape, batch sizes, optimizer and schedule."""
        plugin = self.plugin
        if plugin.custom_model_provider_function is None and plugin.custom_prepare_model_function is None:
            plugin.set_network_size_args(without_wrappers(objects[model]))
            warn_once(
                "Megatron-LM creates a new model from the configuration of the given one, without its weights; load "
                "weights with accelerator.load_state(folder)"
            )
        loaders = [objects[at] for at in indices["data_loader"]]
        plain = [loader for loader in loaders if isinstance(loader, DataLoader) and not _is_prepared(loader)]
        split = self.setup.dataloader_config.split_batches
        if plain:
            plugin.set_training_args(micro_batch_size(plain[0], split, self._groups), self._groups)
        elif not hasattr(plugin, "global_batch_size"):
            size = next((item.dataset_args.get("micro_batch_size", 1) for item in loaders if _is_placeholder(item)), 1)
            plugin.set_training_args(size, self._groups)
        (at,) = self._new_optimizers(objects, indices)
        plugin.set_optimizer_type(inner_optimizer(objects[at]))
        schedules = indices["scheduler"]
        plugin.scheduled = bool(schedules)
        if schedules:
            plugin.set_scheduler_args(objects[schedules[0]])

    def _start_engine(self, objects: list[Any], indices: Mapping[str, list[int]], model: int) -> None:
        """Create the engine, and replace the model, optimizer and schedule with the engine's."""
        chunks, optimizer, schedule = megatron_lm_prepare_model_optimizer_scheduler(self.setup)
        engine = self.engine = MegatronEngine(self.setup, chunks, optimizer, schedule)
        engine._is_accelerate_prepared = True  # type: ignore[assignment]
        self.models.append(engine)
        (at,) = self._new_optimizers(objects, indices)
        objects[model], objects[at] = engine, self.keep(MegatronLMOptimizerWrapper(optimizer, engine), self.optimizers)
        for index in indices["scheduler"]:
            objects[index] = self.keep(MegatronLMSchedulerWrapper(schedule, self.optimizers), self.schedulers)

    def _prepare_loader(self, loader: Any, split: int, placement: bool | None) -> Any:
        if not _is_placeholder(loader):
            return self.prepare_data_loader(loader, placement)
        built = loader.build_loaders(self.setup)[split]
        return None if built is None else self.prepare_data_loader(built, placement)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """See `Strategy.prepare_data_loader`. Each batch becomes a window of `num_micro_batches` batches.

        Returns:
            The prepared loader. The ranks that share a model read the same windows.
        """
        if not _is_prepared(data_loader):
            micro_batch_size(data_loader, self.setup.dataloader_config.split_batches, self._groups)
            data_loader = window_loader(data_loader, self.plugin.num_micro_batches or 1)
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def _loader_settings(self) -> dict[str, Any]:
        rank = megatron_setup.import_parallel_state().get_data_parallel_rank()
        return {
            **super()._loader_settings(),
            "num_processes": self._groups,
            "process_index": rank,
            "torch_device_mesh": None,
        }

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the engine, or prepare a model that will only be evaluated, and therefore stays whole.

        Args:
            model: The model to prepare.
            device_placement: Whether to move the model to the device. If None, the Accelerator's setting is used.
            evaluation_mode: Whether the model is prepared for inference only.

        Returns:
            The engine, or the whole model.

        Raises:
            ValueError: A model for training was prepared without its optimizer.
        """
        if evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        if model is self.engine:
            return model
        raise self._incomplete(model)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Return a schedule that was prepared together with its model.

        Args:
            scheduler: The schedule to look up.

        Raises:
            ValueError: The schedule was not prepared together with its model.
        """
        if isinstance(scheduler, MegatronLMSchedulerWrapper):
            return scheduler
        raise ValueError(
            "Megatron-LM creates and steps the learning rate's schedule itself: model, optimizer, scheduler = "
            "accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer, total_num_steps=...))"
        )

    # ---- training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Do nothing, because the call to the model has already computed the gradients.

        Args:
            loss: The loss that the model returned, which is not used.
            kwargs: Not used.
        """

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context that does nothing, because a single call to the model handles a whole window."""
        return NOTHING

    def _configured_norm(self) -> tuple[float | None, str]:
        norm = self.plugin.gradient_clipping if self.plugin._clipping_given else None
        return norm, f"MegatronLMPlugin(gradient_clipping={norm}) is used; leave it out to use the argument"

    def _step_clipped(self, max_norm: float) -> torch.Tensor:
        assert self.engine is not None
        self.engine.clip(max_norm)
        return torch.tensor(self.engine.grad_norm, dtype=torch.float32)

    def sharding(self) -> ShardReport:
        return super().sharding() if self.engine is None else report_engine(self)

    # ---- states

    def model_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """See `Strategy.model_state_dict`; every rank must call this.

        Returns:
            The state dict, with the names that the model has on a single rank. If ranks have parts of the model, rank 0
            gets the state in CPU memory, and other ranks get {}.
        """
        if model is self.engine and self.engine is not None:
            return megatron_checkpoint.gather_state(self.engine)
        return super().model_state_dict(model, unwrap)

    def save_state(self, folder: Path, safe_serialization: bool = True, **options: Any) -> None:
        """See `Strategy.save_state`. The files have megatron-core's formats. Every rank must call this.

        Raises:
            ValueError: `options` were given, but no options are supported.
        """
        if options:
            raise ValueError(f"save_state with Megatron-LM does not accept {', '.join(options)}; leave it out")
        if self.engine is not None:
            megatron_checkpoint.save_engine(self.engine, folder)

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """See `Strategy.load_state` and `megatron_checkpoint.load_engine`; every rank must call this.

        Args:
            folder: The folder of the checkpoint, written with these or other degrees.
            models: The prepared models that no hook has loaded.
            options: Only `strict`, which says whether all names must match the model's.

        Raises:
            CheckpointMismatchError: The folder does not contain a checkpoint of this engine.
            ValueError: An option is not supported.
        """
        strict = options.pop("strict", True)
        if options:
            raise ValueError(f"load_state with Megatron-LM does not accept {', '.join(options)}; leave it out")
        if self.engine is not None and any(self.engine is wanted for wanted in models):
            megatron_checkpoint.load_engine(self.engine, folder, strict)

    def clear(self) -> None:
        """Forget all prepared objects."""
        self.engine = None
        super().clear()


def _is_placeholder(item: Any) -> bool:
    return isinstance(item, MegatronLMDummyDataLoader)


def _is_prepared(loader: Any) -> bool:
    return getattr(loader, "_prepared_for", None) is not None


def _is_megatron_schedule(item: Any) -> bool:
    return isinstance(item, (MegatronLMDummyScheduler, MegatronLMSchedulerWrapper))


def _object_kind(item: Any) -> str:
    if _is_placeholder(item):
        return "data_loader"
    return "scheduler" if isinstance(item, MegatronLMDummyScheduler) else kind_of(item)


def _splits(objects: Sequence[Any], loaders: Sequence[int]) -> list[int]:
    """Return the index of each loader placeholder's split: training, validation and test, in this order."""
    seen = 0
    splits = []
    for at in loaders:
        splits.append(min(seen, 2))
        seen += _is_placeholder(objects[at])
    return splits


# ---- the shard report. Each rank has a part of each layer of its pipeline stage.


def report_engine(strategy: Strategy) -> ShardReport:
    """Return the sizes of an engine's parameters, gradients and optimizer state on this rank.

    Args:
        strategy: The strategy, whose first model is its engine.
    """
    engine: Any = strategy.models[0]
    groups, plugin = megatron_setup.import_parallel_state(), engine.plugin
    axes = {
        "pp": (plugin.pp_degree, groups.get_pipeline_model_parallel_rank()),
        "dp": (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()),
        "tp": (plugin.tp_degree, groups.get_tensor_model_parallel_rank()),
    }
    parameters = list(shard_report.all_parameters([engine]))
    trained = _sum_sizes((p for p in parameters if p.requires_grad), plugin.tp_degree)
    layers = sum(type(part).__name__.endswith("TransformerLayer") for part in engine.modules())
    distributed = bool(plugin.use_distributed_optimizer) and axes["dp"][0] > 1
    return shard_report.make_report(
        strategy,
        _sum_sizes(parameters, plugin.tp_degree).sizes(),
        _gradients(engine, trained),
        _optimizer_state(engine, trained, axes["dp"][0] if distributed else 1),
        variant="distributed optimizer" if distributed else "",
        mesh=shard_report.axes_of_several_ranks(axes),
        stages="pp" if plugin.pp_degree > 1 else "",
        units=(layers, "layers of this stage" if plugin.pp_degree > 1 else "layers"),
    )


def _sum_sizes(parameters: Any, ranks: int) -> ShardTally:
    found = ShardTally()
    for parameter in parameters:
        here = parameter.numel() * parameter.element_size()
        split = ranks > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
        found += ShardTally(here * ranks if split else here, here, frozenset({"tp"} if split else ()))
    return found


def _gradients(engine: Any, trained: ShardTally) -> ShardSizes:
    """Return the size of the gradient buffers, whose precision often differs from the weights' precision."""
    buffers = [buffer for chunk in engine.module for buffer in getattr(chunk, "buffers", ())]
    here = sum(buffer.grad_data.nbytes for buffer in buffers if hasattr(buffer, "grad_data"))
    if not here or not trained.here:
        return trained.sizes()
    return ShardSizes(round(trained.whole * here / trained.here), here, tuple(trained.sharded))


def _optimizer_state(engine: Any, trained: ShardTally, shards: int) -> ShardSizes:
    """Return the size of the optimizer's state: its moments, and the master weights if it keeps any."""
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    inner: list[Any] = [optimizer.optimizer for optimizer in optimizers]
    count = shard_report.common_states_per_parameter(inner)
    sharded = (*trained.sharded, *(["dp"] if shards > 1 else []))
    if count is None or not trained.here:
        return ShardSizes(None, None, sharded)
    stepped = sum(p.numel() * p.element_size() for one in inner for group in one.param_groups for p in group["params"])
    weights = trained.here // shards
    masters = stepped > 1.5 * weights or (shards > 1 and stepped > 0)
    here = stepped * (count + masters)
    return ShardSizes(
        round(here * shards * trained.whole / trained.here), here, sharded, "", "with master weights" * masters
    )
