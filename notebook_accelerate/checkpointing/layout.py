"""Names of the files and folders of a checkpoint: Accelerate's, plus the manifest that commits it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CUSTOM_OBJECT_NAME = "custom_checkpoint"
DATALOADER_STATE_NAME = "dl_state_dict"
CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of the project that automatically named checkpoints are in."""
MANIFEST_NAME = "checkpoint_manifest.json"
"""Sizes and checksums of all files; a checkpoint is complete when it is there and agrees."""
STAGING_SUFFIX = ".incomplete"
"""End of the hidden name of a folder in which a checkpoint is being written."""
DOOMED_SUFFIX = ".removed"
"""End of the hidden name of a checkpoint above the limit while it is being removed."""
JOURNAL_NAME = ".committing"
"""Folder inside a checkpoint that existed before: complete new files that are being moved to their places."""

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def numbered(name: str, index: int, suffix: str) -> str:
    """Return the file name of the `index`-th object of a kind: the first one carries no number.

    Args:
        name: The kind, for instance ``optimizer``.
        index: Position of the object among those of its kind, from 0.
        suffix: End of the file name with its dot, for instance ``.bin``.
    """
    return f"{name}{suffix}" if index == 0 else f"{name}_{index}{suffix}"


def staging_folder(target: Path) -> Path:
    """Return the folder in which the checkpoint `target` is written before it takes its place.

    It is on the file system of its place. Folders inside ``checkpoints`` are all read as checkpoints by Accelerate, so
    the staging folder of an automatically named one is a level higher.

    Args:
        target: Folder of the checkpoint.
    """
    if target.is_dir() and any(target.iterdir()):
        return target / STAGING_SUFFIX
    automatic = target.parent.name == CHECKPOINTS_FOLDER and _NUMBERED.fullmatch(target.name)
    return (target.parent.parent if automatic else target.parent) / f".{target.name}{STAGING_SUFFIX}"


def unfinished(target: Path) -> Path | None:
    """Return the folder in which a checkpoint was being written when its process ended, or None."""
    parents = {target: STAGING_SUFFIX, target.parent: f".{target.name}{STAGING_SUFFIX}"}
    if target.parent.name == CHECKPOINTS_FOLDER:
        parents[target.parent.parent] = f".{target.name}{STAGING_SUFFIX}"
    return next((parent / name for parent, name in parents.items() if (parent / name).is_dir()), None)


def automatic_folder(project_dir: Path, iteration: int) -> Path:
    """Return the folder of the automatically named checkpoint number `iteration`."""
    return project_dir / CHECKPOINTS_FOLDER / f"checkpoint_{iteration}"


def automatic_checkpoints(project_dir: Path) -> list[Path]:
    """List the automatically named checkpoints of a project, oldest first."""
    folder = project_dir / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def number_of(folder: Path) -> int:
    """Return the number in the name of an automatically named checkpoint."""
    match = _NUMBERED.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def next_target(project: Any, output_dir: str | Path | None) -> Path:
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
        return Path(output_dir).absolute()
    target = automatic_folder(project_directory(project), project.iteration)
    if target.exists():
        newest = number_of(automatic_checkpoints(target.parent.parent)[-1])
        raise ValueError(
            f"Checkpoint {target} exists already. Resume from the newest one with accelerator.load_state(), which "
            f"also sets the number, or start numbering after it: ProjectConfiguration(..., iteration={newest + 1})."
        )
    return target


def project_directory(project: Any) -> Path:
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
    return Path(project.project_dir).absolute()


def surplus(project_dir: Path, total_limit: int | None) -> list[Path]:
    """List the oldest automatically named checkpoints above the limit.

    Args:
        project_dir: Folder of the project.
        total_limit: How many to keep; None keeps all.
    """
    found = automatic_checkpoints(project_dir)
    return [] if total_limit is None else found[: max(len(found) - total_limit, 0)]
