"""Which part of a model each way to be parallel leaves to one rank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
"""Ways to arrange ranks, as in `ParallelismConfig`."""
PLACES = ("cpu", "disk")
"""Where parts can be that are not on the device."""
OFFLOADED = ("weights", "gradients", "optimizer")
"""The parts that can be elsewhere."""


@dataclass(frozen=True)
class Sharing:
    """Which parts a strategy divides among ranks.

    Attributes:
        weights: Whether each rank has its share of the weights only.
        gradients: The same for gradients.
        optimizer: The same for optimizer states.
        buckets: Whether gradients are copied once more for their reduction.
        along: The degree that all ranks make where no degrees are given; "": none.
    """

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    buckets: bool = False
    along: str = ""


STRATEGIES: dict[str, Sharing] = {
    "single": Sharing(),
    "ddp": Sharing(buckets=True),
    "zero1": Sharing(optimizer=True),
    "zero2": Sharing(gradients=True, optimizer=True),
    "shard_grad_op": Sharing(gradients=True, optimizer=True),
    "zero3": Sharing(weights=True, gradients=True, optimizer=True),
    "fsdp": Sharing(weights=True, gradients=True, optimizer=True),
    "tp": Sharing(along="tp"),
    "cp": Sharing(weights=True, gradients=True, optimizer=True, along="cp"),
    "pp": Sharing(along="pp"),
    "megatron": Sharing(),
    "megatron_distributed_optimizer": Sharing(optimizer=True),
}


class Layout:
    """How the ranks are arranged.

    Args:
        strategy: One of `STRATEGIES`.
        ranks: Their number.
        degrees: Numbers by `DEGREES`; None: those of the strategy.

    Raises:
        ValueError: A degree is not known or not positive, or the degrees do not make the number of ranks.
    """

    def __init__(self, strategy: str, ranks: int, degrees: Mapping[str, int] | None = None) -> None:
        self.sharing, self.ranks = STRATEGIES[strategy], ranks
        along = self.sharing.along
        self.degrees = dict(degrees) if degrees is not None else ({along: ranks} if along else {})
        for name, degree in self.degrees.items():
            if name not in DEGREES or degree < 1:
                raise ValueError(
                    f"degrees={{{name!r}: {degree}}} is not allowed; names are {', '.join(DEGREES)}, from 1"
                )
        whole = math.prod(self.degrees.values())
        if ranks % whole or ("dp_shard" in self.degrees and whole != ranks):
            factors = " * ".join(f"{name}={degree}" for name, degree in self.degrees.items())
            raise ValueError(f"degrees do not make num_processes={ranks}: {factors} = {whole}")

    def degree(self, name: str) -> int:
        """Return a degree; 1 where it is not named."""
        return self.degrees.get(name, 1)

    @property
    def shards(self) -> int:
        """How many ranks divide what is sharded: replicas and ranks with other layers or halves of them do not."""
        return self.ranks // (self.degree("dp_replicate") * self.degree("tp") * self.degree("pp"))

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed over ranks that have the same weights."""
        return self.ranks > self.degree("tp") * self.degree("pp")

    def parts(self, model: torch.nn.Module) -> list[tuple[torch.nn.Parameter, float]]:
        """Return the parameters of the fullest pipeline stage, and which part of each a rank computes with.

        Args:
            model: The model.
        """
        tp = self.degree("tp")
        divided = _divided(model) if tp > 1 else set()
        stage = _fullest(_units(model), self.degree("pp"))
        return [(parameter, 1 / tp if name in divided else 1.0) for name, parameter in stage]


def checked_offload(offload: Mapping[str, str] | None) -> dict[str, str]:
    """Return where parts are that are not on the device.

    Args:
        offload: One of `PLACES` by part.

    Raises:
        ValueError: A part or a place is not known.
    """
    for part, place in (offload or {}).items():
        if part not in OFFLOADED or place not in PLACES:
            raise ValueError(
                f"offload={{{part!r}: {place!r}}} is not allowed; parts are {', '.join(OFFLOADED)}, places "
                f"{', '.join(PLACES)}"
            )
    return dict(offload or {})


def _divided(model: torch.nn.Module) -> set[str]:
    """Return the names of parameters that tensor parallelism divides: by the model's plan, or else every matrix."""
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


def _units(model: torch.nn.Module) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Return the parameters in the model's order, those of one numbered block together."""
    units: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        block = re.match(r"(.*?\.)?\d+(?=\.)", name)
        units.setdefault(block[0] if block else name.rpartition(".")[0], []).append((name, parameter))
    return list(units.values())


def _fullest(units: list[list[tuple[str, torch.nn.Parameter]]], stages: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Cut units into stages whose largest is as small as can be; return the largest."""
    sizes = [sum(parameter.nbytes for _, parameter in unit) for unit in units]
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if len(_filled(sizes, limit)) <= stages else (limit + 1, high)
    cuts = _filled(sizes, low)
    first, stop = max(cuts, key=lambda cut: sum(sizes[cut[0] : cut[1]]), default=(0, 0))
    return [pair for unit in units[first:stop] for pair in unit]


def _filled(sizes: list[int], limit: int) -> list[tuple[int, int]]:
    """Cut into runs of at most `limit`, each as long as can be."""
    cuts: list[tuple[int, int]] = []
    first, filled = 0, 0
    for place, size in enumerate(sizes):
        if filled + size > limit and place > first:
            cuts.append((first, place))
            first, filled = place, 0
        filled += size
    return [*cuts, (first, len(sizes))] if sizes else cuts


__all__ = ["DEGREES", "STRATEGIES", "Layout", "Sharing", "checked_offload"]
