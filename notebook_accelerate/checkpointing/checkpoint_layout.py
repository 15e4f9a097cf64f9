"""Names of the files and folders of a checkpoint: Accelerate's, plus the manifest that commits it."""

from __future__ import annotations

import re
from pathlib import Path

CUSTOM_OBJECT_NAME = "custom_checkpoint"
DATALOADER_STATE_NAME = "dl_state_dict"
CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of the project that contains the automatically named checkpoints."""
MANIFEST_NAME = "checkpoint_manifest.json"
"""Sizes and checksums of all files; a checkpoint is complete when the manifest exists and matches."""
STAGING_SUFFIX = ".incomplete"
"""Suffix of the hidden folder in which a checkpoint is being written."""
REMOVED_SUFFIX = ".removed"
"""Suffix of the hidden name of a checkpoint that is being removed."""
JOURNAL_NAME = ".committing"
"""Folder inside an existing checkpoint: complete new files that are being moved to their final names."""

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def numbered(name: str, index: int, suffix: str) -> str:
    """Return the file name of the `index`-th object of a kind; the first one has no number.

    Args:
        name: The kind, for instance ``optimizer``.
        index: Position of the object among those of its kind, from 0.
        suffix: File suffix with its dot, for instance ``.bin``.
    """
    return f"{name}{suffix}" if index == 0 else f"{name}_{index}{suffix}"


def is_numbered(name: str) -> bool:
    """Tell whether a folder name is that of an automatically named checkpoint."""
    return _NUMBERED.fullmatch(name) is not None


def number_of(name: str) -> int:
    """Return the number in the name of an automatically named checkpoint."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return int(match[1])


def removal_name(name: str) -> str:
    """Return the hidden name under which a checkpoint is removed."""
    return f".{name}{REMOVED_SUFFIX}"


def staging_folder(target: Path) -> Path:
    """Return the folder in which the checkpoint `target` is written before it is renamed.

    The folder is on the file system of `target`. Accelerate reads every folder inside ``checkpoints`` as a checkpoint,
    so the staging folder of an automatically named one is a level higher.

    Args:
        target: Folder of the checkpoint.
    """
    if target.is_dir() and any(target.iterdir()):
        return target / STAGING_SUFFIX
    automatic = target.parent.name == CHECKPOINTS_FOLDER and is_numbered(target.name)
    return (target.parent.parent if automatic else target.parent) / _staging_name(target)


def _staging_name(target: Path) -> str:
    return f".{target.name}{STAGING_SUFFIX}"


def unfinished_staging(target: Path) -> Path | None:
    """Return the staging folder that an ended process left for a checkpoint, or None."""
    places = [target / STAGING_SUFFIX, target.parent / _staging_name(target)]
    if target.parent.name == CHECKPOINTS_FOLDER:
        places.append(target.parent.parent / _staging_name(target))
    return next((place for place in places if place.is_dir()), None)
