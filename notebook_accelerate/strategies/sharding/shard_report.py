"""Counts the parameters, gradients and optimizer state of this rank from their shapes, without a collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from notebook_accelerate import telemetry
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.module_queries import is_dtensor
from notebook_accelerate.telemetry.sharding import KINDS, ShardReport, ShardSizes, states_per_parameter
from notebook_accelerate.torch_internals import local_tensor

_FLATTENED = {"dp": ("dp_replicate", "dp_shard"), "dp_shard_cp": ("dp_shard", "cp")}
"""The axes of the submeshes that a parallel layout flattens."""


class ReportsShards(Protocol):
    """The attributes of a strategy that a report uses."""

    setup: Setup
    models: list[torch.nn.Module]
    optimizers: list[AcceleratedOptimizer]

    @property
    def name(self) -> str:
        """The strategy's name."""

    def sharding(self) -> ShardReport:
        """Count the parameters, gradients and optimizer state of this rank."""


@dataclass(frozen=True)
class ShardTally:
    """Bytes of a set of tensors.

    Attributes:
        whole: Bytes of the whole tensors.
        here: Bytes of this rank's parts.
        sharded: The axes over which at least one tensor is sharded.
    """

    whole: int = 0
    here: int = 0
    sharded: frozenset[str] = frozenset()

    def __add__(self, other: ShardTally) -> ShardTally:
        return ShardTally(self.whole + other.whole, self.here + other.here, self.sharded | other.sharded)

    def times(self, count: int) -> ShardTally:
        """Return the tally of `count` tensors of each of these shapes."""
        return replace(self, whole=self.whole * count, here=self.here * count)

    def state_sizes(self, count: int | None, offloaded: str = "") -> ShardSizes:
        """Return the sizes of optimizer state with `count` tensors of each of these shapes; None: not known."""
        if count is None:
            return ShardSizes(None, None, tuple(sorted(self.sharded)), offloaded)
        return self.times(count).sizes(offloaded)

    def sizes(self, offloaded: str = "", note: str = "") -> ShardSizes:
        """Return the tally as a part of a report."""
        return ShardSizes(self.whole, self.here, tuple(sorted(self.sharded)), offloaded, note)


def count_tensors(tensors: Iterable[torch.Tensor]) -> ShardTally:
    """Count the bytes of tensors, of DTensors by their shards.

    Args:
        tensors: Parameters.
    """
    return sum((_count_tensor(tensor) for tensor in tensors), ShardTally())


def _count_tensor(tensor: torch.Tensor) -> ShardTally:
    size = tensor.element_size()
    if not is_dtensor(tensor):
        return ShardTally(tensor.numel() * size, tensor.numel() * size)
    names = tensor.device_mesh.mesh_dim_names or ()
    cut = [name for name, how in zip(names, tensor.placements, strict=False) if not how.is_replicate()]
    axes = frozenset(axis for name in cut for axis in _FLATTENED.get(name, (name,)))
    return ShardTally(tensor.numel() * size, local_tensor(tensor).numel() * size, axes)


def count_optimizer_state(optimizers: Sequence[Any]) -> ShardTally | None:
    """Count the state that optimizers keep after a step, without the few numbers per parameter.

    Args:
        optimizers: torch's optimizers.

    Returns:
        The tally; None where an optimizer's state is not known.
    """
    found = ShardTally()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            count = states_per_parameter(optimizer, group)
            if count is None:
                return None
            found += count_tensors(p for p in group["params"] if p.requires_grad).times(count)
    return found


def common_states_per_parameter(optimizers: Sequence[Any]) -> int | None:
    """Return how many tensors of a parameter's shape optimizers keep; None if the numbers differ or are not known.

    Args:
        optimizers: torch's optimizers.
    """
    counts = {states_per_parameter(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups}
    return counts.pop() if len(counts) == 1 else None


def inner_optimizers(strategy: ReportsShards) -> list[Any]:
    """Return torch's optimizers inside a strategy's prepared ones.

    Args:
        strategy: The strategy.
    """
    return [prepared.optimizer for prepared in strategy.optimizers]


def mesh_axes(strategy: ReportsShards, axis: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return sizes of the mesh of ranks, and this rank's coordinates, by axis; without axes of one rank.

    Args:
        strategy: The strategy.
        axis: Name of the only axis if the user gave no parallel layout.
    """
    state = strategy.setup.state
    mesh = state.device_mesh
    if mesh is not None and mesh.mesh_dim_names and (coordinate := mesh.get_coordinate()) is not None:
        sizes_and_places = zip(mesh.shape, coordinate, strict=True)
        return axes_of_several_ranks(dict(zip(mesh.mesh_dim_names, sizes_and_places, strict=True)))
    return axes_of_several_ranks({axis: (state.num_processes, state.process_index)})


def axes_of_several_ranks(axes: Mapping[str, tuple[int, int]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return sizes and coordinates of the axes that have more than one rank.

    Args:
        axes: Size and this rank's coordinate by axis, the outermost first.
    """
    kept = {name: both for name, both in axes.items() if both[0] > 1}
    return {name: size for name, (size, _) in kept.items()}, {name: at for name, (_, at) in kept.items()}


def make_report(
    strategy: ReportsShards,
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
    """Make a strategy's report.

    Args:
        strategy: The strategy.
        parameters: Sizes of the parameters.
        gradients: Sizes of the gradients, between backward and step.
        state: Sizes of the optimizer state after a step.
        variant: Which variant of the strategy, as FULL_SHARD or ZeRO-2.
        axis: Name of the only axis if the user gave no parallel layout.
        mesh: Sizes and coordinates by axis; None means those of the parallel layout.
        stages: The axis along which ranks have different layers.
        units: Number and name of the units that the rank computes.
    """
    axes, place = mesh_axes(strategy, axis) if mesh is None else mesh
    held = dict(zip(KINDS, (parameters, gradients, state), strict=True))
    held = {kind: replace(one, sharded=tuple(a for a in axes if a in one.sharded)) for kind, one in held.items()}
    return ShardReport(strategy.name, variant, axes, place, held, stages, *units)


def count_shards(strategy: ReportsShards, offloaded: str = "", note: str = "", **more: Any) -> ShardReport:
    """Count a strategy's models and optimizers by their parameters.

    Args:
        strategy: The strategy.
        offloaded: Where everything rests while it is not used for computing.
        note: A note on the parameters.
        more: As for `make_report`.
    """
    parameters = list(all_parameters(strategy.models))
    trained = count_tensors(p for p in parameters if p.requires_grad)
    state = count_optimizer_state(inner_optimizers(strategy))
    return make_report(
        strategy,
        count_tensors(parameters).sizes(offloaded, note),
        trained.sizes(offloaded),
        trained.state_sizes(None, offloaded) if state is None else state.sizes(offloaded),
        **more,
    )


def all_parameters(models: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Iterate over the parameters of models, each once.

    Args:
        models: The models.
    """
    return torch.nn.ModuleList(models).parameters()


def emit_changes(strategy: ReportsShards, last: ShardReport | None) -> ShardReport | None:
    """Emit a strategy's report if a kernel listens and the report differs from the last one.

    Args:
        strategy: The strategy.
        last: The report that was emitted last.

    Returns:
        The report that was emitted last, now.
    """
    if telemetry.current_sink() is None or not strategy.models:
        return last
    try:
        now = strategy.sharding()
    except Exception as error:  # noqa: BLE001 - reads internals of other libraries; training continues without
        warn_once(f"the sharding of this rank cannot be shown ({type(error).__name__}: {error})")
        return last
    if now != last:
        telemetry.emit(now.event())
    return now
