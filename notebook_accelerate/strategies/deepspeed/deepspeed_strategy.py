"""The DeepSpeed strategy: DeepSpeed's engine handles precision, accumulation, clipping, steps and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.collectives.communicator import start_watchdog
from notebook_accelerate.config.constants import MODEL_NAME
from notebook_accelerate.config.deepspeed_config import AUTO
from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state import AcceleratorState
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.deepspeed import deepspeed_engine, initialize_arguments
from notebook_accelerate.strategies.deepspeed.deepspeed_engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    compilation_context,
)
from notebook_accelerate.strategies.deepspeed.initialize_arguments import (
    EngineParts,
    object_kind,
    trained_parameters,
)
from notebook_accelerate.strategies.engine_strategy import PREPARE_TOGETHER, EngineStrategy
from notebook_accelerate.strategies.module_queries import compile_regions, without_wrappers
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.shard_report import ShardTally
from notebook_accelerate.strategies.strategy import NOTHING, indices_by_kind, inner_optimizer
from notebook_accelerate.telemetry.sharding import ShardReport, ShardSizes

if TYPE_CHECKING:
    from notebook_accelerate.strategies.strategy import Strategy


_LOG = accelerate_logger("accelerator")
_STEPS = "gradient_accumulation_steps"


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """Return the active DeepSpeed plugin.

    Args:
        state: This process's `AcceleratorState`.

    Returns:
        The plugin whose configuration the engine uses.

    Raises:
        ValueError: The ranks do not train with DeepSpeed.
    """
    plugin = state.deepspeed_plugin if state.distributed_type == DistributedType.DEEPSPEED else None
    if plugin is None:
        raise ValueError(
            "no DeepSpeedPlugin is active; pass one: Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)), and "
            "select one of several with AcceleratorState().select_deepspeed_plugin(name)"
        )
    return plugin


class DeepSpeedStrategy(EngineStrategy):
    """Trains with any stage of DeepSpeed's ZeRO, with one engine per Accelerator.

    Attributes:
        models: A list with the engine, once a model is prepared.
        engine: The engine's wrapper, or None before a model is prepared.
    """

    name: ClassVar[str] = "deepspeed"
    library: ClassVar[str] = "DeepSpeed"
    checkpoint_layout: ClassVar[str] = "deepspeed"
    all_ranks_save: ClassVar[bool] = True
    engine: DeepSpeedEngineWrapper | None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._filled: dict[str, Any] = {}
        self._accumulates = False
        deepspeed_engine.start_communication(setup.state)
        for plugin in (setup.state.deepspeed_plugins or {}).values():
            plugin.set_mixed_precision(setup.state.mixed_precision)
        self.plugin.set_deepspeed_weakref()
        self._resolve_accumulation_steps()
        if setup.state.num_processes > 1:
            # Each rank writes a part of a checkpoint. Without the watchdog, ranks would hang if only some called
            # save_state.
            start_watchdog()

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The active plugin."""
        return get_active_deepspeed_plugin(self.setup.state)

    deepspeed_engine_wrapped = property(lambda self: self.engine, doc="The engine's wrapper, under Accelerate's name.")

    def _resolve_accumulation_steps(self) -> int:
        """Return the number of batches per window from the configuration or, if it is "auto", from the Accelerator."""
        state, configured = self.setup.gradient_state, self.plugin.get_value(_STEPS, AUTO)
        if configured in {AUTO, state.num_steps}:
            return state.num_steps
        if state.num_steps != 1:
            _LOG.warning(
                "gradient_accumulation_steps=%s is ignored, because the DeepSpeed configuration has %s; write 'auto' "
                "there to use the Accelerator's number",
                state.num_steps,
                configured,
            )
        state.plugin_kwargs["num_steps"] = configured
        return int(configured)

    # ---- preparing

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """See `Strategy.prepare`. A model must be prepared together with its optimizer and its schedule.

        Raises:
            ValueError: The objects do not fit each other or the configuration.
        """
        results = list(objects)
        indices = indices_by_kind(objects, object_kind)
        sizes = [self._batch_size(objects[at]) for at in indices["data_loader"]]
        for at in indices["data_loader"]:
            results[at] = self.prepare_data_loader(objects[at], placements[at])
        trained = self._trained_model(objects, indices)
        for at in indices["model"]:
            if at != trained:
                results[at] = self.prepare_model(objects[at], placements[at])
        if trained is not None:
            self._start_engine(results, indices, trained, sizes)
        for kind, prepare in (("optimizer", self.prepare_optimizer), ("scheduler", self.prepare_scheduler)):
            for at in indices[kind]:
                results[at] = prepare(results[at])
        return results

    def _trained_model(self, objects: Sequence[Any], indices: Mapping[str, list[int]]) -> int | None:
        """Return the index of the model that the new optimizer trains, or None if there is no new optimizer."""
        optimizers = [objects[at] for at in self._new_optimizers(objects, indices)]
        if not optimizers:
            return None
        if len(optimizers) > 1:
            raise ValueError(
                f"prepare() was given {len(optimizers)} optimizers, but a DeepSpeed engine has one; give one optimizer "
                "several parameter groups, or train each model with its own Accelerator"
            )
        if self.engine is not None:
            raise ValueError(
                "this Accelerator already trains a model with DeepSpeed; create another Accelerator for the second "
                "model, or free the first: accelerator.free_memory()"
            )
        trained = {id(parameter) for parameter in trained_parameters(optimizers[0])}
        owned = {at: {id(p) for p in without_wrappers(objects[at]).parameters()} for at in indices["model"]}
        owners = [at for at, parameters in owned.items() if trained & parameters]
        if len(owners) == 1 and trained <= owned[owners[0]]:
            return owners[0]
        raise ValueError(
            f"{type(optimizers[0]).__name__} has parameters of {len(owners)} of the {len(owned)} models given, or "
            "other parameters. Prepare one model together with the optimizer of its parameters: " + PREPARE_TOGETHER
        )

    def _batch_size(self, loader: Any) -> int | None:
        """Return a rank's number of samples in one batch of a loader, or None if the loader has no batch size."""
        size = getattr(loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        split = self.setup.dataloader_config.split_batches
        return size // self.setup.state.num_processes if split and size is not None else size

    def _start_engine(
        self, objects: list[Any], indices: Mapping[str, list[int]], trained: int, sizes: list[int | None]
    ) -> None:
        """Create the engine, and replace the model, optimizer and schedule with the engine's."""
        (at_optimizer,) = self._new_optimizers(objects, indices)
        schedules = indices["scheduler"]
        parts = EngineParts(
            model=without_wrappers(objects[trained]),
            optimizer=inner_optimizer(objects[at_optimizer]),
            scheduler=_unwrapped_schedule(objects[schedules[0]]) if schedules else None,
            batch_sizes=sizes or [self._batch_size(loader) for loader in self.dataloaders],
            steps=self._resolve_accumulation_steps(),
            world_size=self.setup.state.num_processes,
            split_batches=self.setup.dataloader_config.split_batches,
        )
        engine = self._make_engine(parts)
        objects[trained] = self.compile(engine)
        objects[at_optimizer] = self.keep(DeepSpeedOptimizerWrapper(engine.optimizer, self.engine), self.optimizers)
        if initialize_arguments.is_stepped_by_engine(parts.scheduler):
            objects[schedules[0]] = DeepSpeedSchedulerWrapper(engine.lr_scheduler, self.optimizers)

    def _make_engine(self, parts: EngineParts) -> Any:
        """Create the engine that trains the model."""
        plugin = self.plugin
        initialize_arguments.check_parts(parts, plugin)
        initialize_arguments.refresh_autos(self._filled, plugin)
        clips_by_call = plugin.get_value("gradient_clipping", AUTO) == AUTO
        self._filled = initialize_arguments.fill_config(parts, plugin)
        # Check before the arguments of the engine are made, which may compile an optimizer for minutes.
        deepspeed_engine.check_support(plugin)
        deepspeed_engine.convert_to_fp8(parts.model, self.setup, plugin)
        if plugin.hf_ds_config.is_zero3():
            plugin.set_moe_leaf_modules(parts.model)
        engine = self._initialize(**initialize_arguments.engine_arguments(parts, plugin))
        clipping = None if clips_by_call else float(plugin.get_value("gradient_clipping"))
        self.engine = DeepSpeedEngineWrapper(engine, clipping)
        return engine

    def _initialize(self, **arguments: Any) -> Any:
        deepspeed = deepspeed_engine.import_deepspeed(self.setup.device)
        deepspeed = deepspeed_engine.initialize_module(deepspeed, self.plugin)
        with compilation_context():
            engine, *_ = deepspeed.initialize(dist_init_required=False, **arguments)
        deepspeed_engine.add_half_precision_casts(engine)
        deepspeed_engine.track_engine(engine)
        engine._is_accelerate_prepared = True
        self.models.append(engine)
        return engine

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See `Strategy.prepare_model`. A model without an optimizer can only be evaluated. Every rank must call this.

        Returns:
            An engine with sharded parameters if stage 3 is used and `evaluation_mode` is False, otherwise the whole
            model.
        """
        if any(model is kept for kept in self.models):
            return model
        if not self.plugin.hf_ds_config.is_zero3() or evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        inner = without_wrappers(model)
        deepspeed_engine.check_support(self.plugin)
        deepspeed_engine.convert_to_fp8(inner, self.setup, self.plugin)
        self.plugin.set_moe_leaf_modules(inner)
        config = initialize_arguments.inference_config(inner, self.plugin, self.setup.state.num_processes)
        return self._initialize(model=inner, config=config)  # type: ignore[no-any-return]

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """See `Strategy.prepare_scheduler`. A schedule that the engine steps is returned as it is."""
        if isinstance(scheduler, DeepSpeedSchedulerWrapper):
            known = any(scheduler is kept for kept in self.schedulers)
            return scheduler if known else self.keep(scheduler, self.schedulers)
        return super().prepare_scheduler(scheduler)

    def compile(self, model: nn.Module) -> nn.Module:
        """See `Strategy.compile`. The model of an engine is compiled in place."""
        plugin = self.setup.dynamo_plugin
        engine: Any = model if self.engine is not None and model is self.engine.engine else None
        if engine is None:
            return super().compile(model)
        if plugin is None or plugin.backend in {None, "NO", "no"}:
            return model
        settings = plugin.to_kwargs()
        if plugin.use_regional_compilation:
            compile_regions(engine.module, **settings)
        else:
            engine.compile(backend=settings.pop("backend", "inductor"), compile_kwargs=settings)
        return model

    # ---- training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """See `Strategy.backward`; every rank must call this.

        Args:
            loss: The loss, already divided by the number of batches in a window.
            kwargs: The arguments of the engine's `backward`: `retain_graph`, and `scale_wrt_gas`, which undoes that
                division if False.
        """
        if self.engine is None:
            super().backward(loss, **kwargs)
            return
        if not kwargs.pop("scale_wrt_gas", True):
            loss = loss * self.setup.gradient_state.num_steps
        complete = self.setup.gradient_state.sync_gradients and not self._accumulates
        self.engine.backward(loss, sync_gradients=complete, scale_wrt_gas=False, **kwargs)

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context that does nothing, because `backward` signals to the engine when a window is complete."""
        return NOTHING

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """See `Strategy.no_sync`. The engine accumulates gradients inside the block."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def _configured_norm(self) -> tuple[float | None, str]:
        assert self.engine is not None
        norm = self.engine.clipping
        return norm, (
            f"gradient_clipping={norm} of the DeepSpeed configuration is used; write 'auto' there to use the argument"
        )

    def _step_clipped(self, max_norm: float) -> torch.Tensor:
        assert self.engine is not None
        norm = None if hasattr(self.engine.engine.optimizer, "_global_grad_norm") else self._unsharded_norm()
        self.engine.clip(max_norm)
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        return torch.as_tensor(math.nan if norm is None else norm, dtype=torch.float32)

    def _unsharded_norm(self) -> torch.Tensor:
        """Return the norm of unsharded gradients. In stage 0 with float32, the engine does not compute it."""
        assert self.engine is not None
        gradients = [p.grad for p in self.engine.engine.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def sharding(self) -> ShardReport:
        return super().sharding() if self.engine is None else report_engine(self)

    # ---- states

    def model_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """See `Strategy.model_state_dict`. Weights are returned in the model's precision. Every rank must call this.

        Returns:
            The state dict. With stage 3, tensors are in CPU memory, and only rank 0 gets them; other ranks get an empty
            dict.

        Raises:
            ValueError: The configuration does not allow sharded weights to be gathered.
        """
        engine: Any = model if any(model is kept for kept in self.models) else None
        if engine is None or not engine.zero_optimization_partition_weights():
            return super().model_state_dict(model, unwrap)
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ValueError(
                "stage3_gather_16bit_weights_on_model_save is false in the DeepSpeed configuration: weights stay "
                "sharded. Set it to true (DeepSpeedPlugin(zero3_save_16bit_model=True)), or save a checkpoint and run "
                "the zero_to_fp32.py in its folder"
            )
        return engine._zero3_consolidated_16bit_state_dict() or {}

    def save_state(self, folder: Path, safe_serialization: bool = True, **options: Any) -> None:
        """See `Strategy.save_state`. The files have DeepSpeed's formats. Every rank must call this.

        Args:
            folder: A folder that all ranks share.
            safe_serialization: Not used, because DeepSpeed determines the file formats.
            options: The arguments of the engine's `save_checkpoint`.
        """
        if self.engine is not None:
            save_engine(self.engine.engine, folder, options)

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """See `Strategy.load_state` and `load_engine`; every rank must call this."""
        if self.engine is not None and any(self.engine.engine is wanted for wanted in models):
            load_engine(self.engine.engine, folder, options, self.setup.state.num_processes)

    def clear(self) -> None:
        """Forget all prepared objects, and free the engines' memory."""
        for engine in self.models:
            deepspeed_engine.destroy_engine(engine)
        self.engine = None
        super().clear()


def _unwrapped_schedule(scheduler: Any) -> Any:
    return scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler


# ---- checkpoints, which contain DeepSpeed's own files under Accelerate's names


def save_engine(engine: Any, folder: Path, options: dict[str, Any]) -> None:
    """Write an engine to a folder; every rank must call this.

    Args:
        engine: The engine to save.
        folder: A folder that all ranks share. The engine writes ``pytorch_model/``, ``latest`` and ``zero_to_fp32.py``.
        options: The arguments of the engine's `save_checkpoint`.
    """
    _call_with_options("save_state", engine.save_checkpoint, str(folder), MODEL_NAME, **options)


def load_engine(engine: Any, folder: Path, options: dict[str, Any], ranks: int) -> None:
    """Read an engine from a folder; every rank must call this.

    Args:
        engine: The engine to load.
        folder: The folder of the checkpoint.
        options: The arguments of the engine's `load_checkpoint`, and `strict`, which says whether all names must match
            the model's.
        ranks: The number of ranks that load the engine.

    Raises:
        CheckpointMismatchError: The folder does not contain this engine, or the engine was saved by a different number
            of ranks.
    """
    if "strict" in options:
        options["load_module_strict"] = options.pop("strict")
    saved = folder / MODEL_NAME
    shards = len(list(saved.glob("*_optim_states.pt")))
    optimizer = options.get("load_optimizer_states", True)
    if optimizer and shards not in {0, ranks} and not engine.load_universal_checkpoint():
        raise CheckpointMismatchError(
            f"{saved} contains the optimizer's state in {shards} shards, one per rank, but this run has {ranks} ranks. "
            "Convert it (python -m deepspeed.checkpoint.ds_to_universal) and set "
            '{"checkpoint": {"load_universal": true}} in the DeepSpeed configuration, or load the weights alone: '
            "load_state(folder, elastic=True, load_optimizer_states=False)"
        )
    with torch.serialization.safe_globals(_own_classes()):
        path, _ = _call_with_options("load_state", engine.load_checkpoint, str(folder), MODEL_NAME, **options)
    if path is None:
        raise CheckpointMismatchError(
            f"{folder} contains no {MODEL_NAME}/ that DeepSpeed can read. Prepare the same model as before saving."
        )


def _own_classes() -> list[Any]:
    """Return DeepSpeed's classes that its files may contain. Everything else in the files is read as plain data.

    These classes are safe to load: they only hold attributes, and loading them runs no code.
    """
    scaler = import_module("deepspeed.runtime.fp16.loss_scaler")
    fragments = import_module("deepspeed.utils.tensor_fragment")
    stages = import_module("deepspeed.runtime.zero.config")
    return [scaler.LossScaler, scaler.DynamicLossScaler, fragments.fragment_address, stages.ZeroStageEnum]


def _call_with_options(call: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a method of the engine with the user's options, and raise ValueError for an unknown option."""
    try:
        return function(*args, **options)
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            raise ValueError(f"{call} with DeepSpeed: {error}; leave it out") from error
        raise


# ---- the shard report. ZeRO shards optimizer states from stage 1 on, gradients from stage 2 on, parameters in stage 3


def report_engine(strategy: Strategy) -> ShardReport:
    """Return the sizes of an engine's parameters, gradients and optimizer state on this rank.

    Args:
        strategy: The strategy, whose first model is its engine.
    """
    engine: Any = strategy.models[0]
    stage = int(engine.zero_optimization_stage())
    mesh = shard_report.mesh_axes(strategy, "dp")
    over = [name for name in mesh[0] if name not in {"tp", "pp"}] if stage else []
    ranks = max(1, int(getattr(engine, "seq_dp_world_size", 0) or engine.dp_world_size))
    parameters = list(shard_report.all_parameters(strategy.models))
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = _sum_sizes(trained, over if stage > 1 else [], ranks)
    return shard_report.make_report(
        strategy,
        _sum_sizes(parameters, over if stage > 2 else [], ranks).sizes(
            _offload_device(engine.zero_offload_param()), "gathered layer by layer" if stage > 2 else ""
        ),
        gradients.sizes(_offload_device(engine.zero_offload_optimizer()) if stage > 1 else ""),
        _optimizer_state(engine, _sum_sizes(trained, over, ranks), sum(map(_element_count, trained))),
        variant=f"ZeRO-{stage}",
        mesh=mesh,
    )


def _element_count(parameter: Any) -> int:
    """Return the number of elements of a parameter.

    DeepSpeed keeps this number if stage 3 has emptied the parameter.
    """
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _sum_sizes(parameters: Iterable[Any], over: list[str], ranks: int) -> ShardTally:
    found = ShardTally()
    for parameter in parameters:
        whole = _element_count(parameter) * parameter.element_size()
        here = math.ceil(whole / ranks) if over else whole  # The last part is padded.
        found += ShardTally(whole, here, frozenset(over))
    return found


def _optimizer_state(engine: Any, trained: ShardTally, elements: int) -> ShardSizes:
    """Return the size of the optimizer's state: its moments, and any master weights kept apart from the model's."""
    optimizer = engine.optimizer
    offloaded = _offload_device(engine.zero_offload_optimizer())
    basic = getattr(optimizer, "optimizer", optimizer)
    count = shard_report.common_states_per_parameter([basic])
    masters = _master_weights(optimizer, basic)
    if count is None or not masters:
        return trained.state_sizes(count, offloaded)
    own = {tensor.data_ptr() for tensor in getattr(optimizer, "fp16_partitioned_groups_flat", engine.parameters())}
    kept = [tensor for tensor in masters if tensor.data_ptr() not in own]
    size = masters[0].element_size()
    here = sum(t.numel() for t in masters) * size * count + sum(t.numel() for t in kept) * size
    whole = elements * size * (count + bool(kept))
    return ShardSizes(whole, here, tuple(trained.sharded), offloaded, "with master weights" if kept else "")


def _master_weights(optimizer: Any, basic: Any) -> list[torch.Tensor]:
    """Return this rank's weights that the optimizer updates.

    In its step, stage 3 passes the weights to the optimizer one by one, so the parameter groups do not contain them.
    """
    found = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return list(found) if found else [parameter for group in basic.param_groups for parameter in group["params"]]


def _offload_device(offload: Any) -> str:
    """Return the device of an offloading configuration, or "" if nothing is offloaded."""
    device = getattr(offload, "device", None)
    name = str(getattr(device, "value", device) or "none")  # Some versions of DeepSpeed use a string, others an enum.
    return "" if name == "none" else name
