"""`Accelerator`, a facade that checks arguments, delegates to a strategy or a package, and wraps the results."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from notebook_accelerate import checkpointing, collectives, tracking
from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import DynamoBackend, LoggerType, PrecisionType, RNGType
from notebook_accelerate.config.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from notebook_accelerate.config.launch_config import takes_launch_arguments
from notebook_accelerate.config.parallelism_config import ParallelismConfig
from notebook_accelerate.config.plain_values import check_type
from notebook_accelerate.data_loader import skip_first_batches
from notebook_accelerate.hardware.versions import check_os_kernel
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.precision import make_precision
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.strategies import accelerator_arguments, make_strategy
from notebook_accelerate.strategies.accelerator_arguments import Setup, sort_handlers
from notebook_accelerate.strategies.accelerator_properties import AcceleratorProperties
from notebook_accelerate.strategies.context_parallel import make_attention_causal
from notebook_accelerate.strategies.ddp_strategy import synchronised_backward
from notebook_accelerate.strategies.module_queries import extract_model_from_parallel, is_on_several_devices
from notebook_accelerate.strategies.strategy import NOTHING
from notebook_accelerate.telemetry import step_time
from notebook_accelerate.telemetry.automatic_metrics import sampler
from notebook_accelerate.worker.sanity_facts import SanityFacts

if TYPE_CHECKING:
    from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
    from notebook_accelerate.config.parallelism_config import TorchTensorParallelPlugin
    from notebook_accelerate.tracking import GeneralTracker

    Tracker: TypeAlias = str | LoggerType | GeneralTracker

Hook = Callable[..., None]
_T = TypeVar("_T")


class Accelerator(AcceleratorProperties):
    """One training API for any number of processes, any device and any precision.

    Args:
        device_placement: Whether to move models, batches and optimizer states to the rank's device.
        split_batches: Deprecated; use `DataLoaderConfiguration(split_batches=...)`.
        mixed_precision: "no", "fp16", "bf16" or "fp8". None means the launch's setting, or "no" without one.
        gradient_accumulation_steps: The number of batches per optimizer step. The environment variable
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides it.
        cpu: Whether to train on the CPU even if there are GPUs or other accelerators.
        dataloader_config: How the batches of loaders are divided among ranks.
        deepspeed_plugin: A `DeepSpeedPlugin`, or a dict of several plugins by name.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: A `TorchTensorParallelPlugin`.
        megatron_lm_plugin: A `MegatronLMPlugin`.
        rng_types: The random number generators to synchronise at the start of each pass over a loader: "torch", "cuda",
            ...
        log_with: The trackers to log with, by name or as objects. "all" selects all installed trackers.
        project_dir: The folder for checkpoints and logs.
        project_config: The folders, checkpoint names and limits (`ProjectConfiguration`).
        gradient_accumulation_plugin: The settings for gradient accumulation, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: Whether schedulers step only when optimizers do.
        kwargs_handlers: Settings for autocast, DDP, the scaler, the process group and the profiler, at most one of each
            kind.
        dynamo_backend: The backend of `torch.compile`.
        dynamo_plugin: The settings for compiling models, instead of `dynamo_backend`.
        deepspeed_plugins: An alias of `deepspeed_plugin`.
        parallelism_config: The parallel layout (`ParallelismConfig`).

    Attributes:
        state: The shared `AcceleratorState`.
        gradient_state: The shared `GradientState`, with the position in the accumulation window.
        project_configuration: The project's folders, checkpoint names and limits.
        scaler: The loss scaler, or None if the precision does not need one.
        step: The number of batches that `accumulate` has counted in this window.
        trackers: The trackers that `init_trackers` has started.

    Raises:
        ValueError: A setting is invalid, or two settings contradict each other.
    """

    @takes_launch_arguments
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = accelerator_arguments.UNSET,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Tracker | Sequence[Tracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        self.project_configuration = accelerator_arguments.project_configuration(project_config, project_dir)
        self.dataloader_config = accelerator_arguments.loader_configuration(dataloader_config, split_batches)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = accelerator_arguments.generators(rng_types)
        self._handlers = sort_handlers(kwargs_handlers)
        accumulation = accelerator_arguments.accumulation(gradient_accumulation_plugin, gradient_accumulation_steps)
        self.state = AcceleratorState(
            mixed_precision=None if mixed_precision is None else str(mixed_precision),
            cpu=cpu,
            dynamo_plugin=accelerator_arguments.dynamo(dynamo_plugin, dynamo_backend),
            deepspeed_plugin=accelerator_arguments.either(
                "deepspeed_plugin", deepspeed_plugin, "deepspeed_plugins", deepspeed_plugins
            ),
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            _from_accelerator=True,
            **(self._handlers.init.to_kwargs() if self._handlers.init is not None else {}),
        )
        self.gradient_state = GradientState(gradient_accumulation_plugin=accumulation)
        self._set_up(log_with)
        if self.is_main_process:
            check_os_kernel()

    def _set_up(self, log_with: Tracker | Sequence[Tracker] | None) -> None:
        """Choose the precision and the strategy."""
        self._device = self.state.device
        if self._handlers.fp8 is not None and self.state.mixed_precision != "fp8":
            raise ValueError(
                f"kwargs_handlers contains {type(self._handlers.fp8).__name__}, an fp8 recipe, but mixed_precision is "
                f'{self.state.mixed_precision!r}; pass Accelerator(mixed_precision="fp8"), or omit the recipe'
            )
        self._precision = make_precision(
            self.state.mixed_precision,
            self._device.type,
            self._handlers.autocast,
            self._handlers.scaler,
            self._handlers.fp8,
        )
        self.scaler = self._precision.make_scaler()
        self.strategy = make_strategy(
            Setup(
                state=self.state,
                gradient_state=self.gradient_state,
                precision=self._precision,
                scaler=self.scaler,
                device=self._device,
                dynamo_plugin=self.state.dynamo_plugin,
                device_placement=self.device_placement,
                dataloader_config=self.dataloader_config,
                rng_types=self.rng_types,
                step_scheduler_with_optimizer=self.step_scheduler_with_optimizer,
                ddp_handler=self._handlers.ddp,
            )
        )
        self.fp8_enabled = self.has_fp8_handler = self.state.mixed_precision == "fp8"
        self.delayed_fp8_autocast = False
        self.scaler = self.strategy.setup.scaler  # FSDP 1 has its own scaler.
        # These lists are the strategy's. Libraries built on Accelerate read them under these names.
        self._models = self.strategy.models
        self._optimizers = self.strategy.optimizers
        self._schedulers = self.strategy.schedulers
        self._dataloaders = self.strategy.dataloaders
        self._checks = SanityFacts(
            several=self.state.num_processes > 1 and self.strategy.checkpoint_layout == "whole",
            compiled=self.state.dynamo_plugin is not None and self.state.dynamo_plugin.backend != DynamoBackend.NO,
            gradient_state=self.gradient_state,
        )
        self._custom_objects: list[Any] = []
        self._save_model_state_pre_hook: OrderedDict[int, Hook] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Hook] = OrderedDict()
        self._backward = step_time.backward(self.strategy.backward)
        self.step = 0
        self.flag_tensor: torch.Tensor | None = None
        self.has_lomo_optimizer = False
        self.trackers: list[GeneralTracker] = []
        self.log_with: list[Tracker] = []
        if log_with is not None:
            self.log_with += tracking.filter_trackers(log_with, self.logging_dir)

    def __repr__(self) -> str:
        place = f"rank {self.process_index} of {self.num_processes}"
        return f"Accelerator({self.distributed_type.value}, {place}, {self.device}, {self.mixed_precision})"

    # ---- preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare any number of models, optimizers, loaders and schedulers, in any order; every rank must call this.

        Args:
            args: The objects to prepare. Objects that are not models, optimizers, loaders or schedulers are returned
                unchanged.
            device_placement: Whether to move each object to the device. None means the Accelerator's setting.

        Returns:
            The prepared objects, as a tuple in the same order, or a single object if only one was given.

        Raises:
            AttributeError: The shared state was reset after this Accelerator was created.
            ValueError: An object cannot be prepared, or `device_placement` does not have an item for each object.
        """
        self.state.distributed_type  # noqa: B018 - this raises if the state was reset
        placements: Sequence[bool | None] = [None] * len(args) if device_placement is None else device_placement
        check_type("device_placement", placements, (list, tuple), "a list with True or False for each object")
        if len(placements) != len(args):
            raise ValueError(f"device_placement has {len(placements)} items for {len(args)} objects; pass one for each")
        if self.parallelism_config is not None and self.parallelism_config.cp_enabled:
            args = self._prepare_cp(*args)
        prepared = self.strategy.prepare(args, placements)
        self.strategy.report_sharding()
        self.has_lomo_optimizer = any(hasattr(kept.optimizer, "fused_backward") for kept in self._optimizers)
        self._checks.prepared(self._models, self._optimizers, prepared)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Make the attention of models causal for context parallelism. Axolotl replaces this method by name."""
        for item in args:
            if isinstance(item, torch.nn.Module):
                make_attention_causal(item)
        return args

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model; every rank must call this.

        Args:
            model: The model to prepare.
            device_placement: Whether to move the model to the device. None means the Accelerator's setting.
            evaluation_mode: Whether to prepare the model only for inference. If so, the model is neither wrapped for
                several ranks nor saved.

        Returns:
            The prepared model.
        """
        check_type("prepare_model", model, torch.nn.Module, "a torch.nn.Module")
        if self.parallelism_config is not None and self.parallelism_config.cp_enabled:
            self._prepare_cp(model)
        return self.strategy.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer.

        Args:
            optimizer: The optimizer to prepare.
            device_placement: Whether to move the optimizer's state to the device. None means the Accelerator's setting.

        Returns:
            The prepared optimizer.
        """
        if not hasattr(optimizer, "param_groups"):
            check_type("prepare_optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer")
        return self.strategy.prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a learning rate scheduler, whose optimizer must already be prepared.

        Args:
            scheduler: The scheduler to prepare.

        Returns:
            The prepared scheduler.
        """
        if not callable(getattr(scheduler, "step", None)):
            check_type("prepare_scheduler", scheduler, AcceleratedScheduler, "a learning rate scheduler")
        return self.strategy.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[_T],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[_T]:
        """Prepare a loader; every rank must call this.

        Args:
            data_loader: The loader to prepare.
            device_placement: Whether to move batches to the device. None means the Accelerator's setting.
            slice_fn_for_dispatch: A function that returns a rank's part of a batch that rank 0 has read. If None, the
                first dimension is sliced.

        Returns:
            The prepared loader.
        """
        return self.strategy.prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    # ---- Accelerate's private methods that downstream libraries call

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """Prepare objects as `prepare` does, but return a tuple even for a single object."""
        return tuple(self.strategy.prepare(args, [None] * len(args)))

    def _get_named_parameters(self, *args: Any, drop_refs: bool = False) -> dict[str, Any]:
        """Return the parameters of prepared models by name or, with `drop_refs`, the addresses of their memory."""
        models = [self.unwrap_model(model) for model in args if isinstance(model, torch.nn.Module)]
        named = {name: parameter for model in models for name, parameter in model.named_parameters()}
        if not drop_refs:
            return named
        return {
            name: (each.to_local() if hasattr(each, "to_local") else each).data_ptr() for name, each in named.items()
        }

    def _prepare_device_mesh(self) -> Any:
        """Return the device mesh that determines how loaders are divided among ranks."""
        return self.torch_device_mesh

    # ---- training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, divided by the number of accumulation steps and scaled if necessary.

        Args:
            loss: The loss of one batch.
            kwargs: Arguments for `torch.Tensor.backward`, and `learning_rate` for LOMO optimizers.

        Raises:
            ValueError: The loss is not a tensor.
        """
        if not isinstance(loss, torch.Tensor):
            accelerator_arguments.check_loss(loss)  # type: ignore[unreachable]
        sampler.loss(loss)
        steps = self.gradient_state.num_steps
        if steps != 1:
            loss = loss / steps
        if self.has_lomo_optimizer and "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs.pop("learning_rate"))
        else:
            self._checks.loss(loss)
            self._backward(loss, **kwargs)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients: they are exchanged, and optimizers step, only in the last batch of a window.

        Args:
            models: The prepared models that are trained in the block.

        Returns:
            A context manager for one batch.
        """
        self._do_sync()
        state = self.gradient_state
        if state.sync_gradients or state.sync_each_batch:
            return NOTHING
        return self.strategy.accumulating(models)

    def _do_sync(self) -> None:
        """Count a batch, and determine whether it completes its window."""
        self.step = self.gradient_state.count_batch(self.step)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Skip the exchange of a model's gradients in the backward pass.

        Args:
            model: The prepared model whose gradients stay local.

        Returns:
            A context manager for the backward pass.
        """
        return self.strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
        """Synchronise a model's gradients in the next backward pass, even though its forward pass ran under `no_sync`.

        Args:
            model: The prepared model whose gradients are exchanged.

        Returns:
            A context manager for the backward pass.
        """
        return synchronised_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Allow ranks to have different numbers of batches; every rank must enter the context.

        Args:
            joinables: The prepared models, and optimizers that communicate.
            even_batches: The setting of the prepared loaders inside the block. None keeps the current one.

        Returns:
            A context manager around the loop.
        """
        return self.strategy.join_uneven_inputs(joinables, even_batches)

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by the scale of the loss, at most once per step. Without loss scaling, nothing is done.

        Args:
            optimizer: One or more prepared optimizers. None means all of them.
        """
        self.strategy.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients, so that their norm over all parameters is at most `max_norm`.

        Args:
            parameters: The parameters whose gradients are scaled.
            max_norm: The maximum norm.
            norm_type: The type of the norm, such as 2 for the 2-norm.

        Returns:
            The norm before clipping.
        """
        norm = self._checks.norm(self.strategy.clip_grad_norm(parameters, max_norm, norm_type))
        sampler.norm(norm)
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value].

        Args:
            parameters: The parameters whose gradients are clipped.
            clip_value: The maximum absolute value.
        """
        self.strategy.clip_grad_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Compute something outside of prepared models, such as a loss, in this Accelerator's precision.

        Args:
            autocast_handler: The settings for this block. None means the settings in `kwargs_handlers`.

        Returns:
            A context manager for the computation.
        """
        if autocast_handler is not None:
            check_type("autocast_handler", autocast_handler, AutocastKwargs, "AutocastKwargs(...)")
        return self._precision.autocast(autocast_handler)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the fused backward pass and step of LOMO optimizers.

        Args:
            loss: The loss of one batch.
            learning_rate: The learning rate of the step.

        Raises:
            ValueError: No LOMO optimizer was prepared.
        """
        fused = [kept.optimizer for kept in self._optimizers if hasattr(kept.optimizer, "fused_backward")]
        if not fused:
            raise ValueError("lomo_backward needs a prepared Lomo or AdaLomo optimizer (package lomo-optim)")
        for optimizer in fused:
            optimizer.fused_backward(loss, learning_rate)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Profile the block; every rank must enter the context.

        Args:
            profile_handler: The settings for the profiler. None means the handler in `kwargs_handlers` or,
                without a handler, torch's defaults.

        Returns:
            A context manager that yields the profiler. With `output_trace_dir`, each rank writes its trace to that
            folder at the end, even if the block fails, and the run's report lists the traces.
        """
        settings = profile_handler or self._handlers.profile or ProfileKwargs()
        return tracking.profiled(settings, self.process_index, self.wait_for_everyone)

    # ---- between ranks

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called this; every rank must call this."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on one rank of each machine.

        Args:
            args: Positional arguments for the built-in `print`.
            kwargs: Keyword arguments for the built-in `print`.
        """
        self.state.print(*args, **kwargs)

    def split_between_processes(self, inputs: _T, apply_padding: bool = False) -> AbstractContextManager[_T]:
        """Give each rank its contiguous share of `inputs`.

        Args:
            inputs: A list, a tuple, a tensor, a dict of these with equal lengths, or a datasets.Dataset.
            apply_padding: Whether to repeat the last item, so that all shares have the same length.

        Returns:
            A context manager that yields this rank's share.
        """
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    def gather(self, tensor: _T) -> _T:
        """Join each tensor of a nested structure across ranks along its first dimension; every rank must call this.

        Args:
            tensor: Nested containers of tensors with the same shapes on every rank.

        Returns:
            The resulting structure, which is the same on every rank.
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: _T, use_gather_object: bool = False) -> _T:
        """Join results across ranks, without the samples that pad the last batches; every rank must call this.

        Args:
            input_data: Nested containers of tensors, or a list of picklable objects.
            use_gather_object: Whether to treat the data as Python objects, even if it contains tensors.

        Returns:
            The results, with each sample of the dataset once.
        """
        return collectives.gather_for_metrics(input_data, self.gradient_state, use_gather_object)

    def reduce(self, tensor: _T, reduction: str = "sum", scale: float = 1.0) -> _T:
        """Sum or average every tensor of a nested structure over ranks, or take the maximum; every rank must call this.

        Args:
            tensor: Nested containers of tensors with the same shapes on every rank.
            reduction: "sum", "mean", "max" or "none".
            scale: A factor for the result, which only has an effect on XLA.

        Returns:
            The resulting structure, which is the same on every rank.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: _T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> _T:
        """Pad every tensor of a nested structure to the largest size across ranks; every rank must call this.

        Args:
            tensor: Nested containers of tensors.
            dim: The dimension to pad.
            pad_index: The padding value.
            pad_first: Whether to pad at the beginning instead of the end.

        Returns:
            The structure with padded tensors.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set this rank's flag, which `check_trigger` reports on every rank."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return whether any rank has set its flag, and clear it; every rank must call this.

        Returns:
            True on every rank if any rank has called `set_trigger` since the last check.
        """
        mine = self.flag_tensor if self.flag_tensor is not None else torch.tensor(0, device=self.device)
        raised = bool(collectives.reduce(mine, "sum").item() >= 1)
        if raised:
            self.flag_tensor = None
        return raised

    # ---- models

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Remove the wrappers that `prepare` added to a model.

        Args:
            model: The prepared model to unwrap.
            keep_fp32_wrapper: Whether to keep the forward method that computes in mixed precision. If False, the
                original method is restored in place.
            keep_torch_compile: Whether to keep a compiled model compiled.

        Returns:
            The user's model without these wrappers.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map spreads a model across several devices.

        Args:
            model: The model to check, with or without a device map.
        """
        return is_on_several_devices(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop all prepared objects, and release their memory.

        Args:
            objects: Further objects whose memory is released.

        Returns:
            None for each object, to be assigned to the object's name, as in
            ``model, optimizer = accelerator.free_memory(model, optimizer)``.
        """
        self.strategy.clear()
        self.step = 0
        from notebook_accelerate.batch_size_search import release_memory

        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """See `free_memory`."""
        return self.free_memory(*objects)

    # ---- files

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file once, or once per machine if `save_on_each_node` is set.

        Args:
            obj: The object to write.
            f: The file's path.
            safe_serialization: Whether to write safetensors instead of torch's format.
        """
        checkpointing.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights to a folder; every rank must call this.

        Args:
            model: The model to save, prepared or not.
            save_directory: The folder to write to.
            max_shard_size: The maximum size of a file, in bytes or as a string such as "10GB".
            safe_serialization: Whether to write safetensors instead of torch's format.
        """
        checkpointing.save_model(self, model, save_directory, max_shard_size, safe_serialization)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Write to a folder everything that is needed to resume training; every rank must call this.

        Args:
            output_dir: The folder, or a URL that fsspec supports. Leave it out with automatic checkpoint naming.
            safe_serialization: Whether to write models as safetensors instead of torch's format.
            save_model_func_kwargs: Additional arguments for the strategy, and `blocking=False` to write in the
                background.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: No folder was passed, or the automatic name is already taken.
            CheckpointError: This checkpoint, or an earlier one that was written in the background, could not be
                written.
        """
        return checkpointing.save_state(self, output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint that `save_state` has written; every rank must call this.

        Args:
            input_dir: The folder, or a URL that fsspec supports. None means the latest automatically named checkpoint.
            load_kwargs: Additional arguments for loading custom objects and states.
            load_model_func_kwargs: Additional arguments for the strategy, `strict` for models (True by default), and
                `elastic=True` to accept a checkpoint from a different number of ranks.

        Raises:
            ValueError: The folder does not exist, or no folder was passed without automatic checkpoint naming.
            BrokenCheckpointError: The checkpoint was never finished, or some of its files are damaged.
            CheckpointMismatchError: The checkpoint was saved with a different number of ranks, strategy or set of
                objects.
        """
        checkpointing.load_state(self, input_dir, load_kwargs, **load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in the checkpoints that `save_state` writes and `load_state` reads, in this order.

        Args:
            objects: Objects with the methods `state_dict` and `load_state_dict`.

        Raises:
            ValueError: Some objects do not have these methods.
        """
        wrong = [item for item in objects if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))]
        if wrong:
            raise ValueError(
                f"register_for_checkpointing takes objects with state_dict and load_state_dict; {len(wrong)} of "
                f"{len(objects)} do not have them: {', '.join(type(item).__name__ for item in wrong)}"
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Register a function that `save_state` calls before it writes models.

        Args:
            hook: A function that is called as `hook(models, weights, output_dir)`. It may remove weights that it writes
                itself. Files that it writes to `output_dir` become a part of the checkpoint. Don't keep the path to
                this folder, which is moved to its final location when the checkpoint is complete.

        Returns:
            A handle whose `remove()` unregisters the function.
        """
        return _registered(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Register a function that `load_state` calls before it reads models.

        Args:
            hook: A function that is called as `hook(models, input_dir)`. It may remove models that it loads itself.

        Returns:
            A handle whose `remove()` unregisters the function.
        """
        return _registered(self._load_model_state_pre_hook, hook)

    def skip_first_batches(self, dataloader: DataLoader[_T], num_batches: int = 0) -> DataLoader[_T]:
        """Return a copy of a loader that skips the first batches of an epoch.

        Args:
            dataloader: A prepared loader.
            num_batches: The number of batches to skip.

        Returns:
            The copy. Use the original loader from the next epoch on.
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    # ---- tracking

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers in `log_with`, on rank 0. If a tracker fails to start, a warning is issued.

        Args:
            project_name: The name of the project.
            config: The hyperparameters that the trackers record.
            init_kwargs: Additional arguments for each tracker, by its name.

        Raises:
            ValueError: `init_kwargs` names an unknown tracker.
            TypeError: A tracker does not accept one of its `init_kwargs`.
        """
        tracking.init_trackers(self, project_name, config, init_kwargs or {})

    @overload
    def get_tracker(self, name: str, unwrap: Literal[False] = False) -> GeneralTracker: ...

    @overload
    def get_tracker(self, name: str, unwrap: bool) -> Any: ...

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a started tracker.

        Args:
            name: The name of the tracker.
            unwrap: Whether to return the run object of the vendor's library instead.

        Returns:
            The tracker. On ranks without trackers, a tracker that does nothing.

        Raises:
            ValueError: No tracker with this name was requested.
        """
        return tracking.get_tracker(self, name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Record the values of a step: rank 0's with the trackers, and every rank's in the run's metrics.

        Args:
            values: The numbers to record, by name.
            step: The number of the step. In the run's metrics, None means the number of optimizer steps so far.
            log_kwargs: Additional arguments for each tracker, by its name.

        Raises:
            ValueError: `values` is not a dict. Values that a tracker cannot record are left out with a warning.
        """
        tracking.log(self, values, step, log_kwargs)

    def end_training(self) -> None:
        """Finish trackers and background saves, and destroy the process group. Every rank must call this at the end."""
        tracking.finish(self)
        checkpointing.wait_for_saves("end_training", release=True)
        self.state.destroy_process_group()

    # ---- parallel layouts

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Split sequences across ranks inside the block, if the parallel layout has a context dimension.

        Args:
            buffers: The tensors to split in place.
            buffer_seq_dims: The sequence dimension of each buffer.
            no_restore_buffers: The buffers that stay split after the block.

        Yields:
            Nothing.
        """
        split = self.strategy.context_parallel(buffers or [], buffer_seq_dims or [], no_restore_buffers or set())
        if split is NOTHING:
            _warn_without_context_parallelism()
        with split:
            yield

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Make a loader yield slices of sequences for DeepSpeed's sequence parallelism; every rank must call this.

        Loaders that are prepared together with the model already yield slices. Batches have input_ids, position_ids and
        labels, and slices have shift_labels instead of labels. The loss of a sequence is the mean of the losses of its
        slices, each weighted by its number of labels other than -100, and gathered over
        `accelerator.torch_device_mesh["sp"].get_group()` by `torch.distributed.nn.functional.all_gather`.

        Args:
            dl: The prepared loader.
            model: Not used, because batches are always moved to this rank's device.

        Returns:
            The loader of slices, or the loader itself if it already yields slices or the layout has no sequence
            parallelism.
        """
        return self.strategy.sequence_loader(dl)


@cache
def _warn_without_context_parallelism() -> None:
    accelerate_logger("accelerator").warning(
        "maybe_context_parallel has no effect, because the parallel layout has no context dimension; set "
        "ParallelismConfig(cp_size=...) to a value above 1"
    )


def _registered(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    if not callable(hook):
        raise ValueError(f"a hook must be callable; got {type(hook).__name__} ({hook!r:.60}): pass a function")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Look up a public name of `utils`. Libraries import or patch many of them in `accelerate.accelerator`."""
        utils = import_module("notebook_accelerate.utils")
        if name not in utils.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(utils, name)
