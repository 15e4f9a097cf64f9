"""The base class of strategies that shard parameters, and the steps that their `prepare_model` methods share."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from notebook_accelerate.collectives.communicator import start_watchdog
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.precision import Precision
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.module_queries import (
    ParameterReplacements,
    flat_parameters_by_name,
    get_model_tp_size,
    is_compiled_module,
    is_dtensor,
    model_has_dtensor,
    optimizer_parameters,
    parameters_by_name,
    without_compile,
    without_wrappers,
)
from notebook_accelerate.strategies.sharding import shard_report, sharded_checkpoint
from notebook_accelerate.strategies.sharding.write_plans import StatePart, clear_plans
from notebook_accelerate.strategies.strategy import (
    NOTHING,
    Strategy,
    add_once,
    inner_optimizer,
    joint_norm,
    parameters_in,
)
from notebook_accelerate.telemetry.sharding import ShardReport


class ShardedStrategy(Strategy):
    """Trains with parameters, gradients and optimizer states sharded across ranks. Subclasses define `shard`.

    Attributes:
        models: The prepared, sharded models.
        replacements: A record of the parameters that replaced the models' original ones.
    """

    checkpoint_layout: ClassVar[str] = "fsdp"
    all_ranks_save: ClassVar[bool] = True
    gathers_fp8: ClassVar[bool] = False
    """Whether `Precision.wrap_model` may convert parameters to types that ranks gather in fp8."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.replacements = ParameterReplacements()
        # Each rank writes a part of a checkpoint. Without the watchdog, ranks would hang if only some called
        # save_state.
        start_watchdog()

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model; every rank must call this. `prepare` calls it before it prepares optimizers.

        Args:
            model: The model to prepare. If it is already sharded, it is not sharded again.
            device_placement: Not used, because `shard` moves the model to the device.
            evaluation_mode: Whether the model is prepared for inference only, and therefore stays whole.

        Returns:
            The result of `shard`, compiled if the Accelerator compiles models.

        Raises:
            ValueError: The model cannot be sharded.
        """
        if evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)
        inner = without_compile(model)
        before = parameters_by_name(inner)  # Optimizers refer to these parameters, even after they are replaced.
        self.setup.precision.wrap_model(without_wrappers(model), sharded=self.gathers_fp8)
        if not self._has_sharded(inner):
            upcast_trained(inner, self.setup.precision)
            inner = self.shard(inner)
            self.replacements.record(before, flat_parameters_by_name(inner) or parameters_by_name(inner))
            for optimizer in self.optimizers:
                self.replacements.apply(optimizer.optimizer)
        add_once(self.models, inner)
        return self.compile_and_mark(model if is_compiled_module(model) else inner)

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model that is not compiled; every rank must call this.

        Args:
            model: The model, which this strategy has not sharded yet.

        Returns:
            The sharded model: the model itself, or its wrapper.
        """
        raise NotImplementedError

    def _has_sharded(self, model: nn.Module) -> bool:
        """Return whether an earlier `prepare` has sharded a model."""
        raise NotImplementedError

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """See `Strategy.prepare_optimizer`. The optimizer is switched to the sharded parameters.

        Raises:
            ValueError: The optimizer has no parameter of a prepared model.
        """
        inner = inner_optimizer(optimizer)
        self.replacements.apply(inner)
        if self.models and not self.models_of(inner):
            raise ValueError(
                f"{type(inner).__name__} has no parameter of a prepared model: it was created before the model was "
                "sharded, or for another model. Prepare them together: model, optimizer = accelerator.prepare(model, "
                "optimizer), or create it from model.parameters() of the prepared model"
            )
        prepared = super().prepare_optimizer(optimizer, device_placement)
        step_parameters_singly(prepared.optimizer)
        return prepared

    def models_of(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """List the prepared models that an optimizer trains.

        Args:
            optimizer: The torch optimizer, without wrappers.
        """
        trained = {id(parameter) for parameter in optimizer_parameters(optimizer)}
        return [model for model in self.models if any(id(parameter) in trained for parameter in model.parameters())]

    # ---- training

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Warn that sharded models cannot be joined, because a rank without a batch would miss collectives."""
        warn_once(
            "join_uneven_inputs has no effect on sharded models: every rank must run every forward pass; keep "
            "even_batches=True"
        )
        return NOTHING

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `Strategy.clip_grad_norm`. The norm of all shards is computed, so every rank must call this."""
        self.unscale_gradients()
        groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in parameters_in(parameters):
            if parameter.grad is not None:
                groups[getattr(parameter.grad, "device_mesh", None)].append(parameter)
        total = joint_norm([_norm_of(group, norm_type) for group in groups.values()], norm_type)
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
        return total

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        self.unscale_gradients()
        for parameter in parameters_in(parameters):
            if parameter.grad is not None:
                grad = parameter.grad
                (grad.to_local() if hasattr(grad, "to_local") else grad).clamp_(-clip_value, clip_value)

    # ---- states

    def model_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's full state in CPU memory on rank 0, and {} on other ranks; every rank must call this.

        Args:
            model: The prepared model whose state is gathered.
            unwrap: See `Strategy.model_state_dict`.
        """
        bare = without_compile(model)
        if not is_sharded(bare):
            return super().model_state_dict(model, unwrap)
        return sharded_checkpoint.full_model_state(bare)

    def state_parts(self, safe_serialization: bool = True, **options: Any) -> list[StatePart]:
        """Return this rank's parts of the models and optimizers; every rank must call this.

        Args:
            safe_serialization: Not used, because torch determines the file formats.
            options: Must be empty, because no options are supported.

        Returns:
            The parts, in the same order on every rank. They share memory with the models and optimizers.

        Raises:
            ValueError: `options` were given.
        """
        _reject_options("save_state", options)
        plugin = self.setup.state.fsdp_plugin
        # Read the kind in every call, because fsdp_plugin.set_state_dict_type(...) may have changed it.
        kind = "SHARDED_STATE_DICT" if plugin is None else str(plugin.state_dict_kind)
        parts = []
        for index, model in enumerate(self.models):
            parts += sharded_checkpoint.model_parts(model, index, kind)
        for index, optimizer in enumerate(self.optimizers):
            parts += sharded_checkpoint.optimizer_parts(optimizer.optimizer, self._model_of(optimizer), index, kind)
        return parts

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """Load models and optimizers from a folder; every rank must call this.

        Args:
            folder: The folder of the checkpoint.
            models: The prepared models that no hook has loaded.
            options: Only `strict`, which says whether all names must match the model's.

        Raises:
            ValueError: Options other than `strict` were given.
        """
        strict = options.pop("strict", True)
        _reject_options("load_state", options)
        for index, model in enumerate(self.models):
            if any(model is wanted for wanted in models):
                sharded_checkpoint.load_model(model, folder, index, strict)
        for index, optimizer in enumerate(self.optimizers):
            sharded_checkpoint.load_optimizer(optimizer.optimizer, self._model_of(optimizer), folder, index)

    def _model_of(self, optimizer: AcceleratedOptimizer) -> nn.Module:
        models = self.models_of(optimizer.optimizer)
        if len(models) != 1:
            raise ValueError(
                f"{type(optimizer.optimizer).__name__} trains {len(models)} of the {len(self.models)} prepared models; "
                "a checkpoint of sharded states needs one optimizer for each model"
            )
        return models[0]

    def clear(self) -> None:
        super().clear()
        self.replacements.clear()
        clear_plans()


def _reject_options(call: str, options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"{call} of sharded models does not take {', '.join(options)}; leave it out")


def _norm_of(parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# ---- the steps of `prepare_model`


def is_sharded(model: nn.Module) -> bool:
    """Return whether a rank has only a part of a model.

    Args:
        model: The model, which must not be compiled.
    """
    wrapped = isinstance(model, (FSDPModule, FullyShardedDataParallel))
    return wrapped or model_has_dtensor(model) or (get_model_tp_size(model) or 1) > 1


def upcast_trained(model: nn.Module, precision: Precision) -> bool:
    """Convert a model's trainable parameters from low precision to float32, in place. Tied parameters stay tied.

    Args:
        model: The model to convert.
        precision: The precision that the model computes in. If it is float32, nothing is converted.

    Returns:
        Whether any parameter was converted. If so, a warning is issued.
    """
    low = [p for p in model.parameters() if p.requires_grad and p.dtype in {torch.float16, torch.bfloat16}]
    if precision.compute_dtype is None or not low:
        return False
    for parameter in low:
        parameter.data = parameter.data.float()
    warn_once(f"{type(model).__name__} has parameters of low precision: they are trained in float32")
    return True


@torch.no_grad()
def broadcast_weights(model: nn.Module, device: torch.device) -> None:
    """Send rank 0's weights and buffers to every rank, as DistributedDataParallel does; every rank must call this.

    Args:
        model: The model before it is sharded.
        device: The device for exchanging tensors between ranks.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        moved = tensor.detach().to(device).contiguous()
        dist.broadcast(moved, src=0)
        if moved.data_ptr() != tensor.data_ptr():
            tensor.copy_(moved)


def step_parameters_singly(optimizer: torch.optim.Optimizer) -> None:
    """Turn off `foreach` and `fused` for parameter groups with several meshes, or with sharded and whole parameters.

    With these options, torch computes with lists of tensors, which must all have the same mesh.

    Args:
        optimizer: The torch optimizer, without wrappers.
    """
    for group in optimizer.param_groups:
        meshes = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
        if len(meshes) > 1:
            group.update({name: False for name in ("foreach", "fused") if name in group})


# ---- strategies that split the tensors or the experts of layers


class SplitLayersStrategy(ShardedStrategy):
    """Splits layers along the mesh dimension that is named like the strategy.

    Ranks along that dimension read the same data. Checkpoints of these strategies and of FSDP are interchangeable.
    """

    @abstractmethod
    def split(self, model: nn.Module) -> None:
        """Split a model in place, on its device; every rank must call this.

        Args:
            model: The model, with equal weights on all ranks.

        Raises:
            ValueError: The model cannot be split.
        """

    def shard(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, and split it there in place; every rank must call this.

        Args:
            model: The model before it is split.

        Returns:
            The model itself, with its weights replaced by their parts.

        Raises:
            ValueError: The model cannot be split.
        """
        model.to(self.setup.device)
        broadcast_weights(model, self.setup.device)
        self.split(model)
        return model

    def sharding(self) -> ShardReport:
        split = sum(
            any(is_dtensor(parameter) for parameter in module.parameters(recurse=False))
            for model in self.models
            for module in model.modules()
        )
        return shard_report.count_shards(self, axis=self.name, units=(split, "split layers"))
