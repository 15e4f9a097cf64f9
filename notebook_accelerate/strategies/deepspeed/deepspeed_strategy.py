"""DeepSpeed: its engine owns precision, accumulation, clipping, step and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from notebook_accelerate.collectives.collective_watchdog import start_watchdog
from notebook_accelerate.config.deepspeed_config import AUTO
from notebook_accelerate.config.deepspeed_plugin import DummyOptim
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.deepspeed import (
    deepspeed_setup,
    engine_precision,
    initialize_arguments,
    zero_checkpoint,
    zero_shard_report,
)
from notebook_accelerate.strategies.deepspeed.engine_wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from notebook_accelerate.strategies.deepspeed.initialize_arguments import (
    Parts,
    map_pytorch_optim_to_deepspeed,
    parameters_of,
    part_kind,
)
from notebook_accelerate.strategies.deepspeed.op_compilation import compiling
from notebook_accelerate.strategies.engine_strategy import EngineStrategy
from notebook_accelerate.strategies.module_queries import compile_regions_deepspeed
from notebook_accelerate.strategies.strategy import NOTHING
from notebook_accelerate.strategies.strategy_setup import Setup
from notebook_accelerate.strategies.unwrap import extract_model_from_parallel
from notebook_accelerate.telemetry.sharding_events import ShardReport

_STEPS = "gradient_accumulation_steps"


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the DeepSpeed plugin in use.

    Args:
        state: An `AcceleratorState`.

    Returns:
        The plugin.

    Raises:
        ValueError: This world does not train by DeepSpeed.
    """
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            "no DeepSpeedPlugin is in use; pass one: Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)), and "
            "select one of several by AcceleratorState().select_deepspeed_plugin(name)"
        )
    return state.deepspeed_plugin


class DeepSpeedStrategy(EngineStrategy):
    """DeepSpeed's ZeRO in all its stages, on one engine for each Accelerator.

    Attributes:
        models: The engine, once a model was prepared.
        engine: The engine's wrapper; None before.
    """

    name: ClassVar[str] = "deepspeed"
    library: ClassVar[str] = "DeepSpeed"
    checkpoint_layout: ClassVar[str] = "deepspeed"
    engine: DeepSpeedEngineWrapper | None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._filled: dict[str, Any] = {}
        self._held = False
        deepspeed_setup.start(setup.state)
        for plugin in (setup.state.deepspeed_plugins or {}).values():
            plugin.set_mixed_precision(setup.state.mixed_precision)
        self.plugin.set_deepspeed_weakref()
        self._agree_on_steps()
        if setup.state.num_processes > 1:
            start_watchdog()  # otherwise save_state on some ranks only hangs: every rank writes a part

    @property
    def plugin(self) -> Any:
        """The plugin in use."""
        return get_active_deepspeed_plugin(self.setup.state)

    deepspeed_engine_wrapped = property(lambda self: self.engine, doc="The engine's wrapper, by Accelerate's name.")

    def _agree_on_steps(self) -> int:
        """Return the batches of a window: the configuration's number, or else the Accelerator's."""
        state, asked = self.setup.gradient_state, self.plugin.get_value(_STEPS, AUTO)
        if asked in {AUTO, state.num_steps}:
            return state.num_steps
        if state.num_steps != 1:
            warn_once(
                f"gradient_accumulation_steps={state.num_steps}, and the DeepSpeed configuration says {asked}, which "
                "holds; write 'auto' there to have the Accelerator's"
            )
        state.plugin_kwargs["num_steps"] = asked
        return int(asked)

    # -- preparing ----------------------------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """Prepare objects in any order; every rank must call this with the same kinds.

        Args:
            objects: Models, optimizers, loaders, schedulers. A model, its optimizer and its schedule come together.
            placements: For each, whether it goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared objects, in the order given.

        Raises:
            ValueError: Objects, or objects and configuration, contradict each other.
        """
        kinds = [part_kind(item) for item in objects]
        results = list(objects)
        places = {kind: [at for at, found in enumerate(kinds) if found == kind] for kind in set(kinds)}
        sizes = [self._batch_size(objects[at]) for at in places.get("data_loader", ())]
        for at in places.get("data_loader", ()):
            results[at] = self.prepare_data_loader(objects[at], placements[at])
        trained = self._trained(objects, places)
        for at in places.get("model", ()):
            if at != trained:
                results[at] = self.prepare_model(objects[at], placements[at])
        if trained is not None:
            self._start_engine(results, places, trained, sizes)
        for kind, prepare in (("optimizer", self.prepare_optimizer), ("scheduler", self.prepare_scheduler)):
            for at in places.get(kind, ()):
                results[at] = prepare(results[at])
        return results

    def _trained(self, objects: Sequence[Any], places: dict[str, list[int]]) -> int | None:
        """Return the place of the model that is trained; None where nothing new is."""
        optimizers = [objects[at] for at in places.get("optimizer", ()) if not self._knows(objects[at])]
        if not optimizers:
            return None
        if len(optimizers) > 1:
            raise ValueError(
                f"prepare() was given {len(optimizers)} optimizers, and a DeepSpeed engine has one; give one optimizer "
                "several parameter groups, or train the models by an Accelerator each"
            )
        if self.engine is not None:
            raise ValueError(
                "this Accelerator trains a model by DeepSpeed already; make another Accelerator for the second one, or "
                "let the first go: accelerator.free_memory()"
            )
        mine = {id(parameter) for parameter in parameters_of(optimizers[0])}
        owners = [at for at in places.get("model", ()) if mine & {id(p) for p in _bare(objects[at]).parameters()}]
        if len(owners) == 1 and mine <= {id(p) for p in _bare(objects[owners[0]]).parameters()}:
            return owners[0]
        raise ValueError(
            f"{type(optimizers[0]).__name__} has parameters of {len(owners)} of the {len(places.get('model', ()))} "
            "models given, or others too. DeepSpeed takes one model and its optimizer, made from that very model's "
            "parameters, together: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
        )

    def _batch_size(self, loader: Any) -> int | None:
        """Return the samples of a rank in one batch of a loader, prepared or not; None where it does not tell."""
        size = getattr(loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        shared = self.setup.dataloader_config.split_batches
        return size // self.setup.state.num_processes if shared and size is not None else size

    def _start_engine(
        self, objects: list[Any], places: dict[str, list[int]], trained: int, sizes: list[int | None]
    ) -> None:
        """Make the engine, and put what it has made of model, optimizer and schedule into their places."""
        (at_optimizer,) = (at for at in places["optimizer"] if not self._knows(objects[at]))
        schedules = places.get("scheduler", [])
        optimizer = objects[at_optimizer]
        if isinstance(optimizer, DummyOptim):
            optimizer.params = list(optimizer.params)
        parts = Parts(
            model=_bare(objects[trained]),
            optimizer=optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
            scheduler=_inner_schedule(objects[schedules[0]]) if schedules else None,
            batch_sizes=sizes or [self._batch_size(loader) for loader in self.dataloaders],
            steps=self._agree_on_steps(),
            world_size=self.setup.state.num_processes,
            split_batches=self.setup.dataloader_config.split_batches,
        )
        engine = self._engine_of(parts)
        objects[trained] = self.compile(engine)
        objects[at_optimizer] = self._optimizer_of(engine)
        if initialize_arguments.is_moved_by_engine(parts.scheduler):
            objects[schedules[0]] = DeepSpeedSchedulerWrapper(engine.lr_scheduler, self.optimizers)

    def _engine_of(self, parts: Parts) -> Any:
        """Make the engine of a training."""
        plugin = self.plugin
        initialize_arguments.check_parts(parts, plugin)
        initialize_arguments.refresh_autos(self._filled, plugin)
        follows_code = plugin.get_value("gradient_clipping", AUTO) == AUTO
        self._filled = initialize_arguments.fill_config(parts, plugin)
        engine_precision.in_fp8(parts.model, self.setup, plugin)
        if plugin.hf_ds_config.is_zero3():
            plugin.set_moe_leaf_modules(parts.model)
        engine = self._initialize(**initialize_arguments.engine_arguments(parts, plugin))
        clipping = None if follows_code else float(plugin.get_value("gradient_clipping"))
        self.engine = DeepSpeedEngineWrapper(engine, clipping)
        return engine

    def _initialize(self, **arguments: Any) -> Any:
        deepspeed = deepspeed_setup.load(self.setup.device)
        deepspeed_setup.check_abilities(self.plugin)
        deepspeed = engine_precision.initializer(deepspeed, self.plugin)
        with compiling():
            engine, *_ = deepspeed.initialize(dist_init_required=False, **arguments)
        engine_precision.in_halves(engine)
        deepspeed_setup.note_engine(engine)
        engine._is_accelerate_prepared = True
        self.models.append(engine)
        return engine

    def _optimizer_of(self, engine: Any) -> DeepSpeedOptimizerWrapper:
        prepared = DeepSpeedOptimizerWrapper(engine.optimizer, self.engine)
        prepared.gradient_state = self.setup.gradient_state
        prepared._is_accelerate_prepared = True
        self.optimizers.append(prepared)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model that is not trained here; every rank must call this.

        Args:
            model: The model.
            device_placement: Whether it goes to the device; None means the Accelerator's setting.
            evaluation_mode: Not used: without an optimizer there is nothing but evaluation.

        Returns:
            With stage 3 an engine, its parameters sharded; in other stages the model, whole.
        """
        if any(model is kept for kept in self.models):
            return model
        if not self.plugin.hf_ds_config.is_zero3() or evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        inner = _bare(model)
        engine_precision.in_fp8(inner, self.setup, self.plugin)
        self.plugin.set_moe_leaf_modules(inner)
        config = initialize_arguments.inference_config(inner, self.plugin, self.setup.state.num_processes)
        return self._initialize(model=inner, config=config)  # type: ignore[no-any-return]

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return an optimizer that was prepared with its model.

        Args:
            optimizer: The optimizer.
            device_placement: Not used: the engine places its state.

        Returns:
            The prepared optimizer.

        Raises:
            ValueError: It was not prepared with its model.
        """
        if self._knows(optimizer):
            return optimizer  # type: ignore[no-any-return]
        raise ValueError(
            f"DeepSpeed makes one engine of a model and its optimizer, and {type(optimizer).__name__} came without the "
            "model: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
        )

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a learning rate scheduler.

        Args:
            scheduler: The scheduler.

        Returns:
            The prepared scheduler; one that the engine moves is noted as it is.
        """
        if isinstance(scheduler, DeepSpeedSchedulerWrapper):
            scheduler._is_accelerate_prepared = True
            if not any(scheduler is kept for kept in self.schedulers):
                self.schedulers.append(scheduler)
            return scheduler
        return super().prepare_scheduler(scheduler)

    def compile(self, model: nn.Module) -> nn.Module:
        """Compile the model of an engine where the Accelerator was told to, in place.

        Args:
            model: The engine, or a model.

        Returns:
            The engine or model.
        """
        plugin = self.setup.dynamo_plugin
        engine: Any = model if self.engine is not None and model is self.engine.engine else None
        if engine is None:
            return super().compile(model)
        if plugin is None or plugin.backend in {None, "NO", "no"}:
            return model
        settings = plugin.to_kwargs()
        if plugin.use_regional_compilation:
            compile_regions_deepspeed(engine.module, **settings)
        else:
            engine.compile(backend=settings.pop("backend", "inductor"), compile_kwargs=settings)
        return model

    # -- training -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of a loss; every rank must call this.

        Args:
            loss: The loss, divided by the batches of a window already.
            kwargs: As for the engine's backward: `retain_graph`; with `scale_wrt_gas=False` the loss is taken as it
                was before it was divided.
        """
        if self.engine is None:
            super().backward(loss, **kwargs)
            return
        if not kwargs.pop("scale_wrt_gas", True):
            loss = loss * self.setup.gradient_state.num_steps
        complete = self.setup.gradient_state.sync_gradients and not self._held
        self.engine.backward(loss, sync_gradients=complete, scale_wrt_gas=False, **kwargs)

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context that does nothing: the engine is told at backward whether a window is complete.

        Args:
            models: Not used.

        Returns:
            A context manager.
        """
        return NOTHING

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Make backward accumulate inside the block, as inside a window.

        Args:
            model: Not used: there is one engine.

        Yields:
            Nothing.
        """
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def _held_norm(self) -> tuple[float | None, str]:
        assert self.engine is not None
        held = self.engine.clipping
        return held, (
            f"gradient_clipping={held} of the DeepSpeed configuration holds; write 'auto' there to have what the code "
            "says"
        )

    def _clip(self, max_norm: float) -> torch.Tensor:
        assert self.engine is not None
        whole = None if hasattr(self.engine.engine.optimizer, "_global_grad_norm") else self._norm_of_whole()
        self.engine.clip(max_norm)
        norm = self.engine.get_global_grad_norm() if whole is None else whole
        return torch.as_tensor(math.nan if norm is None else norm, dtype=torch.float32)

    def _norm_of_whole(self) -> torch.Tensor:
        """Return the norm of gradients that every rank has whole: in stage 0 in float32 the engine has none."""
        assert self.engine is not None
        gradients = [p.grad for p in self.engine.engine.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def sharding(self) -> ShardReport:
        """Return what this rank holds of parameters, gradients and optimizer state; nothing is asked of other ranks."""
        return super().sharding() if self.engine is None else zero_shard_report.of(self)

    # -- states -------------------------------------------------------------------------------------------------------

    def model_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state, in the precision it computes in; every rank must call this.

        Args:
            model: A prepared model.
            unwrap: Leave out what `prepare` put around the model.

        Returns:
            The state dict; with stage 3 in main memory on rank 0, and nothing on other ranks.

        Raises:
            ValueError: The configuration forbids to gather sharded weights.
        """
        engine: Any = model if any(model is kept for kept in self.models) else None
        if engine is None or not engine.zero_optimization_partition_weights():
            return super().model_state_dict(model, unwrap)
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ValueError(
                "stage3_gather_16bit_weights_on_model_save is false in the DeepSpeed configuration: weights stay "
                "sharded. Set it to true (DeepSpeedPlugin(zero3_save_16bit_model=True)), or save a checkpoint and run "
                "the zero_to_fp32.py that is in its folder"
            )
        return engine._zero3_consolidated_16bit_state_dict() or {}

    def save_state(self, folder: Path, safe_serialization: bool = True, **options: Any) -> None:
        """Write the engine into a folder, in DeepSpeed's own files; every rank must call this.

        Args:
            folder: A folder that all ranks share.
            safe_serialization: Not used: the formats are DeepSpeed's.
            options: As for the engine's `save_checkpoint`.
        """
        if self.engine is not None:
            zero_checkpoint.save_engine(self.engine.engine, folder, options)

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """Read the engine from a folder; every rank must call this.

        Args:
            folder: The checkpoint.
            models: The prepared models that no hook has loaded.
            options: As for the engine's `load_checkpoint`; `strict` says whether names must be those of the model.

        Raises:
            CheckpointMismatchError: The folder holds no such engine, or one of another number of ranks.
        """
        if self.engine is not None and any(self.engine.engine is wanted for wanted in models):
            zero_checkpoint.load_engine(self.engine.engine, folder, options, self.setup.state.num_processes)

    def clear(self) -> None:
        """Forget all prepared objects, and give the engine's memory back."""
        for engine in self.models:
            deepspeed_setup.end_engine(engine)
        self.engine = None
        super().clear()


def _bare(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


def _inner_schedule(scheduler: Any) -> Any:
    return scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler


__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DeepSpeedStrategy",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
]
