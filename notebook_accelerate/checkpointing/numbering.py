"""Checkpoints that get their names by themselves: checkpoints/checkpoint_0, checkpoint_1, ... in a project's folder."""

from __future__ import annotations

import os
from typing import Any

from notebook_accelerate.big_modeling.remote_paths import AnyPath, path_of
from notebook_accelerate.checkpointing import checkpoint_layout
from notebook_accelerate.checkpointing.checkpoint_stores import store_of


def automatic_folder(project_dir: AnyPath, iteration: int) -> AnyPath:
    """Return the folder of the automatically named checkpoint number `iteration`."""
    return project_dir / checkpoint_layout.CHECKPOINTS_FOLDER / f"checkpoint_{iteration}"


def automatic_checkpoints(project_dir: AnyPath) -> list[AnyPath]:
    """List the automatically named checkpoints of a project, oldest first."""
    return [folder for folder in _numbered(project_dir) if store_of(folder).is_checkpoint()]


def _numbered(project_dir: AnyPath) -> list[AnyPath]:
    folder = project_dir / checkpoint_layout.CHECKPOINTS_FOLDER
    found = [path for path in folder.iterdir() if checkpoint_layout.is_numbered(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: checkpoint_layout.number_of(path.name))


def next_target(project: Any, output_dir: str | os.PathLike[str] | None) -> AnyPath:
    """Decide where the next checkpoint goes.

    Args:
        project: The ProjectConfiguration. With `automatic_checkpoint_naming` it decides alone, as in Accelerate.
        output_dir: The folder the user named, or None.

    Returns:
        The folder, absolute.

    Raises:
        ValueError: No folder is named, or the automatic name is taken.
    """
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                'save_state() got no output_dir. Name one, save_state("my_checkpoint"), or let them be numbered: '
                'Accelerator(project_config=ProjectConfiguration(project_dir="runs", automatic_checkpoint_naming=True))'
            )
        return path_of(output_dir).absolute()
    target = automatic_folder(project_directory(project), project.iteration)
    if store_of(target).is_taken():
        newest = checkpoint_layout.number_of(_numbered(target.parent.parent)[-1].name)
        raise ValueError(
            f"Checkpoint {target} exists already. Resume from the newest one with accelerator.load_state(), which "
            f"also sets the number, or start numbering after it: ProjectConfiguration(..., iteration={newest + 1})."
        )
    return target


def project_directory(project: Any) -> AnyPath:
    """Return the absolute folder of a project with automatically named checkpoints.

    Args:
        project: The ProjectConfiguration.

    Raises:
        ValueError: It names no folder.
    """
    if project.project_dir is None:
        raise ValueError(
            "automatic_checkpoint_naming needs to know where: "
            'ProjectConfiguration(project_dir="runs", automatic_checkpoint_naming=True)'
        )
    return path_of(project.project_dir).absolute()


def surplus(project_dir: AnyPath, total_limit: int | None) -> list[AnyPath]:
    """List the oldest automatically named checkpoints above the limit.

    Args:
        project_dir: Folder of the project.
        total_limit: How many to keep; None keeps all.
    """
    if total_limit is None:
        return []
    found = automatic_checkpoints(project_dir)
    return found[: max(len(found) - total_limit, 0)]
