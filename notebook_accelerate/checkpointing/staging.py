"""Writing a checkpoint beside its place and moving it there when it is complete.

A folder that does not exist yet is written beside its place and renamed. One that exists (its other files stay, and it
may be a mount point or the working directory, which cannot be renamed) gets the new files in a folder inside it; that
folder is renamed to say "complete", then its entries are moved up. Whoever finds such a journal finishes the moves.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from notebook_accelerate.big_modeling.weight_files import inside
from notebook_accelerate.checkpointing import checkpoint_layout
from notebook_accelerate.checkpointing.manifest import read_manifest
from notebook_accelerate.errors import CheckpointError


def open_staging(target: Path) -> Path:
    """Make an empty staging folder for a checkpoint, in place of one that an ended process left behind.

    Args:
        target: Folder of the checkpoint.

    Returns:
        The staging folder.

    Raises:
        CheckpointError: The place is a file, or the folder cannot be made.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"Cannot write the checkpoint {target}: there is a file of that name.")
    finish_journal(target)
    if (old := checkpoint_layout.unfinished(target)) is not None:
        shutil.rmtree(old)
    staging = checkpoint_layout.staging_folder(target)
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise write_error(target, error) from error
    return staging


def commit(staging: Path, target: Path) -> None:
    """Put a complete staging folder (with its manifest) in its place.

    Args:
        staging: The folder that `open_staging` made.
        target: Folder of the checkpoint.
    """
    sync_folders(staging)
    if target.is_dir() and any(target.iterdir()):  # also one that somebody has put files into meanwhile
        journal = target / checkpoint_layout.JOURNAL_NAME
        staging.rename(journal)
        sync_folder(target)
        finish_journal(target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(target)
        sync_folder(target.parent)


def finish_journal(target: Path) -> bool:
    """Finish moving new files to their places, where a process ended on the way; repeating it does no harm.

    Args:
        target: Folder of the checkpoint.

    Returns:
        Whether there was something to finish.
    """
    journal = target / checkpoint_layout.JOURNAL_NAME
    if not journal.is_dir():
        return False
    if (new := read_manifest(journal)) is not None:  # it is moved last: where it is gone, the rest was done
        _remove_stale(target, keep={Path(name).parts[0] for name in new.files})
    entries = sorted(journal.iterdir(), key=lambda entry: entry.name == checkpoint_layout.MANIFEST_NAME)
    for entry in entries:
        place = target / entry.name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        entry.replace(place)
    journal.rmdir()
    sync_folder(target)
    return True


def _remove_stale(target: Path, keep: set[str]) -> None:
    """Remove what the previous checkpoint in this folder had and the new one has not; other files are not ours."""
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
    """Remove a staging folder whose writing failed; what cannot be removed stays and is replaced by the next save."""
    shutil.rmtree(staging, ignore_errors=True)


def remove_numbered(project_dir: Path, surplus: Iterable[Path]) -> None:
    """Remove automatically named checkpoints.

    A folder is renamed before it is removed, so that what an ended process leaves is no checkpoint.

    Args:
        project_dir: Folder of the project.
        surplus: Folders of the checkpoints.
    """
    for left in project_dir.glob(f".*{checkpoint_layout.DOOMED_SUFFIX}"):
        shutil.rmtree(left)
    for folder in surplus:
        doomed = folder.rename(project_dir / f".{folder.name}{checkpoint_layout.DOOMED_SUFFIX}")
        shutil.rmtree(doomed)


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk, where the system can say so."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows, and some network file systems, open no folders
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """Wait until the entries of a folder and of all folders below it are on the disk."""
    for root, _, _ in os.walk(folder):
        sync_folder(Path(root))


def write_error(target: Path, error: BaseException) -> CheckpointError:
    """Explain why a checkpoint could not be written.

    Args:
        target: Folder of the checkpoint, or the file.
        error: What the writer raised; torch and safetensors hide a full disk in their own types.
    """
    free = _free(target)
    number = getattr(error, "errno", None)
    full = number in {28, 122} or "os error 28" in str(error) or "os error 122" in str(error) or free < _NEARLY_FULL
    reason = f"the disk is full, {free / 1e6:,.0f} MB are free" if full else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"The checkpoint {target} was not written: {reason}. What was there before is unchanged."
        + (" Remove what you no longer need, or set ProjectConfiguration(total_limit=...)." if full else "")
    )


_NEARLY_FULL = 1 << 20


def _free(target: Path) -> float:
    """Return the free bytes of the file system that `target` is on; infinite where it does not answer."""
    try:
        return shutil.disk_usage(next(parent for parent in (target, *target.parents) if parent.is_dir())).free
    except OSError:
        return math.inf
