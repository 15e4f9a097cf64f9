"""`Accelerator`, the facade: it checks arguments, delegates to a strategy or another package, and wraps results."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from notebook_accelerate import checkpointing, collectives, tracking
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
from notebook_accelerate.data_loader import skip_first_batches
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.precision import make_precision
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.strategies import accelerator_arguments, make_strategy
from notebook_accelerate.strategies.accelerator_arguments import Setup, sort_handlers
from notebook_accelerate.strategies.accelerator_properties import AcceleratorProperties
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
    """One training API for one process or many, any device, any precision.

    Args:
        device_placement: Move models, batches and optimizer states to the rank's device.
        split_batches: Deprecated: `DataLoaderConfiguration(split_batches=...)`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None takes the launch's setting, or "no".
        gradient_accumulation_steps: Batches per optimizer step (ACCELERATE_GRADIENT_ACCUMULATION_STEPS wins).
        cpu: Train on the CPU, also where there are accelerators.
        dataloader_config: How data loaders are divided among ranks.
        deepspeed_plugin: A `DeepSpeedPlugin`, or several by name.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: A `TorchTensorParallelPlugin`.
        megatron_lm_plugin: A `MegatronLMPlugin`.
        rng_types: Random generators synchronized at the start of each pass over a loader: "torch", "cuda", ...
        log_with: Trackers, by name or as objects; "all" selects every installed one.
        project_dir: Folder of checkpoints and logs.
        project_config: Folders, checkpoint names and limits (`ProjectConfiguration`).
        gradient_accumulation_plugin: How to accumulate, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: Whether schedulers step only when optimizers do.
        kwargs_handlers: Settings of autocast, DDP, scaler, process group and profiler; at most one of each kind.
        dynamo_backend: Backend of `torch.compile`.
        dynamo_plugin: How models are compiled, instead of `dynamo_backend`.
        deepspeed_plugins: Alias of `deepspeed_plugin`.
        parallelism_config: A `ParallelismConfig`.

    Attributes:
        state: The shared `AcceleratorState`.
        gradient_state: The position in the window of gradient accumulation.
        project_configuration: Folders, checkpoint names and limits.
        scaler: The loss scaler; None in precisions that need none.
        step: Batches that `accumulate` has seen in this window.
        trackers: The trackers that `init_trackers` started.

    Raises:
        ValueError: A setting is not allowed, or two settings contradict each other.
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

    def _set_up(self, log_with: Tracker | Sequence[Tracker] | None) -> None:
        """Choose the precision and the strategy."""
        self._device = self.state.device
        if self._handlers.fp8 is not None and self.state.mixed_precision != "fp8":
            raise ValueError(
                f"kwargs_handlers holds {type(self._handlers.fp8).__name__}, a recipe of fp8, and mixed_precision is "
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
        self.scaler = self.strategy.setup.scaler  # FSDP 1 has one of its own
        # The strategy's own lists; libraries on top of Accelerate read them under these names.
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
        """Prepare models, optimizers, loaders and schedulers, in any number and order; every rank must call this.

        Args:
            args: The objects. Others than models, optimizers, loaders and schedulers are returned unchanged.
            device_placement: For each object, whether it goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared objects in the order given: a tuple, or the object itself if only one was given.

        Raises:
            AttributeError: The shared state was reset after this Accelerator was created.
            ValueError: An object cannot be prepared, or `device_placement` does not have one item for each.
        """
        self.state.distributed_type  # noqa: B018 - raises if the state was reset
        placements: Sequence[bool | None] = [None] * len(args) if device_placement is None else device_placement
        accelerator_arguments.check_type(
            "device_placement", placements, (list, tuple), "a list with True or False for each object"
        )
        if len(placements) != len(args):
            raise ValueError(f"device_placement has {len(placements)} items for {len(args)} objects; pass one for each")
        prepared = self.strategy.prepare(args, placements)
        self.strategy.report_sharding()
        self.has_lomo_optimizer = any(hasattr(kept.optimizer, "fused_backward") for kept in self._optimizers)
        self._checks.prepared(self._models, self._optimizers, prepared)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model; every rank must call this.

        Args:
            model: The model.
            device_placement: Whether it goes to the device; None means the Accelerator's setting.
            evaluation_mode: Prepare it for inference only: it is not wrapped for several ranks, and not saved.

        Returns:
            The prepared model.
        """
        accelerator_arguments.check_type("prepare_model", model, torch.nn.Module, "a torch.nn.Module")
        return self.strategy.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer.

        Args:
            optimizer: The optimizer.
            device_placement: Whether its state goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared optimizer.
        """
        if not hasattr(optimizer, "param_groups"):
            accelerator_arguments.check_type("prepare_optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer")
        return self.strategy.prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a learning rate scheduler, after its optimizer.

        Args:
            scheduler: The scheduler.

        Returns:
            The prepared scheduler.
        """
        if not callable(getattr(scheduler, "step", None)):
            accelerator_arguments.check_type(
                "prepare_scheduler", scheduler, AcceleratedScheduler, "a learning rate scheduler"
            )
        return self.strategy.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[_T],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[_T]:
        """Prepare a loader; every rank must call this.

        Args:
            data_loader: The loader.
            device_placement: Whether batches go to the device; None means the Accelerator's setting.
            slice_fn_for_dispatch: Cuts a batch that rank 0 reads into one for each rank; None cuts the first dimension.

        Returns:
            The prepared loader.
        """
        return self.strategy.prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    # ---- private methods of Accelerate that downstream libraries call

    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """Prepare objects as `prepare` does, and return a tuple also for one object."""
        return tuple(self.strategy.prepare(args, [None] * len(args)))

    def _get_named_parameters(self, *args: Any, drop_refs: bool = False) -> dict[str, Any]:
        """Return the parameters of prepared models by name; with `drop_refs`, the addresses of their memory."""
        models = [self.unwrap_model(model) for model in args if isinstance(model, torch.nn.Module)]
        named = {name: parameter for model in models for name, parameter in model.named_parameters()}
        if not drop_refs:
            return named
        return {
            name: (each.to_local() if hasattr(each, "to_local") else each).data_ptr() for name, each in named.items()
        }

    def _prepare_device_mesh(self) -> Any:
        """Return the mesh that divides loaders among ranks."""
        return self.torch_device_mesh

    # ---- training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss, divided by the accumulation steps and scaled for the precision.

        Args:
            loss: The loss of one batch.
            kwargs: As for `torch.Tensor.backward`; `learning_rate` for LOMO optimizers.

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
        if state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False):
            return NOTHING
        return self.strategy.accumulating(models)

    def _do_sync(self) -> None:
        """Count a batch, and decide whether it completes its window."""
        state = self.gradient_state
        settings = state.plugin_kwargs
        if state.end_of_dataloader and settings.get("sync_with_dataloader", True):
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % (settings.get("num_steps") or 1) == 0

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Skip the exchange of a model's gradients in backward.

        Args:
            model: A prepared model.

        Returns:
            A context manager.
        """
        return self.strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
        """Exchange a model's gradients in the next backward although its forward ran under `no_sync`.

        Args:
            model: The prepared model.

        Returns:
            A context manager for the backward.
        """
        return synchronised_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Allow different numbers of batches per rank; every rank must enter it.

        Args:
            joinables: Prepared models, and optimizers that communicate.
            even_batches: Setting of the prepared loaders inside the block; None keeps it.

        Returns:
            A context manager around the loop.
        """
        return self.strategy.join_uneven_inputs(joinables, even_batches)

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide gradients by the scale of the loss, in precisions that scale it; at most once per step.

        Args:
            optimizer: A prepared optimizer or several; None means all.
        """
        self.strategy.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most `max_norm`.

        Args:
            parameters: The parameters.
            max_norm: The largest norm allowed.
            norm_type: Which norm.

        Returns:
            The norm before clipping.
        """
        norm = self._checks.norm(self.strategy.clip_grad_norm(parameters, max_norm, norm_type))
        sampler.norm(norm)
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value].

        Args:
            parameters: The parameters.
            clip_value: The largest absolute value allowed.
        """
        self.strategy.clip_grad_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Compute in this Accelerator's precision outside of prepared models, for example a loss.

        Args:
            autocast_handler: Settings for this block; None means those in `kwargs_handlers`.

        Returns:
            A context manager.
        """
        if autocast_handler is not None:
            accelerator_arguments.check_type(
                "autocast_handler", autocast_handler, AutocastKwargs, "AutocastKwargs(...)"
            )
        return self._precision.autocast(autocast_handler)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the fused backward and step of LOMO optimizers.

        Args:
            loss: The loss.
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
        """Profile the block; every rank must enter it.

        Args:
            profile_handler: What is recorded; None means the one in `kwargs_handlers`, or torch's defaults.

        Returns:
            A context manager that yields the profiler. With `output_trace_dir`, each rank writes its trace there at the
            end, also when the block fails; the run's report lists the traces.
        """
        settings = profile_handler or self._handlers.profile or ProfileKwargs()
        return tracking.profiled(settings, self.process_index, self.wait_for_everyone)

    # ---- between ranks

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have called this; every rank must."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on one rank of each machine.

        Args:
            args: As for the built-in print.
            kwargs: As for the built-in print.
        """
        self.state.print(*args, **kwargs)

    def split_between_processes(self, inputs: _T, apply_padding: bool = False) -> AbstractContextManager[_T]:
        """Give each rank its contiguous share of `inputs`.

        Args:
            inputs: A list, a tuple, a tensor, a dict of these with equal lengths, or a datasets.Dataset.
            apply_padding: Repeat the last item so that all shares are equally long.

        Returns:
            A context manager that yields the share.
        """
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    def gather(self, tensor: _T) -> _T:
        """Concatenate every tensor of a nested structure over ranks, by the first dimension; every rank must call this.

        Args:
            tensor: Nested containers of tensors with the same shapes on every rank.

        Returns:
            The structure, the same on every rank.
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: _T, use_gather_object: bool = False) -> _T:
        """Concatenate results over ranks, without the samples that pad the last batches; every rank must call this.

        Args:
            input_data: Nested containers of tensors, or picklable objects in a list.
            use_gather_object: Treat the data as Python objects although it holds tensors.

        Returns:
            The results for each sample of the dataset once.
        """
        return collectives.gather_for_metrics(input_data, self.gradient_state, use_gather_object)

    def reduce(self, tensor: _T, reduction: str = "sum", scale: float = 1.0) -> _T:
        """Sum or average every tensor of a nested structure over ranks, or take the maximum; every rank must call this.

        Args:
            tensor: Nested containers of tensors with the same shapes on every rank.
            reduction: "sum", "mean", "max" or "none".
            scale: Factor applied to the result, on XLA only.

        Returns:
            The structure, the same on every rank.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: _T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> _T:
        """Pad every tensor of a nested structure to the largest size among ranks; every rank must call this.

        Args:
            tensor: Nested containers of tensors.
            dim: The dimension that is padded.
            pad_index: The value of the padding.
            pad_first: Pad at the beginning instead of the end.

        Returns:
            The structure.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set this rank's flag, which `check_trigger` reports on every rank."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return whether any rank has set its flag, and clear it; every rank must call this.

        Returns:
            True on every rank if any has called `set_trigger` since the last check.
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
            model: The prepared model.
            keep_fp32_wrapper: Keep the forward in mixed precision; otherwise the original one is restored, in place.
            keep_torch_compile: Keep a compiled model compiled.

        Returns:
            The model.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map spreads a model over several devices.

        Args:
            model: The model.
        """
        return is_on_several_devices(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop every prepared object, and release memory.

        Args:
            objects: More objects to drop.

        Returns:
            A None for each, to assign to the names: `model, optimizer = accelerator.free_memory(model, optimizer)`.
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
        """Write an object to a file, once (or once per machine where `save_on_each_node` is set).

        Args:
            obj: The object.
            f: The file.
            safe_serialization: Write safetensors instead of torch's format.
        """
        checkpointing.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights into a folder; every rank must call this.

        Args:
            model: A prepared model.
            save_directory: The folder.
            max_shard_size: Size of the largest file, in bytes or as text ("10GB").
            safe_serialization: Write safetensors instead of torch's format.
        """
        checkpointing.save_model(self, model, save_directory, max_shard_size, safe_serialization)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Write everything that is needed to resume training into a folder; every rank must call this.

        Args:
            output_dir: The folder, or a URL that fsspec knows; None with automatic checkpoint naming.
            safe_serialization: Write models as safetensors instead of torch's format.
            save_model_func_kwargs: Additional arguments for the strategy; `blocking=False` writes in the background.

        Returns:
            The folder.

        Raises:
            ValueError: No folder was passed, or the automatic name is taken.
            CheckpointError: This checkpoint, or the one written in the background before, could not be written.
        """
        return checkpointing.save_state(self, output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Read what `save_state` wrote; every rank must call this.

        Args:
            input_dir: The folder, or a URL that fsspec knows; None means the latest automatically named one.
            load_kwargs: Additional arguments for loading custom objects and states.
            load_model_func_kwargs: Additional arguments for the strategy; `strict` for models (default: True); and
                `elastic=True`, which accepts a checkpoint of another number of ranks (default: False).

        Raises:
            ValueError: The folder does not exist, or none was passed without automatic checkpoint naming.
            BrokenCheckpointError: The checkpoint was never finished, or files are damaged.
            CheckpointMismatchError: It belongs to another world size, strategy or set of objects.
        """
        checkpointing.load_state(self, input_dir, load_kwargs, **load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in `save_state` and `load_state`, in the order given.

        Args:
            objects: Objects with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: Some objects have no such methods.
        """
        wrong = [item for item in objects if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))]
        if wrong:
            raise ValueError(
                f"register_for_checkpointing takes objects with state_dict and load_state_dict; {len(wrong)} of "
                f"{len(objects)} have no such methods: {', '.join(type(item).__name__ for item in wrong)}"
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Register a function that `save_state` calls before it writes models.

        Args:
            hook: Called as `hook(models, weights, output_dir)`; it may remove weights that it writes itself. What it
                writes to `output_dir` is part of the checkpoint. That folder has the checkpoint's name, and is moved to
                its place when the checkpoint is complete: do not keep its path.

        Returns:
            A handle whose `remove()` unregisters the function.
        """
        return _registered(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Register a function that `load_state` calls before it reads models.

        Args:
            hook: Called as `hook(models, input_dir)`; it may remove models that it loads itself.

        Returns:
            A handle whose `remove()` unregisters the function.
        """
        return _registered(self._load_model_state_pre_hook, hook)

    def skip_first_batches(self, dataloader: DataLoader[_T], num_batches: int = 0) -> DataLoader[_T]:
        """Return a loader without the first batches of its epoch.

        Args:
            dataloader: A prepared loader.
            num_batches: Number of batches to skip.

        Returns:
            The loader.
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    # ---- tracking

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`, on rank 0; a tracker that fails to start warns.

        Args:
            project_name: Name of the project.
            config: Hyperparameters to record.
            init_kwargs: Additional arguments by tracker name.

        Raises:
            ValueError: `init_kwargs` names an unknown tracker.
            TypeError: A tracker does not take one of its `init_kwargs`.
        """
        tracking.init_trackers(self, project_name, config, init_kwargs or {})

    @overload
    def get_tracker(self, name: str, unwrap: Literal[False] = False) -> GeneralTracker: ...

    @overload
    def get_tracker(self, name: str, unwrap: bool) -> Any: ...

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a started tracker.

        Args:
            name: Its name.
            unwrap: Return the vendor's own run object.

        Returns:
            The tracker; one that does nothing on ranks without trackers.

        Raises:
            ValueError: No tracker of that name was requested.
        """
        return tracking.get_tracker(self, name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Record the values of one step: in the trackers on rank 0, and of every rank in the run that launched it.

        Args:
            values: Numbers by name.
            step: The step; None: in the run, the number of the optimizer's steps.
            log_kwargs: Additional arguments by tracker name.

        Raises:
            ValueError: `values` is not a dict. Values that a tracker cannot record are left out, with a warning.
        """
        tracking.log(self, values, step, log_kwargs)

    def end_training(self) -> None:
        """Finish trackers and background saves, and destroy the process group; every rank must call this at the end."""
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
        """Split sequences between ranks inside the block, if the parallel layout has a context dimension.

        Args:
            buffers: Tensors that are split in place.
            buffer_seq_dims: Their sequence dimensions.
            no_restore_buffers: Tensors that stay split after the block.

        Yields:
            Nothing.
        """
        with self.strategy.context_parallel(buffers or [], buffer_seq_dims or [], no_restore_buffers or set()):
            yield

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Make a loader yield slices of sequences, for DeepSpeed's sequence parallelism; every rank must call this.

        Loaders that are prepared together with the model do so already. Batches have input_ids, position_ids and
        labels; slices have shift_labels in place of labels. The loss of a sequence is the mean of the losses of its
        slices, each weighted by the number of its labels other than -100 and gathered over
        `accelerator.torch_device_mesh["sp"].get_group()` by `torch.distributed.nn.functional.all_gather`.

        Args:
            dl: The prepared loader.
            model: Not used: batches go to this rank's device.

        Returns:
            The loader of slices; without such a layout, or if it yields slices already, the loader itself.
        """
        return self.strategy.sequence_loader(dl)


def _registered(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    if not callable(hook):
        raise ValueError(f"a hook must be callable; got {type(hook).__name__} ({hook!r:.60}): pass a function")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a public name of `utils`: Accelerate's module imports many, and libraries take or patch them there."""
        utils = import_module("notebook_accelerate.utils")
        if name not in utils.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(utils, name)
