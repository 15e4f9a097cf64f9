"""`Accelerator`: the facade. It checks what it is given, delegates to a strategy or a room, and wraps the result."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from notebook_accelerate import checkpointing, collectives, tracking
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import DynamoBackend, LoggerType, PrecisionType, RNGType
from notebook_accelerate.config.kwargs_handlers import AutocastKwargs, KwargsHandler
from notebook_accelerate.config.launch_arguments import takes_launch_arguments
from notebook_accelerate.config.profile_kwargs import ProfileKwargs
from notebook_accelerate.config.training_config import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from notebook_accelerate.data_loader import skip_first_batches
from notebook_accelerate.hardware.memory import release_memory
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.precision import make_precision
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.strategies import Setup, accelerator_arguments, make_strategy
from notebook_accelerate.strategies.accelerator_properties import AcceleratorViews
from notebook_accelerate.strategies.ddp_strategy import synchronised_backward
from notebook_accelerate.strategies.handler_table import sort_handlers
from notebook_accelerate.strategies.model_placement import is_on_several_devices
from notebook_accelerate.strategies.strategy import NOTHING
from notebook_accelerate.strategies.unwrap import extract_model_from_parallel
from notebook_accelerate.telemetry import step_time
from notebook_accelerate.worker.sanity_facts import SanityFacts

Hook = Callable[..., None]


class Accelerator(AcceleratorViews):
    """One training API for one process or many, any device, any precision.

    Args:
        device_placement: Put models, batches and optimizer states on the device of the rank.
        split_batches: Deprecated: `DataLoaderConfiguration(split_batches=...)`.
        mixed_precision: no, fp16, bf16 or fp8; None means what the launch asked for, or no.
        gradient_accumulation_steps: Batches per optimizer step (ACCELERATE_GRADIENT_ACCUMULATION_STEPS wins).
        cpu: Leave accelerators alone.
        dataloader_config: How loaders are shared between ranks.
        deepspeed_plugin: A `DeepSpeedPlugin`, or several by name.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: A `TorchTensorParallelPlugin`.
        megatron_lm_plugin: A `MegatronLMPlugin`.
        rng_types: Generators made equal over ranks at the start of each pass: torch, cuda, generator, ...
        log_with: Trackers, by name or as objects; "all" means every one that is installed.
        project_dir: Folder of checkpoints and logs.
        project_config: Folders, checkpoint names and limits (`ProjectConfiguration`).
        gradient_accumulation_plugin: How to accumulate (`GradientAccumulationPlugin`), instead of the steps above.
        step_scheduler_with_optimizer: Whether schedulers move only when optimizers step.
        kwargs_handlers: Settings of autocast, DDP, scaler, process group, profiler; at most one of a kind.
        dynamo_backend: Compiler of models.
        dynamo_plugin: How models are compiled (`TorchDynamoPlugin`), instead of the back end above.
        deepspeed_plugins: Another name of deepspeed_plugin.
        parallelism_config: A `ParallelismConfig`.

    Attributes:
        state: The shared `AcceleratorState`.
        gradient_state: Where this Accelerator's training is in a window of accumulation.
        project_configuration: Folders, checkpoint names and limits.
        scaler: The scaler of losses; None in precisions that need none.
        step: Batches seen in this window by `accumulate`.
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
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: str | LoggerType | Any | list[str | LoggerType | Any] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
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

    def _set_up(self, log_with: Any) -> None:
        """Choose precision and strategy, and start with nothing prepared."""
        self._device = self.state.device
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
        self.scaler = self.strategy.setup.scaler  # FSDP 1 has one of its own
        # The lists are the strategy's own; libraries on top of Accelerate read them under these names.
        self._models = self.strategy.models
        self._optimizers = self.strategy.optimizers
        self._schedulers = self.strategy.schedulers
        self._dataloaders = self.strategy.dataloaders
        self._checks = SanityFacts(
            several=self.state.num_processes > 1 and self.strategy.checkpoint_layout == "whole",
            compiled=self.state.dynamo_plugin is not None and self.state.dynamo_plugin.backend != DynamoBackend.NO,
        )
        self._custom_objects: list[Any] = []
        self._save_model_state_pre_hook: OrderedDict[int, Hook] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Hook] = OrderedDict()
        self._backward = step_time.backward(self.strategy.backward)
        self.step = 0
        self.flag_tensor: torch.Tensor | None = None
        self.has_lomo_optimizer = False
        self.trackers: list[Any] = []
        self.log_with: list[Any] = []
        if log_with is not None:
            self.log_with += tracking.filter_trackers(log_with, self.logging_dir)

    def __repr__(self) -> str:
        place = f"rank {self.process_index} of {self.num_processes}"
        return f"Accelerator({self.distributed_type.value}, {place}, {self.device}, {self.mixed_precision})"

    # -- preparing ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any number and order; every rank must call this.

        Args:
            args: The objects; None stays None.
            device_placement: For each object, whether it goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared objects in the order given: a tuple, or the object itself where there is one.

        Raises:
            ValueError: An object is nothing that can be prepared, or the placements are not as many as the objects.
        """
        placements: Sequence[bool | None] = [None] * len(args) if device_placement is None else device_placement
        accelerator_arguments.check_type(
            "device_placement", placements, (list, tuple), "a list with True or False for each object"
        )
        if len(placements) != len(args):
            raise ValueError(f"device_placement has {len(placements)} items for {len(args)} objects; pass one for each")
        prepared = self.strategy.prepare(args, placements)
        self.strategy.tell_sharding()
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
        """Prepare a learning rate scheduler; its optimizer comes first.

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
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """Prepare a loader; every rank must call this.

        Args:
            data_loader: The loader.
            device_placement: Whether batches go to the device; None means the Accelerator's setting.
            slice_fn_for_dispatch: How a batch that rank 0 reads is cut for the ranks; None: by the first dimension.

        Returns:
            The prepared loader.
        """
        return self.strategy.prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    # -- training -----------------------------------------------------------------------------------------------------

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss, divided by the batches of a window and scaled for the precision.

        Args:
            loss: The loss of one batch.
            kwargs: As for `torch.Tensor.backward`; learning_rate where an optimizer is a LOMO.

        Raises:
            ValueError: The loss is no tensor.
        """
        if not isinstance(loss, torch.Tensor):
            accelerator_arguments.check_loss(loss)
        steps = self.gradient_state.num_steps
        if steps != 1:
            loss = loss / steps
        if self.has_lomo_optimizer and "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs.pop("learning_rate"))
        else:
            self._checks.loss(loss)
            self._backward(loss, **kwargs)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[Any]:
        """Train on one batch of a window: gradients are exchanged, and optimizers step, in its last batch only.

        Args:
            models: The prepared models that are trained in the block.

        Returns:
            A context manager for the work on one batch.
        """
        state = self.gradient_state
        settings = state.plugin_kwargs
        if state.end_of_dataloader and settings.get("sync_with_dataloader", True):
            self.step = 0
            sync = True
        else:
            self.step += 1
            sync = self.step % (settings.get("num_steps") or 1) == 0
        state.sync_gradients = sync
        if sync or settings.get("sync_each_batch", False):
            return NOTHING
        return self.strategy.accumulating(models)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Leave out the exchange of a model's gradients in backward.

        Args:
            model: A prepared model.

        Returns:
            A context manager.
        """
        return self.strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: Any) -> AbstractContextManager[Any]:
        """Make the next backward exchange a model's gradients although its forward ran under `no_sync`.

        Args:
            model: The prepared model.

        Returns:
            A context manager for the backward.
        """
        return synchronised_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Let ranks have different numbers of batches; every rank must enter it.

        Args:
            joinables: Prepared models, and optimizers that exchange something.
            even_batches: Setting of the prepared loaders inside the block; None keeps it.

        Returns:
            A context manager around the loop.
        """
        return self.strategy.join_uneven_inputs(joinables, even_batches)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the scale of the loss, in precisions that scale it; at most once per step.

        Args:
            optimizer: A prepared optimizer or several; None means all.
        """
        self.strategy.unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most `max_norm`.

        Args:
            parameters: The parameters.
            max_norm: The largest norm allowed.
            norm_type: Which norm.

        Returns:
            The norm before clipping.
        """
        return self._checks.norm(self.strategy.clip_grad_norm(parameters, max_norm, norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value].

        Args:
            parameters: The parameters.
            clip_value: The largest absolute value allowed.
        """
        self.strategy.clip_grad_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Compute in this Accelerator's precision outside of prepared models, as for a loss.

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

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Profile the block; every rank must enter it.

        Args:
            profile_handler: What is recorded; None means the one in `kwargs_handlers`, or torch's defaults.

        Returns:
            A context manager that gives the profiler. With `output_trace_dir`, each rank leaves its trace there at the
            end, also where the block fails; the run's report lists them.
        """
        settings = profile_handler or self._handlers.profile or ProfileKwargs()
        return tracking.profiled(settings, self.process_index, self.wait_for_everyone)

    # -- between ranks ------------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have come here; every rank must call this."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, once per machine.

        Args:
            args: As for the built-in print.
            kwargs: As for the built-in print.
        """
        self.state.print(*args, **kwargs)

    def split_between_processes(
        self, inputs: list[Any] | tuple[Any, ...] | dict[str, Any] | torch.Tensor, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Give each rank its contiguous share of `inputs`.

        Args:
            inputs: A list, tuple or tensor, a dict of such (equally long), or a datasets.Dataset.
            apply_padding: Repeat the last item so that all shares are equally long.

        Returns:
            A context manager that gives the share.
        """
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    def gather(self, tensor: Any) -> Any:
        """Join every tensor of a nested structure over ranks, along the first dimension; every rank must call this.

        Args:
            tensor: Nested containers of tensors with the same shapes on every rank.

        Returns:
            The structure, the same on every rank.
        """
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Join results over ranks, without the samples that fill up the last batches; every rank must call this.

        Args:
            input_data: Nested containers of tensors, or picklable objects in a list.
            use_gather_object: Treat it as Python objects although it holds tensors.

        Returns:
            The results for each sample of the dataset once.
        """
        return collectives.gather_for_metrics(input_data, self.gradient_state, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Add up, or average, every tensor of a nested structure over ranks; every rank must call this.

        Args:
            tensor: Nested containers of tensors with the same shapes on every rank.
            reduction: sum, mean or none.
            scale: Factor applied to the result, on XLA only.

        Returns:
            The structure, the same on every rank.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad every tensor of a nested structure to the largest size among ranks; every rank must call this.

        Args:
            tensor: Nested containers of tensors.
            dim: The dimension that is padded.
            pad_index: What is padded with.
            pad_first: Pad at the beginning instead of the end.

        Returns:
            The structure.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag on this rank, which `check_trigger` finds on all."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Tell whether any rank has raised its flag, and lower it; every rank must call this.

        Returns:
            True on every rank where one has called `set_trigger` since the last check.
        """
        mine = self.flag_tensor if self.flag_tensor is not None else torch.tensor(0, device=self.device)
        raised = bool(collectives.reduce(mine, "sum").item() >= 1)
        if raised:
            self.flag_tensor = None
        return raised

    # -- models -------------------------------------------------------------------------------------------------------

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Take off what `prepare` put around a model.

        Args:
            model: The prepared model.
            keep_fp32_wrapper: Keep its forward in mixed precision; otherwise the original one is put back, in place.
            keep_torch_compile: Return a compiled model for a compiled model.

        Returns:
            The model.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Tell whether a device map spreads a model over several devices.

        Args:
            model: The model.

        Returns:
            True where it does.
        """
        return is_on_several_devices(model)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state; every rank must call this.

        Args:
            model: A prepared model.
            unwrap: Leave out what `prepare` put around the model.

        Returns:
            The state dict.
        """
        return self.strategy.model_state_dict(model, unwrap)

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared, and give memory back.

        Args:
            objects: Objects to let go of, too.

        Returns:
            None for each, to be assigned to the names: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        self.strategy.clear()
        self.step = 0
        return release_memory(*objects)

    def clear(self, *objects: Any) -> Any:
        """Do what `free_memory` does.

        Args:
            objects: Objects to let go of, too.

        Returns:
            None for each.
        """
        return self.free_memory(*objects)

    # -- files --------------------------------------------------------------------------------------------------------

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
    ) -> Any:
        """Write everything that training needs to go on into a folder; every rank must call this.

        Args:
            output_dir: The folder; None with automatic checkpoint naming.
            safe_serialization: Write models as safetensors instead of torch's format.
            save_model_func_kwargs: More arguments for the strategy; blocking=False writes in the background.

        Returns:
            The folder.
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
            input_dir: The folder; None means the latest automatically named one.
            load_kwargs: More arguments for the reader of custom objects and states.
            load_model_func_kwargs: More arguments for the strategy, and `strict` for models.
        """
        checkpointing.load_state(self, input_dir, load_kwargs, **load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in `save_state` and `load_state`, in the order given.

        Args:
            objects: Objects with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: Some have no such methods.
        """
        wrong = [item for item in objects if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))]
        if wrong:
            raise ValueError(
                f"register_for_checkpointing takes objects with state_dict and load_state_dict; {len(wrong)} of "
                f"{len(objects)} have them not: {', '.join(type(item).__name__ for item in wrong)}"
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call a function before `save_state` writes models.

        Args:
            hook: Called as `hook(models, weights, output_dir)`; it may remove weights it writes itself.

        Returns:
            A handle whose `remove()` undoes this.
        """
        return _registered(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call a function before `load_state` reads models.

        Args:
            hook: Called as `hook(models, input_dir)`; it may remove models it reads itself.

        Returns:
            A handle whose `remove()` undoes this.
        """
        return _registered(self._load_model_state_pre_hook, hook)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Make a loader that starts later in its epoch.

        Args:
            dataloader: A prepared loader.
            num_batches: How many batches to leave out.

        Returns:
            The loader.
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    # -- tracking -----------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`.

        Args:
            project_name: Name of the project.
            config: Settings of the run, to be recorded.
            init_kwargs: More arguments, by name of the tracker.
        """
        tracking.init_trackers(self, project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker that was started.

        Args:
            name: Its name.
            unwrap: Return the vendor's own run object.

        Returns:
            The tracker.
        """
        return tracking.get_tracker(self, name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Record numbers of one step, in the trackers and in the run that launched this process.

        Args:
            values: Numbers by name.
            step: The step.
            log_kwargs: More arguments, by name of the tracker.
        """
        tracking.log(self, values, step, log_kwargs)

    def end_training(self) -> None:
        """Finish trackers, background saves and the process group; every rank must call this at the end."""
        tracking.finish(self)
        checkpointing.wait_for_saves("end_training", release=True)
        self.state.destroy_process_group()

    # -- parallel layouts ---------------------------------------------------------------------------------------------

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Split sequences between ranks inside the block, where the parallel layout has a context dimension.

        Args:
            buffers: Tensors that are split in place.
            buffer_seq_dims: Their sequence dimensions.
            no_restore_buffers: Tensors that stay split afterwards.

        Yields:
            Nothing.
        """
        with self.strategy.context_parallel(buffers or [], buffer_seq_dims or [], no_restore_buffers or set()):
            yield

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Make a loader hand out pieces of sequences, for DeepSpeed's sequence parallelism; every rank must call this.

        Loaders that are prepared together with the model do so already. Batches have input_ids, position_ids and
        labels; pieces have shift_labels in place of labels. The loss of a sequence is that of its pieces, each weighted
        with its labels that are not -100, gathered over `accelerator.torch_device_mesh["sp"].get_group()` by
        `torch.distributed.nn.functional.all_gather`.

        Args:
            dl: The prepared loader.
            model: The prepared model; not used, the loader's device is this rank's.

        Returns:
            The loader of pieces; without such a layout, or where it hands out pieces already, the loader itself.
        """
        return self.strategy.sequence_loader(dl)


def _registered(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    if not callable(hook):
        raise ValueError(f"a hook is a function that can be called; got {type(hook).__name__} ({hook!r:.60})")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
