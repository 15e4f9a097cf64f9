"""FSDP 1: torch's `FullyShardedDataParallel`, which flattens the parameters of each unit into one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy

from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.state.process_group import world_from_environ
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.fsdp.fsdp_units import choose_units, resolved_plugin
from notebook_accelerate.strategies.module_queries import keep_ties, retie, tied_names, without_compile
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.shard_report import ShardTally
from notebook_accelerate.strategies.sharding.sharded_strategy import ShardedStrategy, broadcast_weights
from notebook_accelerate.strategies.strategy import NOTHING, joint_norm, parameters_in
from notebook_accelerate.telemetry.sharding import ShardReport
from notebook_accelerate.torch_internals import flat_parameter_handle, flat_parameter_sizes, hybrid_zero2

_HYBRID = {ShardingStrategy.HYBRID_SHARD, hybrid_zero2()}


class FSDP1Strategy(ShardedStrategy):
    """Trains with torch's `FullyShardedDataParallel`, with any of its sharding strategies."""

    name: ClassVar[str] = "fsdp1"

    def __init__(self, setup: Setup) -> None:
        if setup.scaler is not None:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            handler = setup.precision.scaler_handler
            setup.scaler = ShardedGradScaler(setup.device.type, **(handler.to_kwargs() if handler is not None else {}))
        super().__init__(setup)

    def _has_sharded(self, model: nn.Module) -> bool:
        return isinstance(model, FullyShardedDataParallel)

    def shard(self, model: nn.Module) -> FullyShardedDataParallel:
        """Wrap a model and its units; every rank must call this.

        Args:
            model: The model, on any device, because each unit is moved to this rank's device when it is sharded. With
                `cpu_ram_efficient_loading`, the parameters may have no values on ranks other than 0.

        Returns:
            The model as an FSDP module.

        Raises:
            ValueError: A setting of the plugin does not fit the model.
        """
        plugin = resolved_plugin(self.setup)
        units, ignored = choose_units(model, plugin)
        chosen = set(units)
        mixed_precision: Any = plugin.mixed_precision_policy
        prefetch: Any = plugin.backward_prefetch
        offloads = plugin.offloads and self.setup.device.type != "cpu"  # On the CPU, there is nothing to offload.
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=lambda module, recurse, **_: recurse or module in chosen,
            ignored_modules=ignored or None,
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=bool(plugin.use_orig_params),
            mixed_precision=mixed_precision,
            cpu_offload=CPUOffload(offload_params=True) if offloads else None,
            backward_prefetch=prefetch,
            forward_prefetch=bool(plugin.forward_prefetch),
            **self._strategy_and_mesh(plugin),
            **self._placement(model, plugin),
        )

    def _strategy_and_mesh(self, plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
        """Return the sharding strategy. Hybrid strategies, which replicate shards on each machine, also need a mesh."""
        chosen: Any = plugin.sharding_strategy
        if chosen not in _HYBRID:
            return {"sharding_strategy": chosen}
        world, local = self.setup.state.num_processes, world_from_environ().local_size
        shape = (world // local, local)
        mesh = init_device_mesh(self.setup.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        return {"sharding_strategy": chosen, "device_mesh": mesh}

    def _placement(self, model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
        """Return the arguments that move units to the device and copy rank 0's weights to the other ranks."""
        device = self.setup.device
        empty = any(parameter.is_meta for parameter in model.parameters())
        if device.type != "cpu":

            def allocate(module: nn.Module) -> None:
                module.to_empty(device=device, recurse=False)

            make = plugin.param_init_fn or (keep_ties(allocate, model) if empty else None)
            synced = bool(plugin.sync_module_states)
            return {"device_id": device, "sync_module_states": synced, "param_init_fn": make}
        # torch's FSDP 1 broadcasts the weights only on GPUs and other accelerators, so on the CPU they are broadcast
        # here.
        if empty:
            ties = tied_names(model)
            model.to_empty(device=device)
            retie(model, ties)
        if plugin.sync_module_states:
            broadcast_weights(model, device)
        return {"device_id": device, "param_init_fn": plugin.param_init_fn}

    def sharding(self) -> ShardReport:
        roots: Any = self.models
        if not roots:
            return super().sharding()
        state, chosen = self.setup.state, roots[0].sharding_strategy
        whole = chosen == ShardingStrategy.NO_SHARD
        shards = 1 if whole else roots[0].process_group.size()
        axes = {
            "dp_replicate": (state.num_processes // shards, state.process_index // shards),
            "dp_shard": (shards, state.process_index % shards),
        }
        keeps = chosen in {ShardingStrategy.SHARD_GRAD_OP, hybrid_zero2()}
        flat = [handle.flat_param for root in roots for handle in _handles(root)]
        parameters, trained = _tally(flat), _tally(p for p in flat if p.requires_grad)
        count = shard_report.common_states_per_parameter(shard_report.inner_optimizers(self))
        offloaded = "cpu" if resolved_plugin(self.setup).offloads else ""
        note = "" if whole else "whole from forward to backward" if keeps else "gathered unit by unit"
        return shard_report.make_report(
            self,
            parameters.sizes(offloaded, note),
            trained.sizes(offloaded),
            trained.state_sizes(count, offloaded),
            variant=chosen.name.lstrip("_"),
            mesh=shard_report.axes_of_several_ranks(axes),
            units=(len(flat), "units"),
        )

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        sharded = [found for model in models if isinstance(found := without_compile(model), FullyShardedDataParallel)]
        return _no_sync(sharded) if sharded else NOTHING

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `Strategy.clip_grad_norm`. The norm of all shards is computed, so every rank must call this."""
        self.unscale_gradients()
        given = parameters_in(parameters)
        wanted = {id(parameter) for parameter in given}
        owners = [model for model in self.models if any(id(parameter) in wanted for parameter in model.parameters())]
        if not owners:
            return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type=norm_type)
        norms: list[torch.Tensor] = [model.clip_grad_norm_(max_norm, norm_type) for model in owners]  # type: ignore[operator]
        return joint_norm(norms, norm_type)


@contextmanager
def _no_sync(models: Sequence[FullyShardedDataParallel]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.no_sync())
        yield


def _handles(model: Any) -> list[Any]:
    """Return the handles of an FSDP 1 model's flat parameters, one for each unit that has parameters."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    return [handle for unit in units if (handle := flat_parameter_handle(unit)) is not None]


def _tally(flat: Iterable[Any]) -> ShardTally:
    """Add up the sizes of flat parameters. The sizes include the padding of the last shard."""
    found = ShardTally()
    for parameter in flat:
        size = parameter.element_size()
        whole, here = (elements * size for elements in flat_parameter_sizes(parameter))
        found += ShardTally(whole, here, frozenset({"dp_shard"} if here < whole else ()))
    return found
