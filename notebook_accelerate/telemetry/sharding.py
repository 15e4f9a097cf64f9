"""Reports of how parameters, gradients and optimizer state are sharded across ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from notebook_accelerate.telemetry.events import ShardingEvent

MAX_RANKS = 1 << 14
"""Maximum number of ranks in a mesh. The time for tables and drawings is proportional to the number of ranks."""
KINDS = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True)
class ShardSizes:
    """The sizes of one kind of tensors on one rank.

    Attributes:
        whole: The size in bytes of all shards of the model, or of the rank's pipeline stage, or None if unknown.
        here: The number of bytes that this rank holds, including padding, or None if unknown.
        sharded: The axes of the mesh along which the tensors are sharded. Along other axes, ranks hold the same data.
        offloaded: Where the tensors are stored while they are not used: "cpu", "nvme", or "" for the device.
        note: Additional information, such as "gathered unit by unit".
    """

    whole: int | None
    here: int | None
    sharded: tuple[str, ...] = ()
    offloaded: str = ""
    note: str = ""


@dataclass(frozen=True)
class ShardReport:
    """The shards of one rank.

    Attributes:
        strategy: The name of the strategy.
        variant: The variant of the strategy, such as FULL_SHARD or ZeRO-2, or "" if there is only one.
        axes: The size of each axis of the mesh of ranks, outermost first. Empty for a single rank.
        place: The rank's position on each axis.
        held: The sizes of each kind of tensors, in the order of ``KINDS``.
        stages: The axis along which ranks have different layers, or "" if there is none.
        units: The number of units that the rank computes, or 0 if they are not counted.
        unit: What the units are called: "units" or "layers".
    """

    strategy: str
    variant: str
    axes: dict[str, int]
    place: dict[str, int]
    held: dict[str, ShardSizes]
    stages: str = ""
    units: int = 0
    unit: str = "units"

    def event(self) -> ShardingEvent:
        """Return the event that contains the report."""
        return ShardingEvent(**asdict(self))


def to_report(event: ShardingEvent) -> ShardReport | None:
    """Return the report in a rank's event, or None if the event is invalid, because a rank may send anything."""
    try:
        axes = {str(name): int(size) for name, size in event.axes.items()}
        place = {name: int(event.place[name]) for name in axes}
        if not all(0 <= place[name] < size for name, size in axes.items()) or math.prod(axes.values()) > MAX_RANKS:
            return None
        held = {kind: _held(event.held[kind], axes) for kind in KINDS if kind in event.held}
        stages = event.stages if event.stages in axes else ""
        return ShardReport(
            str(event.strategy), str(event.variant), axes, place, held, stages, int(event.units), str(event.unit)
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _held(given: Mapping[str, Any], axes: Mapping[str, int]) -> ShardSizes:
    sharded = tuple(name for name in axes if name in given["sharded"])
    whole, here = _bytes(given["whole"]), _bytes(given["here"])
    return ShardSizes(whole, here, sharded, str(given["offloaded"]), str(given["note"]))


def _bytes(given: Any) -> int | None:
    return None if given is None else min(max(0, int(given)), 1 << 63)


def states_per_parameter(optimizer: Any, group: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's shape its optimizer keeps for it, or None for unknown optimizers.

    Args:
        optimizer: The optimizer, which may be of any class.
        group: The parameter group to which the parameter belongs.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if "SGD" in names:
        return int(bool(group.get("momentum")))
    if "RMSprop" in names:
        return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
    for known, count in _STATES_PER_PARAMETER.items():
        if known in names:
            return count + bool(group.get("amsgrad"))
    return None


_STATES_PER_PARAMETER = {
    "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "SparseAdam": 2, "FusedAdam": 2, "DeepSpeedCPUAdam": 2,
    "Adadelta": 2, "Rprop": 2, "Adagrad": 1, "ASGD": 1, "Lion": 1, "DeepSpeedCPULion": 1, "DeepSpeedCPUAdagrad": 1,
}  # fmt: skip
