"""Protocols of strategies that shard models and optimizers and save the shards themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

if TYPE_CHECKING:
    from notebook_accelerate.strategies.sharding.write_plans import StatePart
    from notebook_accelerate.strategies.strategy import Strategy

WHOLE = "whole"
"""Layout of strategies whose ranks each hold the complete state: one rank writes it, in single files."""


class SavesOwnState(Protocol):
    """A strategy whose `checkpoint_layout` is not "whole"."""

    name: str
    checkpoint_layout: str
    """Name of the layout, recorded in the manifest: a checkpoint is loaded by the layout that wrote it."""

    def save_state(self, folder: Path, safe_serialization: bool, **options: Any) -> None:
        """Write models and optimizers into a folder, in files of any name, at once; every rank calls it.

        A strategy whose state a thread can write has `state_parts` instead.

        Args:
            folder: An existing staging folder that all ranks of a file system share.
            safe_serialization: Prefer safetensors.
            options: Arguments that the user passed to `save_state` beyond its own.
        """

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """Read models and optimizers from a folder; every rank calls it.

        Args:
            folder: The checkpoint, verified.
            models: The prepared models that no hook has loaded.
            options: Arguments that the user passed to `load_state` beyond its own.
        """


class ReturnsStateParts(Protocol):
    """A strategy that returns its shards for a thread to write."""

    def state_parts(self, safe_serialization: bool, **options: Any) -> Sequence[StatePart]:
        """Return the parts of models and optimizers that this rank writes; every rank calls it.

        Args:
            safe_serialization: Prefer safetensors.
            options: Arguments that the user passed to `save_state` beyond its own.

        Returns:
            The parts; folders are in the same order on every rank.
        """


def saves_own_state(strategy: Strategy) -> TypeGuard[SavesOwnState]:
    """Tell whether a strategy saves models and optimizers itself."""
    return strategy.checkpoint_layout != WHOLE


def returns_state_parts(strategy: Strategy) -> TypeGuard[ReturnsStateParts]:
    """Tell whether a strategy returns parts that `save_state` writes, in a thread if asked to."""
    return saves_own_state(strategy) and hasattr(strategy, "state_parts")


def schedulers_to_save(schedulers: Sequence[Any]) -> list[Any]:
    """Return the schedulers that the strategy does not save itself (those without `saved_by_strategy`).

    Args:
        schedulers: The prepared schedulers.
    """
    return [scheduler for scheduler in schedulers if not getattr(scheduler, "saved_by_strategy", False)]
