"""Writes a checkpoint in a staging folder and moves it to its final place when it is complete.

A new folder is written under another name and renamed. An existing one (its other files stay, and it may be a mount
point or the working directory, which cannot be renamed) gets the new files in a folder inside it; that folder is
renamed to mark it complete (the journal), then its entries are moved up. Any process that finds a journal finishes the
moves.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from notebook_accelerate.big_modeling.weight_files import inside
from notebook_accelerate.checkpointing import checkpoint_layout
from notebook_accelerate.checkpointing.manifest import read_manifest
from notebook_accelerate.errors import CheckpointError

_DISK_FULL = (28, 122)
"""ENOSPC, and EDQUOT: a quota is used up."""
_NEARLY_FULL = 1 << 20


def create_staging(target: Path) -> Path:
    """Create an empty staging folder for a checkpoint; one that an ended process left behind is removed first.

    Args:
        target: Folder of the checkpoint.

    Returns:
        The staging folder.

    Raises:
        CheckpointError: `target` is a file.
        OSError: The folder cannot be created.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(
            f"Cannot write the checkpoint {target}: there is a file of that name. Pass another folder: "
            'accelerator.save_state("my_checkpoint")'
        )
    finish_journal(target)
    if (old := checkpoint_layout.unfinished_staging(target)) is not None:
        shutil.rmtree(old)
    staging = checkpoint_layout.staging_folder(target)
    staging.mkdir(parents=True)
    return staging


def commit(staging: Path, target: Path) -> None:
    """Move a complete staging folder (with its manifest) to its final place.

    Args:
        staging: The folder that `create_staging` returned.
        target: Folder of the checkpoint.
    """
    sync_folders(staging)
    if target.is_dir() and any(target.iterdir()):  # also if files were added while the checkpoint was written
        journal = target / checkpoint_layout.JOURNAL_NAME
        staging.rename(journal)
        sync_folder(target)
        finish_journal(target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(target)
        sync_folder(target.parent)


def finish_journal(target: Path) -> None:
    """Finish moving new files to their final names after a process ended in the middle of it; idempotent.

    Args:
        target: Folder of the checkpoint.
    """
    journal = target / checkpoint_layout.JOURNAL_NAME
    if not journal.is_dir():
        return
    if (new := read_manifest(journal)) is not None:  # moved last: without it, stale files were removed already
        _remove_stale(target, keep={Path(name).parts[0] for name in new.files})
    entries = sorted(journal.iterdir(), key=lambda entry: entry.name == checkpoint_layout.MANIFEST_NAME)
    for entry in entries:
        destination = target / entry.name
        if destination.is_dir() and not destination.is_symlink():
            shutil.rmtree(destination)
        entry.replace(destination)
    journal.rmdir()
    sync_folder(target)


def _remove_stale(target: Path, keep: set[str]) -> None:
    """Remove files of the previous checkpoint in this folder that the new one lacks; the user's own files stay."""
    try:
        old = read_manifest(target)
    except CheckpointError:
        return
    for name in {Path(name).parts[0] for name in old.files} - keep if old else ():
        entry = inside(target, name)
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def discard(staging: Path) -> None:
    """Remove the staging folder of a failed save; what cannot be removed is replaced by the next save."""
    shutil.rmtree(staging, ignore_errors=True)


def remove_numbered(project_dir: Path, surplus: Iterable[Path]) -> None:
    """Remove automatically named checkpoints.

    A folder is renamed before it is removed, so that a process that ends in the middle leaves no partial checkpoint.

    Args:
        project_dir: Folder of the project.
        surplus: Folders of the checkpoints.
    """
    for left in project_dir.glob(checkpoint_layout.removal_name("*")):
        shutil.rmtree(left)
    for folder in surplus:
        shutil.rmtree(folder.rename(project_dir / checkpoint_layout.removal_name(folder.name)))


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the system supports it."""
    with suppress(OSError):  # Windows and some network file systems cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """Flush the entries of a folder and of all folders below it to the disk."""
    for root, _, _ in os.walk(folder):
        sync_folder(Path(root))


def write_error(target: Path, error: BaseException) -> CheckpointError:
    """Return the error for a checkpoint or file that could not be written.

    Args:
        target: Folder of the checkpoint, or the file.
        error: Error of the writer; torch and safetensors wrap "disk full" in types of their own.
    """
    free = _free_bytes(target)
    wrapped = any(f"os error {number}" in str(error) for number in _DISK_FULL)
    full = getattr(error, "errno", None) in _DISK_FULL or wrapped or free < _NEARLY_FULL
    reason = f"the disk is full, {free / 1e6:,.0f} MB are free" if full else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"The checkpoint {target} was not written: {reason}. What was there before is unchanged."
        + (" Free space, or keep fewer checkpoints: ProjectConfiguration(total_limit=2)." if full else "")
    )


def _free_bytes(target: Path) -> float:
    """Return the free bytes of the file system of `target`; infinite where they cannot be read."""
    try:
        return shutil.disk_usage(next(parent for parent in (target, *target.parents) if parent.is_dir())).free
    except OSError:
        return math.inf
