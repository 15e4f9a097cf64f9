"""Names of the files and folders of a checkpoint: Accelerate's, plus the manifest that commits it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from notebook_accelerate.telemetry import events

CUSTOM_OBJECT_NAME = "custom_checkpoint"
DATALOADER_STATE_NAME = "dl_state_dict"
CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of the project that contains the automatically named checkpoints."""
MANIFEST_NAME = events.MANIFEST_NAME
"""Sizes and checksums of all files; a checkpoint is complete when the manifest exists and matches."""
STAGING_SUFFIX = ".incomplete"
"""Suffix of the hidden folder in which a checkpoint is being written."""
REMOVED_SUFFIX = ".removed"
"""Suffix of the hidden name of a checkpoint that is being removed."""
JOURNAL_NAME = ".committing"
"""Folder inside an existing checkpoint: complete new files that are being moved to their final names."""
LOCK_SUFFIX = ".saving"
"""Suffix, and inside an existing folder the name, of the file that the saving process locks."""

_MAX_STEM = 240
_NUMBERED = re.compile(r"checkpoint_(\d{1,18})", re.ASCII)


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
    """Return the folder in which the checkpoint `target` is written before it gets its name.

    An existing folder is filled in place: it keeps its mode, owner and group, may be a link or a mount point, and its
    parent may be read-only. For a new one the folder is beside it, on the same file system. Accelerate reads every
    folder inside ``checkpoints`` as a checkpoint, so that of an automatically named one is a level higher.

    Args:
        target: Folder of the checkpoint.
    """
    return target / STAGING_SUFFIX if target.is_dir() else _beside(target, STAGING_SUFFIX)


def folder_for_files(staging: Path, target: Path, token: str) -> Path:
    """Return the folder inside a staging folder that becomes the checkpoint; hooks get it, so it has its final name.

    Args:
        staging: The staging folder.
        target: Folder of the checkpoint.
        token: The unique name of the save.
    """
    name = Path(os.path.normpath(target.absolute())).name or "checkpoint"  # "checkpoint" for the root folder
    return staging / token / name


def _beside(target: Path, suffix: str) -> Path:
    automatic = target.parent.name == CHECKPOINTS_FOLDER and is_numbered(target.name)
    return (target.parent.parent if automatic else target.parent) / f".{_short(target.name)}{suffix}"


def _short(name: str) -> str:
    """Return a name to which suffixes can be added: file systems limit names to 255 bytes."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= _MAX_STEM else hashlib.sha256(encoded).hexdigest()


def lock_of(staging: Path) -> Path:
    """Return the lock of a staging folder."""
    return staging.with_name(staging.name.removesuffix(STAGING_SUFFIX) + LOCK_SUFFIX)


def staging_folders(target: Path) -> list[Path]:
    """List the folders in which a checkpoint may have been written, whether it existed then or not."""
    beside = target.parent / f".{_short(target.name)}{STAGING_SUFFIX}"
    return list(dict.fromkeys([target / STAGING_SUFFIX, beside, _beside(target, STAGING_SUFFIX)]))


def unfinished_staging(target: Path) -> Path | None:
    """Return the staging folder that an ended process left for a checkpoint, or None."""
    return next((place for place in staging_folders(target) if place.is_dir()), None)
