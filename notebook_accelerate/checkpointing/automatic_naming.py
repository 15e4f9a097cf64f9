"""Automatically named checkpoints: checkpoints/checkpoint_0, checkpoint_1, ... in a project's folder."""

from __future__ import annotations

import os

from notebook_accelerate.big_modeling.remote_paths import AnyPath, path_of
from notebook_accelerate.checkpointing import checkpoint_layout
from notebook_accelerate.checkpointing.checkpoint_stores import store_for
from notebook_accelerate.config.cluster import ProjectConfiguration


def automatic_checkpoints(project_dir: AnyPath) -> list[AnyPath]:
    """List the automatically named checkpoints of a project, oldest first."""
    return [folder for folder in _numbered_folders(project_dir) if store_for(folder).is_checkpoint()]


def _numbered_folders(project_dir: AnyPath) -> list[AnyPath]:
    folder = project_dir / checkpoint_layout.CHECKPOINTS_FOLDER
    found = [path for path in folder.iterdir() if checkpoint_layout.is_numbered(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: checkpoint_layout.number_of(path.name))


def next_target(project: ProjectConfiguration, output_dir: str | os.PathLike[str] | None) -> AnyPath:
    """Return the folder of the next checkpoint.

    Args:
        project: The project's settings. With `automatic_checkpoint_naming`, `output_dir` is ignored, as in Accelerate.
        output_dir: The folder that the user passed, or None.

    Returns:
        The folder, absolute.

    Raises:
        ValueError: No folder was passed, or the automatic name is taken.
    """
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                'save_state() got no output_dir. Pass one, save_state("my_checkpoint"), or have checkpoints numbered: '
                'Accelerator(project_config=ProjectConfiguration(project_dir="runs", automatic_checkpoint_naming=True))'
            )
        return path_of(output_dir).absolute()
    project_dir = project_directory(project)
    target = project_dir / checkpoint_layout.CHECKPOINTS_FOLDER / f"checkpoint_{project.iteration}"
    if store_for(target).is_occupied():
        newest = checkpoint_layout.number_of(_numbered_folders(project_dir)[-1].name)
        raise ValueError(
            f"Checkpoint {target} exists already. Resume from the newest one with accelerator.load_state(), which "
            f"also sets the number, or start numbering after it: ProjectConfiguration(..., iteration={newest + 1})."
        )
    return target


def project_directory(project: ProjectConfiguration) -> AnyPath:
    """Return the absolute folder of a project with automatically named checkpoints.

    Args:
        project: The project's settings.

    Raises:
        ValueError: The project has no folder.
    """
    if project.project_dir is None:
        raise ValueError(
            "automatic_checkpoint_naming=True needs a project_dir: "
            'ProjectConfiguration(project_dir="runs", automatic_checkpoint_naming=True)'
        )
    return path_of(project.project_dir).absolute()


def checkpoints_above_limit(project_dir: AnyPath, total_limit: int | None) -> list[AnyPath]:
    """List the oldest automatically named checkpoints above the limit.

    Args:
        project_dir: Folder of the project.
        total_limit: How many to keep; None keeps all.
    """
    if total_limit is None:
        return []
    found = automatic_checkpoints(project_dir)
    return found[: max(len(found) - total_limit, 0)]
