"""FSDP 2: torch's `fully_shard`, which makes every parameter a DTensor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.strategies.context_parallel import leave_masks_out, sequences_split
from notebook_accelerate.strategies.fsdp.fsdp_base import FSDPStrategy
from notebook_accelerate.strategies.fsdp.fsdp_units import (
    checkpoint_activations,
    ignored_of,
    retie,
    tied_names,
    units_of,
)
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.sharded_strategy import broadcast_start
from notebook_accelerate.strategies.strategy import NOTHING
from notebook_accelerate.strategies.strategy_setup import Setup
from notebook_accelerate.strategies.tensor_parallel import split_tensors, step_one_by_one
from notebook_accelerate.telemetry.sharding_events import ShardReport

# By whether there are replicas of the shards, and whether parameters stay whole from forward to backward.
_VARIANTS = {
    (False, False): "FULL_SHARD", (False, True): "SHARD_GRAD_OP",
    (True, False): "HYBRID_SHARD", (True, True): "HYBRID_SHARD_ZERO2",
}  # fmt: skip


class FSDP2Strategy(FSDPStrategy):
    """torch's `fully_shard`, over all ranks or over a mesh of replicas and shards."""

    name: ClassVar[str] = "fsdp2"
    shards_parameters: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that models are sharded over: one dimension of shards, or replicas times shards."""
        if self._mesh is None:
            self._mesh = self._make_mesh()
        return self._mesh

    def _make_mesh(self) -> DeviceMesh:
        layout, mesh = self.setup.state.parallelism_config, self.setup.state.device_mesh
        if mesh is None:
            world = (self.setup.state.num_processes,)
            return init_device_mesh(self.setup.device.type, world, mesh_dim_names=("dp_shard",))
        # A flattened submesh only where it is needed: torch is about to give up slicing by flattened names.
        shards = layout.dp_shard_cp_dim_names
        flat = shards if len(shards) == 1 else ["dp_shard_cp"]
        names = (*layout.fsdp_dim_names[:-1], *flat)
        return mesh[names]  # type: ignore[no-any-return]

    def is_sharded(self, model: Any) -> bool:
        """Tell whether a model is sharded.

        Args:
            model: The model.
        """
        return isinstance(model, FSDPModule)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Shard a model; every rank must call this.

        Args:
            model: The model, on any device; on ranks other than 0 its parameters may have no values where
                `cpu_ram_efficient_loading` is set.

        Returns:
            The model itself, its parameters replaced by their shards.

        Raises:
            ValueError: Parameters have no values, or a wrap policy does not fit the model.
        """
        plugin = self.plugin
        if self._splits_sequences:
            leave_masks_out(model)
        ties = tied_names(model)
        state, buffers = self._start_equal(model, plugin, ties)
        split_tensors(model, self.setup.state.device_mesh)
        ignored = ignored_of(model, plugin.ignored_modules)
        left_alone = {parameter for module in ignored for parameter in module.parameters()}
        units = [unit for unit in units_of(model, plugin.policy_for(model)) if unit not in set(ignored)]
        if plugin.activation_checkpointing:
            units = checkpoint_activations(model, units, bool(plugin.activation_checkpointing_offload))
        settings = {"mesh": self.mesh, **self._policies(plugin), "ignored_params": left_alone or None}
        for unit in units:
            fully_shard(unit, reshard_after_forward=plugin.reshard_after_forward, **settings)
        # Around units, the root's own parameters are needed again at once, by the backward: torch keeps them then.
        rest = None if units and plugin.reshard_after_forward is True else plugin.reshard_after_forward
        fully_shard(model, reshard_after_forward=rest, **settings)
        if state is not None:
            self._fill(model, state, buffers, ties, plugin.offloads)
        return model

    def _policies(self, plugin: Any) -> dict[str, Any]:
        offload = plugin.cpu_offload
        if isinstance(offload, bool):
            pins = self.setup.device.type != "cpu"
            offload = CPUOffloadPolicy(pin_memory=pins) if offload else OffloadPolicy()
        return {"mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(), "offload_policy": offload}

    def _start_equal(
        self, model: nn.Module, plugin: Any, ties: list[list[str]]
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Make ranks start from rank 0's weights: at once, or (the state is returned then) after the sharding."""
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return None, {}
        if plugin.cpu_ram_efficient_loading:
            return _emptied(model, ties)
        hollow = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if hollow:
            raise ValueError(
                f"{type(model).__name__} has parameters without values ({', '.join(hollow[:3])}, ...): load its "
                "weights on rank 0, with FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)"
            )
        if plugin.sync_module_states is not False:
            broadcast_start(model, self.setup.device)
        return None, {}

    def _fill(
        self, model: nn.Module, state: dict[str, Any], buffers: dict[str, Any], ties: list[list[str]], offloads: bool
    ) -> None:
        load_whole(model, state, cpu_offload=offloads)
        device = self.setup.device
        for name, buffer in buffers.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            owner.register_buffer(name.rpartition(".")[2], buffer.to(device), persistent=False)
        retie(model, ties)
        # Units note their parameters' new objects when something is applied to them.
        model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer; parameters it has from before the sharding are replaced.

        Args:
            optimizer: The optimizer.
            device_placement: Whether its state goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared optimizer, after whose steps the precision has its turn.
        """
        known = len(self.optimizers)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        step_one_by_one(prepared.optimizer)
        if len(self.optimizers) > known:
            prepared.optimizer.register_step_post_hook(self._after_step)
        return prepared

    @property
    def _splits_sequences(self) -> bool:
        layout = self.setup.state.parallelism_config
        return layout is not None and bool(layout.cp_enabled)

    def context_parallel(
        self, buffers: list[torch.Tensor], dims: list[int], kept_split: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context in which sequences are split over the ranks of the dimension "cp".

        Args:
            buffers: Tensors that are split in place.
            dims: Their sequence dimensions.
            kept_split: Those that are not made whole again afterwards.

        Returns:
            A context manager.
        """
        if not self._splits_sequences:
            return NOTHING
        how = self.setup.state.parallelism_config.cp_handler.cp_comm_strategy
        return sequences_split(self.setup.state.device_mesh["cp"], how, buffers, dims, kept_split)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for model in self._owners(optimizer):
            self.setup.precision.after_step(model)

    def sharding(self) -> ShardReport:
        """Return what this rank holds of parameters, gradients and optimizer state; nothing is asked of other ranks."""
        plugin = self.plugin
        mesh = shard_report.mesh_of(self, "dp_shard")
        hybrid = "dp_replicate" in mesh[0]
        kept = plugin.reshard_after_forward is False
        units = sum(isinstance(module, FSDPModule) for model in self.models for module in model.modules())
        return shard_report.of(
            self,
            variant=_VARIANTS[hybrid, kept],
            offloaded="cpu" if plugin.offloads else "",
            note="whole from forward to backward" if kept else "gathered unit by unit",
            mesh=mesh,
            units=(units, "units"),
        )

    def unsynchronised(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which backward of sharded models does not exchange gradients.

        Args:
            models: Sharded models.
        """
        return Unreduced(models)


class Unreduced:
    """A context in which backward of sharded models keeps gradients whole on every rank and does not exchange them.

    Args:
        models: The sharded models.
    """

    __slots__ = ("_models",)

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models

    def __enter__(self) -> None:
        for model in self._models:
            model.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        for model in self._models:
            model.set_requires_gradient_sync(True)


def _emptied(model: nn.Module, ties: list[list[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the values out of a model, in place.

    Returns:
        On rank 0 its state; on every rank rank 0's buffers that are in no state.
    """
    first = dist.get_rank() == 0
    state = model.state_dict() if first else {}
    known = state.keys() | {name for name, _ in model.named_parameters(remove_duplicate=False)}
    passing = [{n: b.cpu() for n, b in model.named_buffers() if n not in known} if first else None]
    dist.broadcast_object_list(passing, src=0)
    model.to("meta")
    retie(model, ties)
    return state, passing[0] or {}


def load_whole(model: nn.Module, state: dict[str, Any], cpu_offload: bool = False) -> None:
    """Give a sharded model the weights that rank 0 has; every rank must call this.

    Args:
        model: The sharded model; its parameters may have no values yet.
        state: The whole state on rank 0; ignored on other ranks.
        cpu_offload: Whether the shards rest in main memory.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
