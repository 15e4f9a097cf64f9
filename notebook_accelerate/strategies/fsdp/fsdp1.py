"""FSDP 1: torch's `FullyShardedDataParallel`, which flattens the parameters of each unit into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy

from notebook_accelerate.state.world import world_from_environ
from notebook_accelerate.strategies.fsdp.fsdp_base import FSDPStrategy
from notebook_accelerate.strategies.fsdp.fsdp_units import (
    checkpoint_activations,
    ignored_of,
    keeping_ties,
    retie,
    tied_names,
    units_of,
)
from notebook_accelerate.strategies.parameter_names import flat_names_of, names_of
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.shard_report import ShardTally
from notebook_accelerate.strategies.sharding.sharded_strategy import broadcast_start
from notebook_accelerate.strategies.strategy import joint_norm, parameters_in
from notebook_accelerate.strategies.strategy_setup import Setup
from notebook_accelerate.telemetry.sharding_events import ShardReport

_HYBRID = {ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2}


class FSDP1Strategy(FSDPStrategy):
    """torch's `FullyShardedDataParallel`, with all its sharding strategies."""

    name: ClassVar[str] = "fsdp1"

    def __init__(self, setup: Setup) -> None:
        if setup.scaler is not None:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            handler = setup.precision.scaler_handler
            setup.scaler = ShardedGradScaler(setup.device.type, **(handler.to_kwargs() if handler is not None else {}))
        super().__init__(setup)

    def is_sharded(self, model: Any) -> bool:
        """Tell whether a model is sharded.

        Args:
            model: The model.
        """
        return isinstance(model, FullyShardedDataParallel)

    def sharded_names(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return what an optimizer trains, by the plain names of the model's parameters.

        Args:
            model: The sharded model.
        """
        return flat_names_of(model) or names_of(model)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Shard a model; every rank must call this.

        Args:
            model: The model, on any device; on ranks other than 0 its parameters may have no values where
                `cpu_ram_efficient_loading` is set.

        Returns:
            The wrapped model.
        """
        plugin = self.plugin
        ignored = ignored_of(model, plugin.ignored_modules)
        units = [unit for unit in units_of(model, plugin.policy_for(model)) if unit not in set(ignored)]
        if plugin.activation_checkpointing:
            units = checkpoint_activations(model, units, bool(plugin.activation_checkpointing_offload))
        chosen = set(units)
        offloads = plugin.offloads and self.setup.device.type != "cpu"  # there, they rest in main memory anyway
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=lambda module, recurse, **_: recurse or module in chosen,
            ignored_modules=ignored or None,
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=bool(plugin.use_orig_params),
            mixed_precision=plugin.mixed_precision_policy,
            cpu_offload=CPUOffload(offload_params=True) if offloads else None,
            backward_prefetch=_prefetch(plugin.backward_prefetch),
            forward_prefetch=bool(plugin.forward_prefetch),
            **self._sharding(plugin),
            **self._placing(model, plugin),
        )

    def _sharding(self, plugin: Any) -> dict[str, Any]:
        """Return the sharding strategy; replicas of shards are one per machine."""
        given = plugin.sharding_strategy
        names = {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}
        chosen = ShardingStrategy[names.get(given, given)] if isinstance(given, str) else given
        if chosen not in _HYBRID:
            return {"sharding_strategy": chosen}
        world, local = self.setup.state.num_processes, world_from_environ().local_size
        shape = (world // local, local)
        mesh = init_device_mesh(self.setup.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        return {"sharding_strategy": chosen, "device_mesh": mesh}

    def _placing(self, model: nn.Module, plugin: Any) -> dict[str, Any]:
        """Return how units get to the device, and rank 0's weights to the others."""
        device = self.setup.device
        hollow = any(parameter.is_meta for parameter in model.parameters())
        make = plugin.param_init_fn or (keeping_ties(_emptying(device), model) if hollow else None)
        if device.type != "cpu":
            synced = bool(plugin.sync_module_states)
            return {"device_id": device, "sync_module_states": synced, "param_init_fn": make}
        # torch's FSDP 1 sends the first weights over accelerators only; here they are sent before.
        if hollow:
            ties = tied_names(model)
            model.to_empty(device=device)
            retie(model, ties)
        if plugin.sync_module_states:
            broadcast_start(model, device)
        return {"device_id": device, "param_init_fn": plugin.param_init_fn}

    def sharding(self) -> ShardReport:
        """Return what this rank holds of parameters, gradients and optimizer state; nothing is asked of other ranks."""
        roots: Any = [model for model in self.models if self.is_sharded(model)]
        if not roots:
            return super().sharding()
        state, shards = self.setup.state, roots[0].process_group.size()
        chosen = roots[0].sharding_strategy
        axes = {"dp_replicate": (state.num_processes // shards, state.process_index // shards)}
        axes["dp_shard"] = (shards, state.process_index % shards)
        whole = chosen == ShardingStrategy.NO_SHARD
        if whole:
            axes = {"dp_replicate": (state.num_processes, state.process_index)}
        keeps = chosen in {ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2}
        flat = [handle.flat_param for root in roots for handle in _handles(root)]
        parameters, trained = _tally(flat), _tally(p for p in flat if p.requires_grad)
        count = shard_report.moments_of_all(shard_report.inner(self))
        offloaded = "cpu" if self.plugin.offloads else ""
        note = "" if whole else "whole from forward to backward" if keeps else "gathered unit by unit"
        return shard_report.summary(
            self,
            parameters.held(offloaded, note),
            trained.held(offloaded),
            trained.kept(count, offloaded),
            variant=chosen.name.lstrip("_"),
            mesh=shard_report.chosen(axes),
            units=(len(flat), "units"),
        )

    def unsynchronised(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which backward of sharded models does not exchange gradients.

        Args:
            models: Sharded models.
        """
        return _unsynchronised(models)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most `max_norm`; every rank must call this.

        Args:
            parameters: The parameters of one prepared model.
            max_norm: The largest norm allowed.
            norm_type: Which norm.

        Returns:
            The norm before clipping, over all shards.
        """
        self.unscale_gradients()
        given = parameters_in(parameters)
        wanted = {id(parameter) for parameter in given}
        owners = [model for model in self.models if any(id(parameter) in wanted for parameter in model.parameters())]
        if not owners:
            return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type=norm_type)
        norms: list[torch.Tensor] = [model.clip_grad_norm_(max_norm, norm_type) for model in owners]  # type: ignore[operator]
        return joint_norm(norms, norm_type)


@contextmanager
def _unsynchronised(models: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.no_sync())
        yield


def _handles(model: Any) -> list[Any]:
    """Return what holds the flat parameters of an FSDP 1 model, one for each unit that has any."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    return [handle for unit in units if (handle := getattr(unit, "_handle", None)) is not None]


def _tally(flat: Iterable[Any]) -> ShardTally:
    """Count flat parameters; the last shard is padded."""
    found = ShardTally()
    for parameter in flat:
        size = parameter.element_size()
        whole, here = parameter._unpadded_unsharded_size.numel() * size, parameter._sharded_size.numel() * size
        found += ShardTally(whole, here, frozenset({"dp_shard"} if here < whole else ()))
    return found


def _emptying(device: torch.device) -> Callable[[nn.Module], None]:
    def empty(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)

    return empty


def _prefetch(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    return None if given == "NO_PREFETCH" else BackwardPrefetch[given]
