"""FSDP 2: torch's `fully_shard`, which turns every parameter into a separate DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.strategies.context_parallel import split_sequences
from notebook_accelerate.strategies.expert_parallel import split_experts
from notebook_accelerate.strategies.fsdp.fsdp_units import choose_units, resolved_plugin
from notebook_accelerate.strategies.fsdp.packed_weights import has_packed_weights, make_weights_shardable
from notebook_accelerate.strategies.module_queries import (
    check_values,
    model_has_dtensor,
    retie,
    tied_names,
    without_compile,
)
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.sharded_strategy import ShardedStrategy, broadcast_weights
from notebook_accelerate.strategies.strategy import NOTHING
from notebook_accelerate.strategies.tensor_parallel import split_tensors
from notebook_accelerate.telemetry.sharding import ShardReport
from notebook_accelerate.torch_internals import refresh_parameters

# The keys specify whether shards are replicated, and whether parameters stay whole between the forward and the backward
# pass. The values are FSDP 1's names for these variants.
_VARIANTS = {
    (False, False): "FULL_SHARD", (False, True): "SHARD_GRAD_OP",
    (True, False): "HYBRID_SHARD", (True, True): "HYBRID_SHARD_ZERO2",
}  # fmt: skip


class FSDP2Strategy(ShardedStrategy):
    """Trains with torch's `fully_shard`, across all ranks or across a mesh of replicas and shards."""

    name: ClassVar[str] = "fsdp2"
    gathers_fp8: ClassVar[bool] = True

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh that models are sharded across: a dimension for shards, preceded by one for replicas if needed."""
        layout, mesh = self.setup.state.parallelism_config, self.setup.state.device_mesh
        if mesh is None:
            world = (self.setup.state.num_processes,)
            return init_device_mesh(self.setup.device.type, world, mesh_dim_names=("dp_shard",))
        # Use the flattened submesh only if it is needed, because slicing by flattened names is being deprecated in
        # torch.
        shards = layout.dp_shard_cp_dim_names
        flat = shards if len(shards) == 1 else ["dp_shard_cp"]
        names = (*layout.fsdp_dim_names[:-1], *flat)
        return mesh[names]  # type: ignore[no-any-return]

    def _has_sharded(self, model: nn.Module) -> bool:
        return isinstance(model, FSDPModule)

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model in place; every rank must call this. `fsdp2_prepare_model` runs only this step.

        Args:
            model: The model, on any device, because each unit is moved to this rank's device when it is sharded. With
                `cpu_ram_efficient_loading`, the parameters may have no values on ranks other than 0.

        Returns:
            The model itself, with its parameters replaced by their shards.

        Raises:
            ValueError: Some parameters have no values, or a setting of the plugin does not fit the model.
        """
        plugin, device = resolved_plugin(self.setup), self.setup.device
        ties = tied_names(model)  # Moving a model to the meta device, or splitting it, unties parameters.
        weights = None
        packed = has_packed_weights(model)
        if packed:
            make_weights_shardable(model, device)
        if not model_has_dtensor(model):  # A model that transformers has split is already the same on all ranks.
            if plugin.cpu_ram_efficient_loading and not packed:  # Packed weights have values on every rank.
                weights = _move_weights_out(model, ties)
            else:
                check_values(model, _LOAD_ON_RANK_0)
                if plugin.sync_module_states is not False:
                    broadcast_weights(model, device)
        split_tensors(model, self.setup.state.device_mesh)
        split_experts(model, self.setup.state.device_mesh)
        _shard_units(model, self.mesh, plugin, device)
        if weights is not None:
            _load_weights(model, weights, device, plugin.offloads)
            retie(model, ties)
            refresh_parameters(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """See `ShardedStrategy.prepare_optimizer`. After each step, `Precision.after_step` is called for the models."""
        known = len(self.optimizers)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if len(self.optimizers) > known:
            prepared.optimizer.register_step_post_hook(self._after_step)
        return prepared

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for model in self.models_of(optimizer):
            self.setup.precision.after_step(model)

    @property
    def _splits_sequences(self) -> bool:
        layout = self.setup.state.parallelism_config
        return layout is not None and bool(layout.cp_enabled)

    def context_parallel(
        self, buffers: list[torch.Tensor], dims: list[int], kept_split: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """See `Strategy.context_parallel`. Sequences are split across the ranks of the dimension "cp"."""
        if not self._splits_sequences:
            return NOTHING
        how = self.setup.state.parallelism_config.cp_handler.cp_comm_strategy
        return split_sequences(self.setup.state.device_mesh["cp"], how, buffers, dims, kept_split)

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """See `Strategy.accumulating`. Inside the context, each rank keeps whole gradients."""
        sharded = [inner for model in models if isinstance(inner := without_compile(model), FSDPModule)]
        return Unreduced(sharded) if sharded else NOTHING

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        sharded = isinstance(without_compile(model), FSDPModule)
        return self.accumulating([model]) if sharded else super().no_sync(model)

    def sharding(self) -> ShardReport:
        plugin = resolved_plugin(self.setup)
        mesh = shard_report.mesh_axes(self, "dp_shard")
        hybrid = "dp_replicate" in mesh[0]
        kept = plugin.reshard_after_forward is False
        units = sum(isinstance(module, FSDPModule) for model in self.models for module in model.modules())
        return shard_report.count_shards(
            self,
            variant=_VARIANTS[hybrid, kept],
            offloaded="cpu" if plugin.offloads else "",
            note="whole from forward to backward" if kept else "gathered unit by unit",
            mesh=mesh,
            units=(units, "units"),
        )


class Unreduced:
    """A context that keeps the backward pass of sharded models from exchanging gradients.

    Each rank keeps whole gradients instead.

    Args:
        models: The sharded models to keep from exchanging gradients.
    """

    __slots__ = ("_models",)

    def __init__(self, models: Sequence[FSDPModule]) -> None:
        self._models = models

    def __enter__(self) -> None:
        for model in self._models:
            model.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        for model in self._models:
            model.set_requires_gradient_sync(True)


# ---- the steps of `shard`

_Weights = tuple[dict[str, Any], dict[str, torch.Tensor]]
_LOAD_ON_RANK_0 = (
    "load its weights on rank 0, with FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)"
)


def _move_weights_out(model: nn.Module, ties: list[list[str]]) -> _Weights:
    """Move a model to the meta device in place, and return its values; every rank must call this.

    Returns:
        The model's state, which is empty on ranks other than 0, and the buffers that are not part of the state, which
        every rank gets from rank 0.
    """
    first = dist.get_rank() == 0
    state = model.state_dict() if first else {}
    known = state.keys() | {name for name, _ in model.named_parameters(remove_duplicate=False)}
    sent = [{n: b.cpu() for n, b in model.named_buffers() if n not in known} if first else None]
    dist.broadcast_object_list(sent, src=0)
    model.to("meta")
    retie(model, ties)
    return state, sent[0] or {}


def _load_weights(model: nn.Module, weights: _Weights, device: torch.device, cpu_offload: bool) -> None:
    """Load the values from `_move_weights_out` into the sharded model; every rank must call this."""
    state, buffers = weights
    load_full_state(model, state, cpu_offload)
    for name, buffer in buffers.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.register_buffer(name.rpartition(".")[2], buffer.to(device), persistent=False)


def _shard_units(
    model: nn.Module, mesh: DeviceMesh, plugin: FullyShardedDataParallelPlugin, device: torch.device
) -> None:
    units, ignored = choose_units(model, plugin)
    pin = device.type != "cpu" and getattr(plugin.cpu_offload, "pin_memory", True)  # The CPU needs no pinning.
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if plugin.offloads else OffloadPolicy(),
        "ignored_params": {parameter for module in ignored for parameter in module.parameters()} or None,
    }
    reshard: Any = plugin.reshard_after_forward
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard, **settings)
    # The backward pass needs the root's own parameters right after the forward pass. With None, torch keeps them whole.
    fully_shard(model, reshard_after_forward=None if units and reshard is True else reshard, **settings)


def load_full_state(model: nn.Module, state: dict[str, Any], cpu_offload: bool = False) -> None:
    """Load rank 0's full state dict into a sharded model; every rank must call this.

    Args:
        model: The sharded model. Its parameters may have no values yet.
        state: The full state dict on rank 0. It is ignored on other ranks.
        cpu_offload: Whether the shards are kept in CPU memory.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
