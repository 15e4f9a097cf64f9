"""The attributes and properties of `Accelerator`, for packages that must not import `Accelerator` itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

from notebook_accelerate.config.enums import DistributedType, FP8BackendType
from notebook_accelerate.config.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from notebook_accelerate.config.low_precision import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.precision import Precision, fp8_library
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state import AcceleratorState, GradientState
from notebook_accelerate.state.rank_execution import RankExecution
from notebook_accelerate.strategies.accelerator_arguments import Fp8Recipe, Handlers, check_handler
from notebook_accelerate.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
    from notebook_accelerate.config.parallelism_config import ParallelismConfig


_Recipe = TypeVar("_Recipe", bound=Fp8Recipe)


class AcceleratorProperties(RankExecution):
    """The attributes and properties of `Accelerator`.

    Packages that `accelerator.py` imports use this class in annotations. The lists with a leading underscore keep
    Accelerate's names because libraries built on Accelerate read them.
    """

    state: AcceleratorState
    gradient_state: GradientState
    strategy: Strategy
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _device: torch.device
    _precision: Precision
    _handlers: Handlers
    scaler: torch.amp.GradScaler | None
    step: int
    trackers: list[Any]
    log_with: list[Any]
    _models: list[torch.nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[DataLoader[Any]]
    _custom_objects: list[Any]
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]]
    _load_model_state_pre_hook: OrderedDict[int, Callable[..., None]]

    # ---- this process and its world

    @property
    def distributed_type(self) -> DistributedType:
        """The type of distributed training, such as MULTI_GPU or FSDP."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """The index of this rank, counted from 0."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """The index of this rank on its machine."""
        return self.state.local_process_index

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether several GPUs or other accelerators train by data parallelism."""
        return self.use_distributed and self.distributed_type.value.startswith("MULTI_") and self._device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """The precision of the models that this Accelerator prepares: no, fp16, bf16 or fp8."""
        return self._precision.name

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The parallel layout, or None if ranks only use data parallelism."""
        layout: ParallelismConfig | None = self.state.parallelism_config
        return layout

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh of the parallel layout, or None if there is no layout."""
        mesh: DeviceMesh | None = self.state.device_mesh
        return mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP 2."""
        return self.state.is_fsdp2

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The active DeepSpeed plugin, or None if DeepSpeed is not used."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The wrapper of DeepSpeed's engine, or None if DeepSpeed is not used or no model has been prepared."""
        return getattr(self.strategy, "deepspeed_engine_wrapped", None)

    @property
    def native_amp(self) -> bool:
        """Whether `autocast` and models that are prepared from now on use torch's autocast."""
        return self._precision.native_amp

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        self._precision.native_amp = value

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8, or `FP8BackendType.NO` if the precision is not fp8."""
        return getattr(self._precision, "backend", FP8BackendType.NO)

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether sharding can be combined with other parallel dimensions."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes files when a model is saved.

        If models are sharded, all ranks do, otherwise only rank 0.
        """
        return self.strategy.all_ranks_save or self.state.is_main_process

    def _mesh_rank(self, *names: str) -> int:
        mesh = self.torch_device_mesh
        if self.parallelism_config is None or mesh is None:
            raise NotImplementedError(
                f"there is no {names[0]} dimension: this Accelerator has no parallel layout; pass "
                "Accelerator(parallelism_config=ParallelismConfig(...))"
            )
        return next((int(mesh.get_local_rank(name)) for name in names if name in (mesh.mesh_dim_names or ())), 0)

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's index in its tensor-parallel group.

        Raises:
            NotImplementedError: There is no parallel layout.
        """
        return self._mesh_rank("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's index in its pipeline.

        Raises:
            NotImplementedError: There is no parallel layout.
        """
        return self._mesh_rank("pp")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's index in its context-parallel group.

        Raises:
            NotImplementedError: There is no parallel layout.
        """
        return self._mesh_rank("cp")

    @property
    def data_parallel_rank(self) -> int:
        """This rank's index along the dimension of data-parallel replicas.

        Raises:
            NotImplementedError: There is no parallel layout.
        """
        return self._mesh_rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's index along the dimension of data-parallel shards.

        Raises:
            NotImplementedError: There is no parallel layout.
        """
        return self._mesh_rank("dp_shard")

    # ---- settings

    @property
    def split_batches(self) -> bool:
        """Whether each batch of a loader is split among the ranks."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads the data for all ranks."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated at the end so that all ranks get the same number of batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether loaders shuffle with a sampler that is seeded separately for each epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders save their position (torchdata's StatefulDataLoader)."""
        return bool(getattr(self.dataloader_config, "use_stateful_dataloader", False))

    @property
    def project_dir(self) -> str | None:
        """The folder for checkpoints."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder for logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = GradientAccumulationPlugin(num_steps=value).num_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether this batch completes an accumulation window. If so, gradients are exchanged and optimizers step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because of infinite gradients."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # ---- kwargs_handlers. Each handler is None if it was not given. Libraries assign handlers before prepare().

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The settings for autocast."""
        return self._precision.autocast_handler

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._precision.autocast_handler = check_handler("autocast_handler", handler, AutocastKwargs)

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The settings for DDP."""
        return self.strategy.setup.ddp_handler

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        self.strategy.setup.ddp_handler = check_handler("ddp_handler", handler, DistributedDataParallelKwargs)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The settings for the loss scaler. Assigning new ones does not change an existing scaler."""
        return self._precision.scaler_handler

    @scaler_handler.setter
    def scaler_handler(self, handler: GradScalerKwargs | None) -> None:
        self._precision.scaler_handler = check_handler("scaler_handler", handler, GradScalerKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The settings for the process group. Assigning new ones does not change an existing group."""
        return self._handlers.init

    @init_handler.setter
    def init_handler(self, handler: InitProcessGroupKwargs | None) -> None:
        self._handlers.init = check_handler("init_handler", handler, InitProcessGroupKwargs)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The settings for the profiler."""
        return self._handlers.profile

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self._handlers.profile = check_handler("profile_handler", handler, ProfileKwargs)

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The fp8 recipe for torchao."""
        return self._recipe(AORecipeKwargs)

    @ao_recipe_handler.setter
    def ao_recipe_handler(self, recipe: AORecipeKwargs | None) -> None:
        self._set_recipe("ao_recipe_handler", recipe, AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The fp8 recipe for Transformer Engine."""
        return self._recipe(TERecipeKwargs)

    @te_recipe_handler.setter
    def te_recipe_handler(self, recipe: TERecipeKwargs | None) -> None:
        self._set_recipe("te_recipe_handler", recipe, TERecipeKwargs)

    @property
    def msamp_recipe_handler(self) -> MSAMPRecipeKwargs | None:
        """The fp8 recipe for MS-AMP."""
        return self._recipe(MSAMPRecipeKwargs)

    @msamp_recipe_handler.setter
    def msamp_recipe_handler(self, recipe: MSAMPRecipeKwargs | None) -> None:
        self._set_recipe("msamp_recipe_handler", recipe, MSAMPRecipeKwargs)

    @property
    def fp8_recipe_handler(self) -> FP8RecipeKwargs | None:
        """The fp8 recipe, if it is an instance of the deprecated `FP8RecipeKwargs`."""
        return self._recipe(FP8RecipeKwargs)

    @fp8_recipe_handler.setter
    def fp8_recipe_handler(self, recipe: FP8RecipeKwargs | None) -> None:
        self._set_recipe("fp8_recipe_handler", recipe, FP8RecipeKwargs)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model; every rank must call this.

        Args:
            model: The prepared model whose state is gathered.
            unwrap: Whether to remove the wrappers that `prepare` added to the model.

        Returns:
            The state dict, by parameter name.
        """
        return self.strategy.model_state_dict(model, unwrap)

    def _recipe(self, kind: type[_Recipe]) -> _Recipe | None:
        recipe: _Recipe | None = self._precision.fp8_recipe
        return recipe if type(recipe) is kind else None

    def _set_recipe(self, name: str, recipe: _Recipe | None, kind: type[_Recipe]) -> None:
        """Replace the fp8 recipe with one for the same library.

        A recipe cannot be removed, so None is allowed only if no recipe of that kind is set.
        """
        if recipe is None and self._recipe(kind) is None:
            return
        if recipe is None or fp8_library(self.device.type, recipe) != self.fp8_backend.value:
            raise ValueError(
                f"{name} cannot become {recipe!r:.60}: this Accelerator has mixed_precision={self.mixed_precision!r} "
                f"and the fp8 library {self.fp8_backend.value}; write Accelerator(mixed_precision='fp8', "
                f"kwargs_handlers=[{kind.__name__}(...)])"
            )
        self._precision.fp8_recipe = check_handler(name, recipe, kind)


class HasState(Protocol):
    """An object with the attribute `state`, such as an `Accelerator` or a strategy's `Setup`."""

    state: AcceleratorState
