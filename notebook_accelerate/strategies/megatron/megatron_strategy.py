"""Megatron-LM on megatron-core: its engine owns precision, micro-batches, clipping, step and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accelerate.collectives.collective_watchdog import start_watchdog
from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.engine_strategy import EngineStrategy
from notebook_accelerate.strategies.megatron import (
    megatron_checkpoint,
    megatron_models,
    megatron_setup,
    megatron_shard_report,
    model_parts,
)
from notebook_accelerate.strategies.megatron.forward_steps import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    T5TrainStep,
)
from notebook_accelerate.strategies.megatron.megatron_engine import (
    MegatronEngine,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)
from notebook_accelerate.strategies.megatron.megatron_loaders import (
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    micro_batch_size_of,
    with_windows,
)
from notebook_accelerate.strategies.strategy import NOTHING, kind_of
from notebook_accelerate.strategies.strategy_setup import Setup
from notebook_accelerate.strategies.unwrap import extract_model_from_parallel
from notebook_accelerate.telemetry.sharding_events import ShardReport

_TOGETHER = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


def megatron_lm_initialize(accelerator: Any, args_defaults: dict[str, Any] | None = None) -> None:
    """Arrange the ranks by the degrees of the plugin; every rank must call this.

    Args:
        accelerator: An object with the `state` of the world.
        args_defaults: More of Megatron's arguments.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The degrees do not make the world.
    """
    plugin = accelerator.state.megatron_lm_plugin
    plugin.megatron_lm_default_args |= args_defaults or {}
    megatron_setup.start(accelerator.state, plugin)


def megatron_lm_prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[list[nn.Module], Any, Any]:
    """Make model, optimizer and schedule of the plugin's arguments; every rank must call this.

    Args:
        accelerator: An object with the `state` of the world.

    Returns:
        This rank's parts of the model, Megatron's optimizer, and its schedule.
    """
    plugin = accelerator.state.megatron_lm_plugin
    arguments = plugin.megatron_lm_default_args
    if plugin.custom_prepare_model_function is not None:
        made = plugin.custom_prepare_model_function(accelerator)
        chunks = list(made) if isinstance(made, (list, tuple)) else [made]
    else:
        chunks = megatron_models.make_chunks(plugin, accelerator.state.device)
    if not hasattr(chunks[0], "zero_grad_buffer"):
        chunks = megatron_models.wrap_chunks(chunks, arguments)
    optimizer = megatron_models.make_optimizer(chunks, plugin)
    scheduled = bool(getattr(plugin, "scheduled", False))
    return chunks, optimizer, megatron_models.make_schedule(optimizer, plugin, scheduled)


def megatron_lm_prepare_optimizer(accelerator: Any, model: Any) -> Any:
    """Make Megatron's optimizer for a wrapped model; every rank must call this.

    Args:
        accelerator: An object with the `state` of the world.
        model: This rank's parts of the model.

    Returns:
        A `MegatronOptimizer`.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    return megatron_models.make_optimizer(chunks, accelerator.state.megatron_lm_plugin)


def megatron_lm_prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """Make Megatron's schedule for an optimizer of its own.

    Args:
        accelerator: An object with the `state` of the world.
        optimizer: A `MegatronOptimizer`.
        scheduler: A `MegatronLMDummyScheduler`; None: the learning rate is constant.

    Returns:
        An `OptimizerParamScheduler`.
    """
    plugin = accelerator.state.megatron_lm_plugin
    if scheduler is not None:
        plugin.set_scheduler_args(scheduler)
    return megatron_models.make_schedule(optimizer, plugin, scheduler is not None)


def megatron_lm_prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """Make a loader of windows for this rank; every rank must call this.

    Args:
        accelerator: The Accelerator.
        dataloader: A DataLoader of micro-batches, or a `MegatronLMDummyDataLoader`.

    Returns:
        The loader; for the stand-in those of the three splits.
    """
    if isinstance(dataloader, MegatronLMDummyDataLoader):
        return [
            loader if loader is None else accelerator.prepare_data_loader(loader)
            for loader in dataloader.build_loaders(accelerator)
        ]
    return accelerator.prepare_data_loader(dataloader)


class MegatronLMStrategy(EngineStrategy):
    """Layers split over `tp_degree` ranks, stages over `pp_degree`, data over the rest.

    The model given says by its configuration which one is made; a window of accumulation is `num_micro_batches`
    batches, which the prepared loader gives at once.

    Attributes:
        models: The engine, once a model was prepared.
        engine: The engine; None before.
    """

    name: ClassVar[str] = "megatron_lm"
    library: ClassVar[str] = "Megatron-LM"
    checkpoint_layout: ClassVar[str] = "megatron"
    engine: MegatronEngine | None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if not isinstance(setup.state.megatron_lm_plugin, MegatronLMPlugin):
            raise ValueError(
                f"megatron_lm_plugin is a {type(setup.state.megatron_lm_plugin).__name__}; pass a MegatronLMPlugin"
            )
        self.plugin.set_mixed_precision(setup.state.mixed_precision)
        self._agree_on_steps()
        megatron_lm_initialize(setup)
        self._groups = megatron_setup.check_degrees(self.plugin, setup.state.num_processes)
        if setup.state.num_processes > 1:
            start_watchdog()  # otherwise save_state on some ranks only hangs: every rank writes a part

    @property
    def plugin(self) -> Any:
        """The plugin in use."""
        return self.setup.state.megatron_lm_plugin

    def _agree_on_steps(self) -> None:
        """Make a window of accumulation one batch of the prepared loaders, which has all micro-batches."""
        state, plugin = self.setup.gradient_state, self.plugin
        if state.num_steps > 1:
            if plugin._micro_batches_given and plugin.num_micro_batches != state.num_steps:
                raise ValueError(
                    f"gradient_accumulation_steps={state.num_steps} and num_micro_batches={plugin.num_micro_batches} "
                    "contradict each other: micro-batches are the accumulation of Megatron-LM; leave one of them out"
                )
            plugin.num_micro_batches = state.num_steps
            plugin.megatron_lm_default_args["num_micro_batches"] = state.num_steps
            plugin._micro_batches_given = True
        state.plugin_kwargs["num_steps"] = 1

    # -- preparing ----------------------------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """Prepare objects in any order; every rank must call this with the same kinds.

        Args:
            objects: A model and its optimizer, with its `MegatronLMDummyScheduler`; loaders.
            placements: For each, whether it goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared objects, in the order given.

        Raises:
            ValueError: Objects, or objects and plugin, contradict each other.
        """
        kinds = [_kind(item) for item in objects]
        results = list(objects)
        places = {kind: [at for at, found in enumerate(kinds) if found == kind] for kind in set(kinds)}
        new = [at for at in places.get("model", ()) if results[at] is not self.engine]
        self._check(results, places, new)
        if new:
            self._read(results, places, new[0])
        loaders = places.get("data_loader", [])
        for at, split in zip(loaders, _splits(results, loaders), strict=True):
            results[at] = self._loader_of(results[at], split, placements[at])
        if new:
            self._start_engine(results, places, new[0])
        return results

    def _check(self, objects: Sequence[Any], places: dict[str, list[int]], models: list[int]) -> None:
        """Refuse what does not make an engine."""
        optimizers = [objects[at] for at in places.get("optimizer", ()) if not self._is_prepared_optimizer(objects[at])]
        plain = [objects[at] for at in places.get("scheduler", ()) if not _is_schedule_of_megatron(objects[at])]
        if plain:
            raise ValueError(
                f"Megatron-LM makes and moves the learning rate's schedule itself, and prepare() was given a "
                f"{type(plain[0]).__name__}; pass MegatronLMDummyScheduler(optimizer, total_num_steps=..., "
                "warmup_num_steps=...)"
            )
        if len(models) != len(optimizers) or len(models) > 1:
            raise ValueError(
                f"prepare() was given {len(models)} models and {len(optimizers)} optimizers; Megatron-LM makes one "
                f"engine of one model and its optimizer, together: {_TOGETHER}"
            )
        if models and self.engine is not None:
            raise ValueError(
                "this Accelerator trains a model by Megatron-LM already; let it go first: accelerator.free_memory()"
            )

    def _read(self, objects: Sequence[Any], places: dict[str, list[int]], model: int) -> None:
        """Take shape, precision and settings over from the objects given."""
        plugin = self.plugin
        if plugin.custom_model_provider_function is None and plugin.custom_prepare_model_function is None:
            plugin.set_network_size_args(extract_model_from_parallel(objects[model], keep_torch_compile=False))
            warn_once(
                "Megatron-LM makes a model of its own from the configuration of the one given, whose weights are not "
                "taken over; load weights with accelerator.load_state(folder)"
            )
        loaders = [objects[at] for at in places.get("data_loader", ())]
        plain = [loader for loader in loaders if isinstance(loader, DataLoader) and not _is_prepared(loader)]
        split = self.setup.dataloader_config.split_batches
        if plain:
            plugin.set_training_args(micro_batch_size_of(plain[0], split, self._groups), self._groups)
        elif not hasattr(plugin, "global_batch_size"):
            size = next((item.dataset_args.get("micro_batch_size", 1) for item in loaders if _is_stand_in(item)), 1)
            plugin.set_training_args(size, self._groups)
        (at,) = (at for at in places["optimizer"] if not self._is_prepared_optimizer(objects[at]))
        given = objects[at]
        plugin.set_optimizer_type(given.optimizer if isinstance(given, AcceleratedOptimizer) else given)
        schedules = places.get("scheduler", [])
        plugin.scheduled = bool(schedules)
        if schedules:
            plugin.set_scheduler_args(objects[schedules[0]])

    def _start_engine(self, objects: list[Any], places: dict[str, list[int]], model: int) -> None:
        """Make the engine, and put what it has made of model, optimizer and schedule into their places."""
        chunks, optimizer, schedule = megatron_lm_prepare_model_optimizer_scheduler(self.setup)
        engine = self.engine = MegatronEngine(self.setup, chunks, optimizer, schedule)
        engine._is_accelerate_prepared = True  # type: ignore[assignment]
        self.models.append(engine)
        wrapper = MegatronLMOptimizerWrapper(optimizer, engine)
        wrapper.gradient_state = self.setup.gradient_state
        wrapper._is_accelerate_prepared = True
        self.optimizers.append(wrapper)
        (at,) = (at for at in places["optimizer"] if not self._is_prepared_optimizer(objects[at]))
        objects[model], objects[at] = engine, wrapper
        for place in places.get("scheduler", ()):
            objects[place] = MegatronLMSchedulerWrapper(schedule, self.optimizers)
            objects[place]._is_accelerate_prepared = True
            self.schedulers.append(objects[place])

    def _loader_of(self, loader: Any, split: int, placement: bool | None) -> Any:
        if not _is_stand_in(loader):
            return self.prepare_data_loader(loader, placement)
        made = loader.build_loaders(self.setup)[split]
        return None if made is None else self.prepare_data_loader(made, placement)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """Prepare a loader: its batches become windows of `num_micro_batches` of them.

        Args:
            data_loader: The loader.
            device_placement: Whether batches go to the device; None means the Accelerator's setting.
            slice_fn_for_dispatch: How a batch that rank 0 reads is cut for the ranks; None: by the first dimension.

        Returns:
            The prepared loader; ranks that hold one model together read the same windows.
        """
        if not _is_prepared(data_loader):
            micro_batch_size_of(data_loader, self.setup.dataloader_config.split_batches, self._groups)
            data_loader = with_windows(data_loader, self.plugin.num_micro_batches)
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def _loader_settings(self) -> dict[str, Any]:
        rank = megatron_setup.load().get_data_parallel_rank()
        return {
            **super()._loader_settings(),
            "num_processes": self._groups,
            "process_index": rank,
            "torch_device_mesh": None,
        }

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the engine, or prepare a model that is only evaluated: it stays whole.

        Args:
            model: The model.
            device_placement: Whether it goes to the device; None means the Accelerator's setting.
            evaluation_mode: Prepare it for inference only.

        Returns:
            The model.

        Raises:
            ValueError: It is to be trained, and came without its optimizer.
        """
        if evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        if model is self.engine:
            return model
        raise ValueError(
            f"Megatron-LM makes one engine of a model and its optimizer, and {type(model).__name__} came alone: "
            f"{_TOGETHER}"
        )

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return an optimizer that was prepared with its model.

        Args:
            optimizer: The optimizer.
            device_placement: Not used: the engine places its state.

        Raises:
            ValueError: It was not prepared with its model.
        """
        if self._is_prepared_optimizer(optimizer):
            return optimizer  # type: ignore[no-any-return]
        raise ValueError(
            f"Megatron-LM makes one engine of a model and its optimizer, and {type(optimizer).__name__} came alone: "
            f"{_TOGETHER}"
        )

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Return a schedule that was prepared with its model.

        Args:
            scheduler: The schedule.

        Raises:
            ValueError: It was not prepared with its model.
        """
        if isinstance(scheduler, MegatronLMSchedulerWrapper):
            return scheduler
        raise ValueError(
            "Megatron-LM makes and moves the learning rate's schedule itself: model, optimizer, scheduler = "
            "accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer, total_num_steps=...))"
        )

    # -- training -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Do nothing: the model's call has computed the gradients.

        Args:
            loss: The loss that the model returned.
            kwargs: Not used.
        """

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context that does nothing: a window is one call of the model.

        Args:
            model: Not used.
        """
        return NOTHING

    def _held_norm(self) -> tuple[float | None, str]:
        held = self.plugin.gradient_clipping if self.plugin._clipping_given else None
        return held, (
            f"MegatronLMPlugin(gradient_clipping={held}) holds; leave it out of the plugin to have what the code says"
        )

    def _clip(self, max_norm: float) -> torch.Tensor:
        assert self.engine is not None
        self.engine.clip(max_norm)
        return torch.tensor(self.engine.grad_norm, dtype=torch.float32)

    def sharding(self) -> ShardReport:
        """Return what this rank holds of parameters, gradients and optimizer state; nothing is asked of other ranks."""
        return super().sharding() if self.engine is None else megatron_shard_report.of(self)

    # -- states -------------------------------------------------------------------------------------------------------

    def model_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state; every rank must call this.

        Args:
            model: A prepared model.
            unwrap: Leave out what `prepare` put around the model.

        Returns:
            The state dict, by the names that the model has on one rank; where ranks have parts of the model, in main
            memory on rank 0, and nothing on other ranks.
        """
        if model is self.engine and self.engine is not None:
            return model_parts.whole_state(self.engine)
        return super().model_state_dict(model, unwrap)

    def save_state(self, folder: Path, safe_serialization: bool = True, **options: Any) -> None:
        """Write the engine into a folder, in megatron-core's files; every rank must call this.

        Args:
            folder: A folder that all ranks share.
            safe_serialization: Not used: the formats are megatron-core's.
            options: None is known.

        Raises:
            ValueError: An option is not known.
        """
        if options:
            raise ValueError(f"save_state with Megatron-LM knows no {', '.join(options)}; leave it out")
        if self.engine is not None:
            megatron_checkpoint.save(self.engine, folder)

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """Read the engine from a folder, written with these or other degrees; every rank must call this.

        Args:
            folder: The checkpoint.
            models: The prepared models that no hook has loaded.
            options: `strict`: whether the names must be those of the model.

        Raises:
            CheckpointMismatchError: The folder holds no such engine.
            ValueError: An option is not known.
        """
        strict = options.pop("strict", True)
        if options:
            raise ValueError(f"load_state with Megatron-LM knows no {', '.join(options)}; leave it out")
        if self.engine is not None and any(self.engine is wanted for wanted in models):
            megatron_checkpoint.load(self.engine, folder, strict)

    def clear(self) -> None:
        """Forget all prepared objects."""
        self.engine = None
        super().clear()


def _is_stand_in(item: Any) -> bool:
    return isinstance(item, MegatronLMDummyDataLoader)


def _is_prepared(loader: Any) -> bool:
    return getattr(loader, "_prepared_for", None) is not None


def _is_schedule_of_megatron(item: Any) -> bool:
    return isinstance(item, (MegatronLMDummyScheduler, MegatronLMSchedulerWrapper))


def _kind(item: Any) -> str:
    if _is_stand_in(item):
        return "data_loader"
    return "scheduler" if isinstance(item, MegatronLMDummyScheduler) else kind_of(item)


def _splits(objects: Sequence[Any], loaders: Sequence[int]) -> list[int]:
    """Return which split each of the stand-ins for loaders is: those given first are the training's."""
    seen = 0
    splits = []
    for at in loaders:
        splits.append(min(seen, 2))
        seen += _is_stand_in(objects[at])
    return splits


__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "MegatronLMStrategy",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
    "megatron_lm_initialize",
    "megatron_lm_prepare_data_loader",
    "megatron_lm_prepare_model_optimizer_scheduler",
    "megatron_lm_prepare_optimizer",
    "megatron_lm_prepare_scheduler",
]
