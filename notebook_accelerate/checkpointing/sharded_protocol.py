"""What a strategy has that keeps its models and optimizers in pieces and writes them itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

WHOLE = "whole"
"""The layout of strategies whose ranks each hold everything: one rank writes it, in single files."""


class Part(Protocol):
    """What one rank writes of a state in pieces, before it is written; see `strategies.shards.StatePart`."""

    name: str
    """A file of this rank, or a folder that all ranks write to."""
    value: Any
    """Nested dicts and lists of plain tensors, which can be copied."""
    dresses: Any
    """None for a file of this rank, which is written by its suffix."""
    optimizer: Any
    """The torch optimizer whose steps alone change its tensors; None for everything else."""

    def write(self, value: Any, path: Path, group: Any) -> dict[str, tuple[int, int]]:
        """Write a folder, in any thread; every rank calls it.

        Args:
            value: The value, or a copy of it.
            path: The folder.
            group: The process group that the ranks agree in; None is torch's default one.

        Returns:
            Size and CRC-32 of the files that this rank wrote, by path relative to the folder.
        """


class WritesInParts(Protocol):
    """A strategy whose pieces can be written later, by a thread."""

    def state_parts(self, safe_serialization: bool, **options: Any) -> Sequence[Part]:
        """Return what this rank writes of models and optimizers; every rank calls it.

        Args:
            safe_serialization: Prefer safetensors.
            options: What the user gave `save_state` beyond its own arguments.

        Returns:
            The parts, folders in the same order on every rank.
        """


class OwnsCheckpoint(Protocol):
    """A strategy whose `checkpoint_layout` is not "whole"; strategies without the attribute are whole."""

    name: str
    checkpoint_layout: str
    """Name of the layout, recorded in the manifest: a checkpoint is loaded by the layout that wrote it."""

    def save_state(self, folder: Path, safe_serialization: bool, **options: Any) -> None:
        """Write models and optimizers into a folder, in files of any name, at once; every rank calls it.

        A strategy that can leave the writing to a thread has `state_parts` instead.

        Args:
            folder: A staging folder that exists and that all ranks of a file system share.
            safe_serialization: Prefer safetensors.
            options: What the user gave `save_state` beyond its own arguments.
        """

    def load_state(self, folder: Path, models: list[Any], **options: Any) -> None:
        """Read models and optimizers from a folder; every rank calls it.

        Args:
            folder: The checkpoint, verified.
            models: The prepared models that no hook has loaded.
            options: What the user gave `load_state` beyond its own arguments.
        """


def layout_of(strategy: Any) -> str:
    """Return the layout of a strategy's checkpoints."""
    return str(getattr(strategy, "checkpoint_layout", WHOLE))


def writes_itself(strategy: Any) -> TypeGuard[OwnsCheckpoint]:
    """Tell whether a strategy writes models and optimizers itself."""
    return layout_of(strategy) != WHOLE


def writes_in_parts(strategy: Any) -> TypeGuard[WritesInParts]:
    """Tell whether a strategy that writes models and optimizers itself leaves it to whom and when."""
    return writes_itself(strategy) and hasattr(strategy, "state_parts")


def schedules_to_save(schedulers: Sequence[Any]) -> list[Any]:
    """Leave out the schedules that a strategy saves itself.

    Args:
        schedulers: The prepared schedules; those with `saved_by_strategy` are left out.

    Returns:
        The others.
    """
    return [scheduler for scheduler in schedulers if not getattr(scheduler, "saved_by_strategy", False)]
