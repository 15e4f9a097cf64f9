"""The shard report of a DeepSpeed engine: ZeRO shards optimizer state, gradients, then parameters, by stage."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

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
    stage = int(engine.zero_optimization_stage())
    mesh = shard_report.mesh_axes(strategy, "dp")
    over = [name for name in mesh[0] if name not in {"tp", "pp"}] if stage else []
    ranks = max(1, int(getattr(engine, "seq_dp_world_size", 0) or engine.dp_world_size))
    parameters = list(shard_report.all_parameters(strategy.models))
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = _sum_sizes(trained, over if stage > 1 else [], ranks)
    return shard_report.make_report(
        strategy,
        _sum_sizes(parameters, over if stage > 2 else [], ranks).sizes(
            _offload_device(engine.zero_offload_param()), "gathered layer by layer" if stage > 2 else ""
        ),
        gradients.sizes(_offload_device(engine.zero_offload_optimizer()) if stage > 1 else ""),
        _optimizer_state(engine, _sum_sizes(trained, over, ranks), sum(map(_element_count, trained))),
        variant=f"ZeRO-{stage}",
        mesh=mesh,
    )


def _element_count(parameter: Any) -> int:
    """Return a parameter's number of elements; with stage 3 the parameter itself is empty."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _sum_sizes(parameters: Iterable[Any], over: list[str], ranks: int) -> ShardTally:
    found = ShardTally()
    for parameter in parameters:
        whole = _element_count(parameter) * parameter.element_size()
        here = math.ceil(whole / ranks) if over else whole  # the last part is padded
        found += ShardTally(whole, here, frozenset(over))
    return found


def _optimizer_state(engine: Any, trained: ShardTally, elements: int) -> ShardSizes:
    """Return the size of the optimizer's state: its moments, and master weights that are not the model's."""
    optimizer = engine.optimizer
    offloaded = _offload_device(engine.zero_offload_optimizer())
    basic = getattr(optimizer, "optimizer", optimizer)
    count = shard_report.common_states_per_parameter([basic])
    masters = _master_weights(optimizer, basic)
    if count is None or not masters:
        return trained.state_sizes(count, offloaded)
    own = {tensor.data_ptr() for tensor in getattr(optimizer, "fp16_partitioned_groups_flat", engine.parameters())}
    kept = [tensor for tensor in masters if tensor.data_ptr() not in own]
    size = masters[0].element_size()
    here = sum(t.numel() for t in masters) * size * count + sum(t.numel() for t in kept) * size
    whole = elements * size * (count + bool(kept))
    return ShardSizes(whole, here, tuple(trained.sharded), offloaded, "with master weights" if kept else "")


def _master_weights(optimizer: Any, basic: Any) -> list[torch.Tensor]:
    """Return this rank's weights that the optimizer updates; stage 3 passes them to it one by one, in the step."""
    found = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return list(found) if found else [parameter for group in basic.param_groups for parameter in group["params"]]


def _offload_device(offload: Any) -> str:
    """Return the device of an offloading configuration; "" for None and for no offloading."""
    device = getattr(offload, "device", None)
    name = str(getattr(device, "value", device) or "none")  # a string or a member of an enum, by version
    return "" if name == "none" else name
