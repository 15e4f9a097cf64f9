"""How much state an optimizer keeps for a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def states_per_parameter(optimizer: Any, group: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's shape an optimizer keeps for it; None for unknown optimizers.

    Args:
        optimizer: The optimizer.
        group: One of its parameter groups.
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
