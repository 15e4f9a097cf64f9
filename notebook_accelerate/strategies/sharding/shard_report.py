"""Compute the sizes of this rank's parameters, gradients and optimizer state from shapes, without a collective."""

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
"""The axes that each flattened submesh of a parallel layout is made of."""


class ReportsShards(Protocol):
    """The attributes of a strategy that are needed for a report."""

    setup: Setup
    models: list[torch.nn.Module]
    optimizers: list[AcceleratedOptimizer]

    @property
    def name(self) -> str:
        """The name of the strategy."""

    def sharding(self) -> ShardReport:
        """Return the sizes of this rank's parameters, gradients and optimizer state."""


@dataclass(frozen=True)
class ShardTally:
    """The sizes of a set of tensors.

    Attributes:
        whole: The size of the whole tensors in bytes.
        here: The size of this rank's parts in bytes.
        sharded: The axes along which at least one tensor is sharded.
    """

    whole: int = 0
    here: int = 0
    sharded: frozenset[str] = frozenset()

    def __add__(self, other: ShardTally) -> ShardTally:
        return ShardTally(self.whole + other.whole, self.here + other.here, self.sharded | other.sharded)

    def times(self, count: int) -> ShardTally:
        """Return the tally for `count` tensors of each of the counted shapes."""
        return replace(self, whole=self.whole * count, here=self.here * count)

    def state_sizes(self, count: int | None, offloaded: str = "") -> ShardSizes:
        """Return the size of an optimizer state that has `count` tensors of each of the counted shapes.

        If `count` is None, the size is unknown.
        """
        if count is None:
            return ShardSizes(None, None, tuple(sorted(self.sharded)), offloaded)
        return self.times(count).sizes(offloaded)

    def sizes(self, offloaded: str = "", note: str = "") -> ShardSizes:
        """Return the tally as an entry of the report."""
        return ShardSizes(self.whole, self.here, tuple(sorted(self.sharded)), offloaded, note)


def count_tensors(tensors: Iterable[torch.Tensor]) -> ShardTally:
    """Add up the sizes of tensors. This rank's part of a DTensor is its shard.

    Args:
        tensors: The tensors whose sizes are added up.
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
    """Count the state that optimizers keep between steps, except for scalars such as step counts.

    Args:
        optimizers: The torch optimizers, without wrappers.

    Returns:
        The tally, or None if the state of an optimizer is unknown.
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
    """Return how many tensors optimizers keep per parameter, or None if the numbers differ or are unknown.

    Args:
        optimizers: The torch optimizers, without wrappers.
    """
    counts = {states_per_parameter(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups}
    return counts.pop() if len(counts) == 1 else None


def inner_optimizers(strategy: ReportsShards) -> list[Any]:
    """Return torch's optimizers inside the prepared optimizers of a strategy.

    Args:
        strategy: The strategy whose optimizers are unwrapped.
    """
    return [prepared.optimizer for prepared in strategy.optimizers]


def mesh_axes(strategy: ReportsShards, axis: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the mesh of ranks and this rank's coordinates, by axis. Axes with one rank are left out.

    Args:
        strategy: The strategy, which has the parallel layout.
        axis: The name of the only axis if the user has not given a parallel layout.
    """
    state = strategy.setup.state
    mesh = state.device_mesh
    if mesh is not None and mesh.mesh_dim_names and (coordinate := mesh.get_coordinate()) is not None:
        sizes_and_places = zip(mesh.shape, coordinate, strict=True)
        return axes_of_several_ranks(dict(zip(mesh.mesh_dim_names, sizes_and_places, strict=True)))
    return axes_of_several_ranks({axis: (state.num_processes, state.process_index)})


def axes_of_several_ranks(axes: Mapping[str, tuple[int, int]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the axes with more than one rank, and this rank's coordinates along them.

    Args:
        axes: The size of each axis and this rank's coordinate along it, with the outermost axis first.
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
    """Create the report of a strategy.

    Args:
        strategy: The strategy to report on.
        parameters: The sizes of the parameters.
        gradients: The sizes of the gradients between the backward pass and the step.
        state: The sizes of the optimizer state after a step.
        variant: The variant of the strategy, such as FULL_SHARD or ZeRO-2.
        axis: The name of the only axis if the user has not given a parallel layout.
        mesh: The sizes and coordinates by axis. If None, the parallel layout's values are used.
        stages: The axis along which ranks have different layers, or "" if all ranks have the same layers.
        units: The number and the name of the units that the rank computes.
    """
    axes, place = mesh_axes(strategy, axis) if mesh is None else mesh
    held = dict(zip(KINDS, (parameters, gradients, state), strict=True))
    held = {kind: replace(one, sharded=tuple(a for a in axes if a in one.sharded)) for kind, one in held.items()}
    return ShardReport(strategy.name, variant, axes, place, held, stages, *units)


def count_shards(strategy: ReportsShards, offloaded: str = "", note: str = "", **more: Any) -> ShardReport:
    """Create the report of a strategy by counting the parameters of its models and optimizers.

    Args:
        strategy: The strategy to report on.
        offloaded: The device where everything is kept while it is not needed, or "" if nothing is offloaded.
        note: A note to show with the sizes of the parameters.
        more: Further arguments for `make_report`.
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
    """Iterate over the parameters of models, visiting each parameter once.

    Args:
        models: The models, which may share parameters.
    """
    return torch.nn.ModuleList(models).parameters()


def emit_changes(strategy: ReportsShards, last: ShardReport | None) -> ShardReport | None:
    """Emit a strategy's report if a kernel is listening and the report differs from the last one.

    Args:
        strategy: The strategy to report on.
        last: The last report that was emitted, or None.

    Returns:
        The report to pass as `last` in the next call.
    """
    if telemetry.current_sink() is None or not strategy.models:
        return last
    try:
        now = strategy.sharding()
    except Exception as error:  # noqa: BLE001 - internals of other libraries are read; training continues without the report
        warn_once(f"the sharding of this rank cannot be shown ({type(error).__name__}: {error})")
        return last
    if now != last:
        telemetry.emit(now.event())
    return now
