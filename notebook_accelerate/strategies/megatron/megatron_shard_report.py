"""The shard report of a Megatron-LM engine: each rank has some layers of the model, and a part of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accelerate.strategies.megatron import megatron_setup
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.shard_report import ShardTally
from notebook_accelerate.telemetry.sharding_events import ShardReport, ShardSizes

if TYPE_CHECKING:
    from notebook_accelerate.strategies.strategy import Strategy


def report_engine(strategy: Strategy) -> ShardReport:
    """Return the sizes of an engine's parameters, gradients and optimizer state on this rank.

    Args:
        strategy: The strategy, whose first model is its engine.
    """
    engine: Any = strategy.models[0]
    groups, plugin = megatron_setup.import_parallel_state(), engine.plugin
    axes = {
        "pp": (plugin.pp_degree, groups.get_pipeline_model_parallel_rank()),
        "dp": (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()),
        "tp": (plugin.tp_degree, groups.get_tensor_model_parallel_rank()),
    }
    parameters = list(shard_report.all_parameters([engine]))
    trained = _sum_sizes((p for p in parameters if p.requires_grad), plugin.tp_degree)
    layers = sum(type(part).__name__.endswith("TransformerLayer") for part in engine.modules())
    distributed = bool(plugin.use_distributed_optimizer) and axes["dp"][0] > 1
    return shard_report.make_report(
        strategy,
        _sum_sizes(parameters, plugin.tp_degree).sizes(),
        _gradients(engine, trained),
        _optimizer_state(engine, trained, axes["dp"][0] if distributed else 1),
        variant="distributed optimizer" if distributed else "",
        mesh=shard_report.axes_of_several_ranks(axes),
        stages="pp" if plugin.pp_degree > 1 else "",
        units=(layers, "layers of this stage" if plugin.pp_degree > 1 else "layers"),
    )


def _sum_sizes(parameters: Any, ranks: int) -> ShardTally:
    found = ShardTally()
    for parameter in parameters:
        here = parameter.numel() * parameter.element_size()
        split = ranks > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
        found += ShardTally(here * ranks if split else here, here, frozenset({"tp"} if split else ()))
    return found


def _gradients(engine: Any, trained: ShardTally) -> ShardSizes:
    """Return the size of the gradients' buffers, which often have another precision than the weights."""
    buffers = [buffer for chunk in engine.module for buffer in getattr(chunk, "buffers", ())]
    here = sum(buffer.grad_data.nbytes for buffer in buffers if hasattr(buffer, "grad_data"))
    if not here or not trained.here:
        return trained.sizes()
    return ShardSizes(round(trained.whole * here / trained.here), here, tuple(trained.sharded))


def _optimizer_state(engine: Any, trained: ShardTally, shards: int) -> ShardSizes:
    """Return the size of the optimizer's state: its moments, and master weights where the precisions differ."""
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    inner: list[Any] = [optimizer.optimizer for optimizer in optimizers]
    count = shard_report.common_states_per_parameter(inner)
    sharded = (*trained.sharded, *(["dp"] if shards > 1 else []))
    if count is None or not trained.here:
        return ShardSizes(None, None, sharded)
    stepped = sum(p.numel() * p.element_size() for one in inner for group in one.param_groups for p in group["params"])
    weights = trained.here // shards
    masters = stepped > 1.5 * weights or (shards > 1 and stepped > 0)
    here = stepped * (count + masters)
    return ShardSizes(
        round(here * shards * trained.whole / trained.here), here, sharded, "", "with master weights" * masters
    )
