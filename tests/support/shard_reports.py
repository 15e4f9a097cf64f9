"""Shard reports of several layouts, for the tests of views."""

from __future__ import annotations

import math
from itertools import product

from notebook_accelerate.telemetry.sharding import KINDS, ShardReport, ShardSizes

MB = 1_000_000
Spec = tuple[float, tuple[str, ...]]


def mesh_reports(
    axes: dict[str, int],
    *specs: Spec,
    strategy: str = "fsdp2",
    variant: str = "",
    stages: str = "",
    offloaded: str = "",
    units: int = 0,
) -> dict[int, ShardReport]:
    """Return the report of each rank of a mesh, for a model whose first stage has 64 MB of parameters.

    Args:
        axes: The size of each axis, outermost first.
        specs: For parameters, gradients and optimizer state, their size as a multiple of the size of the parameters,
            and the axes that they are sharded over.
        strategy: The name of the strategy in the reports.
        variant: The variant of that strategy, such as "ZeRO-3".
        stages: The axis of stages. Each stage has twice the parameters of the previous one.
        offloaded: The device that holds the optimizer's state.
        units: The number of units that each rank computes.
    """
    found: dict[int, ShardReport] = {}
    for rank, at in enumerate(product(*(range(size) for size in axes.values()))):
        place = dict(zip(axes, at, strict=True))
        held = {}
        for kind, (times, over) in zip(KINDS, specs, strict=True):
            whole = int(64 * MB * times) << place.get(stages, 0)
            here = whole // math.prod(axes[name] for name in over)
            held[kind] = ShardSizes(whole, here, over, offloaded if kind == KINDS[2] else "")
        found[rank] = ShardReport(strategy, variant, axes, place, held, stages, units)
    return found


def hybrid() -> dict[int, ShardReport]:
    """Return the reports of two replicas with two shards each."""
    over = ("dp_shard",)
    axes = {"dp_replicate": 2, "dp_shard": 2}
    return mesh_reports(axes, (1, over), (1, over), (2, over), variant="HYBRID_SHARD", units=3)


def zero(stage: int, ranks: int = 4) -> dict[int, ShardReport]:
    """Return the reports of a stage of DeepSpeed's ZeRO, with the optimizer's state in CPU memory."""
    cut = [("dp",) if stage > least else () for least in (2, 1, 0)]
    specs = [(1.0, cut[0]), (1.0, cut[1]), (6.0, cut[2])]
    return mesh_reports({"dp": ranks}, *specs, strategy="deepspeed", variant=f"ZeRO-{stage}", offloaded="cpu")


def megatron() -> dict[int, ShardReport]:
    """Return the reports of two replicas with two stages each, whose layers are split across two ranks."""
    axes = {"pp": 2, "dp": 2, "tp": 2}
    return mesh_reports(axes, (1, ("tp",)), (1, ("tp",)), (2, ("dp", "tp")), strategy="megatron_lm", stages="pp")


__all__ = ["MB", "hybrid", "megatron", "mesh_reports", "zero"]
