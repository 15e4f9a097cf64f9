"""What a strategy has that keeps its models and optimizers in pieces and writes them itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

WHOLE = "whole"
"""The layout of strategies whose ranks each hold everything: one rank writes it, in single files."""


class OwnsCheckpoint(Protocol):
    """A strategy whose `checkpoint_layout` is not "whole"; strategies without the attribute are whole."""

    name: str
    checkpoint_layout: str
    """Name of the layout, recorded in the manifest: a checkpoint is loaded by the layout that wrote it."""

    def save_state(self, accelerator: Any, folder: Path, safe_serialization: bool, **options: Any) -> None:
        """Write models and optimizers into a folder, in files of any name; every rank calls it.

        Args:
            accelerator: The Accelerator.
            folder: A staging folder that exists and that all ranks of a file system share.
            safe_serialization: Prefer safetensors.
            options: What the user gave `save_state` beyond its own arguments.
        """

    def load_state(self, accelerator: Any, folder: Path, models: list[Any], **options: Any) -> None:
        """Read models and optimizers from a folder; every rank calls it.

        Args:
            accelerator: The Accelerator.
            folder: The checkpoint, verified.
            models: The prepared models that no hook has loaded.
            options: What the user gave `load_state` beyond its own arguments.
        """


def layout_of(strategy: Any) -> str:
    """Return the layout of a strategy's checkpoints."""
    return str(getattr(strategy, "checkpoint_layout", WHOLE))


def writes_itself(strategy: Any) -> bool:
    """Tell whether a strategy writes models and optimizers itself."""
    return layout_of(strategy) != WHOLE


def schedules_to_save(schedulers: Sequence[Any]) -> list[Any]:
    """Leave out the schedules that a strategy saves itself.

    Args:
        schedulers: The prepared schedules; those with `saved_by_strategy` are left out.

    Returns:
        The others.
    """
    return [scheduler for scheduler in schedulers if not getattr(scheduler, "saved_by_strategy", False)]
