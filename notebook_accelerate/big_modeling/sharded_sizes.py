"""Computes which part of a model one rank holds, by strategy and parallel degrees."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from notebook_accelerate.big_modeling.device_map import balanced_cuts

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
"""Parallel dimensions, as in `ParallelismConfig`."""
EXPERTS = "experts"
"""The name of modules that expert parallelism splits; the first dimension of their parameters is that of experts."""
OFFLOAD_TARGETS = ("cpu", "disk")
PARTS = ("weights", "gradients", "optimizer")
"""The parts of a training's memory that can be sharded and offloaded."""


@dataclass(frozen=True)
class Sharding:
    """Which parts a strategy shards over ranks.

    Attributes:
        weights: Whether weights are sharded.
        gradients: Whether gradients are sharded.
        optimizer: Whether optimizer states are sharded.
        buckets: Whether gradients are copied into buckets for their reduction.
        dimension: The parallel dimension of all ranks if no degrees are given; "": none.
    """

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    buckets: bool = False
    dimension: str = ""


STRATEGIES: dict[str, Sharding] = {
    "single": Sharding(),
    "ddp": Sharding(buckets=True),
    "zero1": Sharding(optimizer=True),
    "zero2": Sharding(gradients=True, optimizer=True),
    "shard_grad_op": Sharding(gradients=True, optimizer=True),
    "zero3": Sharding(weights=True, gradients=True, optimizer=True),
    "fsdp": Sharding(weights=True, gradients=True, optimizer=True),
    "tp": Sharding(dimension="tp"),
    "cp": Sharding(weights=True, gradients=True, optimizer=True, dimension="cp"),
    "ep": Sharding(dimension="ep"),
    "pp": Sharding(dimension="pp"),
    "megatron": Sharding(),
    "megatron_distributed_optimizer": Sharding(optimizer=True),
}


class RankLayout:
    """The ranks' parallel dimensions.

    Args:
        strategy: One of `STRATEGIES`.
        ranks: Number of ranks.
        degrees: Size of each of `DEGREES`; None: those of the strategy.

    Raises:
        ValueError: A degree is unknown or not positive, or their product does not match the number of ranks.
    """

    def __init__(self, strategy: str, ranks: int, degrees: Mapping[str, int] | None = None) -> None:
        self.sharding, self.ranks = STRATEGIES[strategy], ranks
        dimension = self.sharding.dimension
        self.degrees = dict(degrees) if degrees is not None else ({dimension: ranks} if dimension else {})
        for name, degree in self.degrees.items():
            if name not in DEGREES or degree < 1:
                raise ValueError(
                    f"degrees={{{name!r}: {degree}}} is not allowed; pass sizes from 1 for {', '.join(DEGREES)}: "
                    "degrees={'tp': 2}"
                )
        product = math.prod(self.degrees.values())
        if ranks % product or ("dp_shard" in self.degrees and product != ranks):
            factors = " * ".join(f"{name}={degree}" for name, degree in self.degrees.items())
            raise ValueError(
                f"degrees do not make num_processes={ranks}: {factors} = {product}; pass num_processes={product} or "
                "other degrees"
            )

    def degree(self, name: str) -> int:
        """Return the size of a dimension; 1 if it is not in `degrees`."""
        return self.degrees.get(name, 1)

    @property
    def shards(self) -> int:
        """Number of ranks that shards are divided over: not replicas or ranks that split tensors, experts or layers."""
        return self.ranks // (self.degree("dp_replicate") * self.degree("tp") * self.degree("ep") * self.degree("pp"))

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced over ranks that hold the same weights."""
        return self.ranks > self.degree("tp") * self.degree("ep") * self.degree("pp")

    def parts(self, model: torch.nn.Module) -> list[tuple[torch.nn.Parameter, float]]:
        """Return the parameters of the largest pipeline stage, and the fraction of each that a rank holds.

        Args:
            model: The model.
        """
        tp, ep = self.degree("tp"), self.degree("ep")
        divided = dict.fromkeys(_tensor_parallel_names(model), 1 / tp) if tp > 1 else {}
        divided |= dict.fromkeys(_expert_names(model), 1 / ep) if ep > 1 else {}
        stage = _largest_stage(_blocks(model), self.degree("pp"))
        return [(parameter, divided.get(name, 1.0)) for name, parameter in stage]


def checked_offload(offload: Mapping[str, str] | None) -> dict[str, str]:
    """Check which parts are offloaded, and where.

    Args:
        offload: One of `OFFLOAD_TARGETS` for each of `PARTS` that is offloaded.

    Raises:
        ValueError: A part or a target is unknown.
    """
    for part, target in (offload or {}).items():
        if part not in PARTS or target not in OFFLOAD_TARGETS:
            raise ValueError(
                f"offload={{{part!r}: {target!r}}} is not allowed; pass {' or '.join(map(repr, OFFLOAD_TARGETS))} for "
                f"{', '.join(PARTS)}: offload={{'optimizer': 'cpu'}}"
            )
    return dict(offload or {})


def _tensor_parallel_names(model: torch.nn.Module) -> set[str]:
    """Return the parameters that tensor parallelism divides: those of the model's plan, or every matrix without one."""
    plans = (getattr(model, name, None) for name in ("tp_plan", "_tp_plan"))
    plan: Any = next((found for found in plans if isinstance(found, Mapping) and found), None)
    named = dict(model.named_parameters())
    if plan is None:
        return {name for name, parameter in named.items() if parameter.dim() > 1}
    patterns = [
        re.compile(re.escape(pattern).replace(r"\*", "[0-9]+") + r"(\.weight|\.bias)?")
        for pattern, style in plan.items()
        if style != "sequence_parallel"
    ]
    return {name for name in named if any(pattern.fullmatch(name) for pattern in patterns)}


def _expert_names(model: torch.nn.Module) -> set[str]:
    """Return the parameters that expert parallelism divides."""
    return {name for name, _ in model.named_parameters() if EXPERTS in name.split(".")[:-1]}


def _blocks(model: torch.nn.Module) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Return the parameters in the model's order, grouped by numbered block."""
    blocks: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        block = re.match(r"(.*?\.)?\d+(?=\.)", name)
        blocks.setdefault(block[0] if block else name.rpartition(".")[0], []).append((name, parameter))
    return list(blocks.values())


def _largest_stage(
    blocks: list[list[tuple[str, torch.nn.Parameter]]], stages: int
) -> list[tuple[str, torch.nn.Parameter]]:
    """Split blocks into stages with the smallest possible maximum size; return the largest stage."""
    sizes = [sum(parameter.nbytes for _, parameter in block) for block in blocks]
    if not blocks:
        return []
    bounds = [0, *balanced_cuts(sizes, min(stages, len(blocks))), len(blocks)]
    first, stop = max(itertools.pairwise(bounds), key=lambda stage: sum(sizes[stage[0] : stage[1]]))
    return [pair for block in blocks[first:stop] for pair in block]
