"""What this rank holds of parameters, gradients and optimizer state: counted from shapes, without a collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from notebook_accelerate import telemetry
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.telemetry.sharding_events import KINDS, ShardReport, ShardSizes

if TYPE_CHECKING:
    from notebook_accelerate.strategies.strategy import Strategy

_FLATTENED = {"dp": ("dp_replicate", "dp_shard"), "dp_shard_cp": ("dp_shard", "cp")}
"""The axes behind the submeshes that a parallel layout flattens."""


@dataclass(frozen=True)
class ShardTally:
    """Tensors counted.

    Attributes:
        whole: Bytes of the whole tensors.
        here: Bytes of this rank's parts.
        sharded: The axes over which at least one of them is sharded.
    """

    whole: int = 0
    here: int = 0
    sharded: frozenset[str] = frozenset()

    def __add__(self, other: ShardTally) -> ShardTally:
        return ShardTally(self.whole + other.whole, self.here + other.here, self.sharded | other.sharded)

    def times(self, count: int) -> ShardTally:
        """Return the tally of so many tensors of each of these shapes."""
        return replace(self, whole=self.whole * count, here=self.here * count)

    def kept(self, count: int | None, offloaded: str = "") -> ShardSizes:
        """Return what an optimizer keeps of so many tensors of each of these shapes; None: nobody knows how many."""
        if count is None:
            return ShardSizes(None, None, tuple(sorted(self.sharded)), offloaded)
        return self.times(count).held(offloaded)

    def held(self, offloaded: str = "", note: str = "") -> ShardSizes:
        """Return it as it is told."""
        return ShardSizes(self.whole, self.here, tuple(sorted(self.sharded)), offloaded, note)


def tally(tensors: Iterable[torch.Tensor]) -> ShardTally:
    """Count tensors, those that torch has sharded by their shards.

    Args:
        tensors: Parameters; DTensors know their mesh.
    """
    return sum((_tally_one(tensor) for tensor in tensors), ShardTally())


def _tally_one(tensor: torch.Tensor) -> ShardTally:
    size = tensor.element_size()
    if not isinstance(tensor, DTensor):
        return ShardTally(tensor.numel() * size, tensor.numel() * size)
    names = tensor.device_mesh.mesh_dim_names or ()
    cut = [name for name, how in zip(names, tensor.placements, strict=False) if not how.is_replicate()]
    return ShardTally(tensor.numel() * size, tensor._local_tensor.numel() * size, frozenset(_unflattened(cut)))


def _unflattened(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield from _FLATTENED.get(name, (name,))


def moments(optimizer: Any, group: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's shape an optimizer keeps for it; None for one that is not known.

    Args:
        optimizer: The optimizer.
        group: One of its parameter groups.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if "SGD" in names:
        return int(bool(group.get("momentum")))
    if "RMSprop" in names:
        return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
    for known, count in _MOMENTS.items():
        if known in names:
            return count + bool(group.get("amsgrad"))
    return None


_MOMENTS = {
    "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "SparseAdam": 2, "FusedAdam": 2, "DeepSpeedCPUAdam": 2,
    "Adadelta": 2, "Rprop": 2, "Adagrad": 1, "ASGD": 1, "Lion": 1, "DeepSpeedCPULion": 1, "DeepSpeedCPUAdagrad": 1,
}  # fmt: skip


def state_of(optimizers: Sequence[Any]) -> ShardTally | None:
    """Count the state that optimizers keep once they have stepped, less a few numbers per parameter.

    Args:
        optimizers: torch's optimizers.

    Returns:
        The tally; None where an optimizer's state is not known.
    """
    found = ShardTally()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            count = moments(optimizer, group)
            if count is None:
                return None
            found += tally(p for p in group["params"] if p.requires_grad).times(count)
    return found


def moments_of_all(optimizers: Sequence[Any]) -> int | None:
    """Return how many tensors of a parameter's shape optimizers keep; None where it differs or is not known.

    Args:
        optimizers: torch's optimizers.
    """
    counts = {moments(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups}
    return counts.pop() if len(counts) == 1 else None


def inner(strategy: Strategy) -> list[Any]:
    """Return the optimizers inside a strategy's prepared ones.

    Args:
        strategy: The strategy.
    """
    return [prepared.optimizer for prepared in strategy.optimizers]


def mesh_of(strategy: Strategy, axis: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the mesh of ranks: sizes by axis, and where this rank stands; axes of one rank are left out.

    Args:
        strategy: The strategy.
        axis: What the one axis is called where the user has laid out no mesh.
    """
    state = strategy.setup.state
    mesh = state.device_mesh
    if mesh is not None and mesh.mesh_dim_names and (at := mesh.get_coordinate()) is not None:
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        place = dict(zip(mesh.mesh_dim_names, at, strict=True))
        return chosen({name: (size, place[name]) for name, size in sizes.items()})
    return chosen({axis: (state.num_processes, state.process_index)})


def chosen(axes: Mapping[str, tuple[int, int]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return sizes and places of the axes that have more than one rank.

    Args:
        axes: Size and this rank's place by axis, the outermost first.
    """
    kept = {name: both for name, both in axes.items() if both[0] > 1}
    return {name: size for name, (size, _) in kept.items()}, {name: at for name, (_, at) in kept.items()}


def summary(
    strategy: Strategy,
    parameters: ShardSizes,
    gradients: ShardSizes,
    state: ShardSizes,
    *,
    variant: str = "",
    axis: str = "dp",
    mesh: tuple[dict[str, int], dict[str, int]] | None = None,
    stages: str = "",
    units: tuple[int, str] = (0, "units"),
) -> ShardReport:
    """Put together what is told.

    Args:
        strategy: The strategy.
        parameters: What this rank holds of them.
        gradients: The same, between backward and step.
        state: The same, once the optimizer has stepped.
        variant: Which of the strategy's ways.
        axis: What the one axis is called where the user has laid out no mesh.
        mesh: Sizes and places by axis; None: as the user has laid them out.
        stages: The axis along which ranks have layers of their own.
        units: How many of what are computed.
    """
    axes, place = mesh_of(strategy, axis) if mesh is None else mesh
    held = dict(zip(KINDS, (parameters, gradients, state), strict=True))
    held = {kind: replace(one, sharded=tuple(a for a in axes if a in one.sharded)) for kind, one in held.items()}
    return ShardReport(strategy.name, variant, axes, place, held, stages, *units)


def of(strategy: Strategy, offloaded: str = "", note: str = "", **more: Any) -> ShardReport:
    """Count a strategy's models and optimizers by their parameters.

    Args:
        strategy: The strategy.
        offloaded: Where everything rests while nothing is computed with it.
        note: What is worth knowing of the parameters.
        more: As for `summary`.
    """
    parameters = list(all_parameters(strategy.models))
    trained = tally(p for p in parameters if p.requires_grad)
    state = state_of(inner(strategy))
    return summary(
        strategy,
        tally(parameters).held(offloaded, note),
        trained.held(offloaded),
        trained.kept(None, offloaded) if state is None else state.held(offloaded),
        **more,
    )


def all_parameters(models: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of models, each once.

    Args:
        models: The models.
    """
    seen: set[int] = set()
    for model in models:
        for parameter in model.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def shared_out(whole: int, parts: int, sharded: Iterable[str]) -> ShardTally:
    """Return the tally of what is cut into equal parts, the last one padded.

    Args:
        whole: Bytes.
        parts: How many.
        sharded: Over which axes.
    """
    return ShardTally(whole, math.ceil(whole / parts), frozenset(sharded))


def tell(strategy: Strategy, told: ShardReport | None) -> ShardReport | None:
    """Tell the kernel what this rank holds, where a kernel watches and it is news.

    Args:
        strategy: The strategy.
        told: What was told last.

    Returns:
        What was told last, now.
    """
    if telemetry.current_sink() is None or not strategy.models:
        return told
    try:
        now = strategy.sharding()
    except Exception as error:  # noqa: BLE001 - reads what belongs to other libraries; training goes on without
        warn_once(f"what is sharded where cannot be shown ({type(error).__name__}: {error})")
        return told
    if now != told:
        telemetry.emit(now.event())
    return now


__all__ = ["ShardTally", "of", "shared_out", "state_of", "summary", "tally", "tell"]
