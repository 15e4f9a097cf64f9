"""What a rank holds of parameters, gradients and optimizer state, and how ranks share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from notebook_accelerate.telemetry.events import ShardingEvent

KINDS = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True)
class ShardSizes:
    """One kind of tensors on one rank.

    Attributes:
        whole: Bytes of what the rank has a part of: of the model, or of its pipeline stage; None: not known.
        here: Bytes that this rank holds, padding included; None: not known.
        sharded: The axes of the mesh over which it is sharded; along the others every rank holds the same.
        offloaded: Where it rests while nothing is computed with it: "cpu", "nvme"; "": on the device.
        note: What else is worth knowing, as "gathered unit by unit".
    """

    whole: int | None
    here: int | None
    sharded: tuple[str, ...] = ()
    offloaded: str = ""
    note: str = ""


@dataclass(frozen=True)
class ShardReport:
    """What one rank holds.

    Attributes:
        strategy: The strategy's name.
        variant: Which of its ways, as FULL_SHARD or ZeRO-2; "" where there is one.
        axes: Sizes of the mesh of ranks by axis, the outermost first; none for one rank.
        place: Where the rank stands on each axis.
        held: By kind, in the order of ``KINDS``.
        stages: The axis along which ranks have layers of their own; "": none.
        units: How many of ``unit`` the rank computes; 0: nothing to count.
        unit: What is counted: units, layers.
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
        """Return it as it travels."""
        return ShardingEvent(**asdict(self))


def read(event: ShardingEvent) -> ShardReport | None:
    """Return what an event says; None where it makes no sense: a rank may send anything.

    Args:
        event: What a rank sent.
    """
    try:
        axes = {str(name): int(size) for name, size in event.axes.items()}
        place = {name: int(event.place[name]) for name in axes}
        if not all(0 <= place[name] < size for name, size in axes.items()):
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
    return None if given is None else max(0, int(given))


__all__ = ["KINDS", "ShardReport", "ShardSizes", "read"]
