"""Writes a checkpoint in a staging folder and moves it to its final place when it is complete.

A new folder is written under another name and renamed. An existing one (its other files and its mode stay, and it may
be a mount point or the working directory, which cannot be renamed) gets the new files in a folder inside it; that
folder is renamed to mark it complete (the journal), then its entries are moved up. Any process that finds a journal
finishes the moves, if the one that made it has ended: the lock beside the staging folder shows that.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.big_modeling.weight_files import inside
from notebook_accelerate.checkpointing import checkpoint_layout
from notebook_accelerate.checkpointing.checkpoint_layout import read_manifest
from notebook_accelerate.checkpointing.save_lock import (
    LockHeldError,
    SaveLock,
    acquire_lock,
    live_owner,
    second_writer_error,
)
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.hardware import guarded_files

if TYPE_CHECKING:
    from notebook_accelerate.strategies.accelerator_properties import RankControl


_DISK_FULL = (28, 122)
"""ENOSPC, and EDQUOT: a quota is used up."""
_NEARLY_FULL = 1 << 20
_JOURNAL_LIMIT = 60.0
"""Seconds to wait for another process to finish its journal: it only renames and removes files."""
_JOURNAL_PAUSE = 0.01


def open_staging(target: Path, name: str) -> tuple[Path, SaveLock]:
    """Lock a checkpoint's folder and create a staging folder; what an ended process left behind is removed first.

    Args:
        target: Folder of the checkpoint.
        name: A unique name: what a rank of an ended save still writes cannot get into this one.

    Returns:
        The folder for the files, inside the staging folder, and the lock.

    Raises:
        CheckpointError: `target` is a file, or another process is saving there.
        OSError: The folder cannot be created.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(
            f"Cannot write the checkpoint {target}: there is a file of that name. Pass another folder: "
            'accelerator.save_state("my_checkpoint")'
        )
    staging = checkpoint_layout.staging_folder(target)
    if staging.parent != target:
        staging.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(target, staging)
    try:
        _remove_unfinished(target, lock)
        if staging.parent == target:
            finish_journal(target)
        folder = checkpoint_layout.folder_for_files(staging, target, name)
        folder.mkdir(parents=True)
    except BaseException:
        lock.release()
        raise
    return folder, lock


def _lock(target: Path, staging: Path) -> SaveLock:
    try:
        return acquire_lock(checkpoint_layout.lock_of(staging))
    except LockHeldError as error:
        raise CheckpointError(second_writer_error(target, error.owner)) from error


def _remove_unfinished(target: Path, lock: SaveLock) -> None:
    for left in checkpoint_layout.staging_folders(target):
        own = checkpoint_layout.lock_of(left) == lock.path
        if not own and not left.exists() and not checkpoint_layout.lock_of(left).exists():
            continue
        with nullcontext() if own else _lock(target, left):
            _remove_folder(left)


def _remove_folder(folder: Path) -> None:
    if folder.is_symlink():  # the user's: its target is left alone
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def commit(folder: Path, target: Path, lock: SaveLock) -> None:
    """Move a complete folder of files (with its manifest) to its final place, and release the lock.

    Args:
        folder: The folder that `open_staging` returned.
        target: Folder of the checkpoint.
        lock: Its lock.

    Raises:
        CheckpointError: The lock was lost, or another process is saving to the folder, which was created meanwhile.
    """
    sync_folders(folder)
    if not lock.is_held():
        raise CheckpointError(
            f"The checkpoint {target} was not written: the lock {lock.path} was removed while it was being saved. What "
            "was there before is unchanged. Save again."
        )
    if not _become(folder, target):
        inner = target / checkpoint_layout.STAGING_SUFFIX
        with nullcontext() if folder.parent.parent == inner else _lock(target, inner):
            folder.rename(target / checkpoint_layout.JOURNAL_NAME)
            _remove_emptied(folder)
            sync_folder(target)
            finish_journal(target)
    _remove_emptied(folder)
    lock.release()


def _remove_emptied(folder: Path) -> None:
    """Remove the folders above one that was moved away, up to the staging folder, if they are empty."""
    with suppress(OSError):
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def _become(folder: Path, target: Path) -> bool:
    """Move a folder of files to the checkpoint's place; return whether that was possible: there is no such folder."""
    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.rename(target)
    except OSError:
        if target.is_dir():  # created meanwhile, and not empty
            return False
        raise
    sync_folder(target.parent)
    return True


def finish_abandoned_journal(target: Path) -> None:
    """Finish the journal of a process that has ended; wait for a process that is alive to finish its own.

    Args:
        target: Folder of the checkpoint.

    Raises:
        CheckpointError: A process that is alive does not finish, or this one must not write to the folder.
    """
    journal, lock = target / checkpoint_layout.JOURNAL_NAME, target / checkpoint_layout.LOCK_SUFFIX
    deadline = time.monotonic() + _JOURNAL_LIMIT
    while journal.is_dir():
        if (owner := live_owner(lock)) is None:
            try:
                with acquire_lock(lock):
                    return finish_journal(target)
            except LockHeldError:  # another process was faster
                continue
            except OSError as error:
                raise CheckpointError(
                    f"Checkpoint {target} was not loaded: the process that saved it ended while it moved the new files "
                    f"from {journal.name}, and this one cannot finish that ({error}). Load it once where you may write "
                    "to the folder."
                ) from error
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Checkpoint {target} was not loaded: {owner} has been moving new files there for {_JOURNAL_LIMIT:.0f} "
                "s. Load it when that save has ended."
            )
        time.sleep(_JOURNAL_PAUSE)
    return None


def finish_journal(target: Path) -> None:
    """Move new files to their final names, also after a process ended in the middle of it; idempotent.

    Only the process that holds the lock of the folder may call this.

    Args:
        target: Folder of the checkpoint.

    Raises:
        BrokenCheckpointError: The journal is a link, or its manifest cannot be read.
    """
    journal = target / checkpoint_layout.JOURNAL_NAME
    if not journal.is_dir():
        return
    if journal.is_symlink():
        raise BrokenCheckpointError(f"{journal} is a link, which no save makes: remove it, and load or save again.")
    if (new := read_manifest(journal)) is not None:  # moved last: without it, stale files were removed already
        _remove_stale(target, keep={Path(name).parts[0] for name in new.files})
    entries = sorted(journal.iterdir(), key=lambda entry: entry.name == checkpoint_layout.MANIFEST_NAME)
    for entry in entries:
        if entry.name in {checkpoint_layout.LOCK_SUFFIX, checkpoint_layout.STAGING_SUFFIX}:  # no save's
            continue
        destination = target / entry.name
        if destination.is_dir() and not destination.is_symlink():
            shutil.rmtree(destination)
        entry.replace(destination)
    shutil.rmtree(journal)
    sync_folder(target)


def _remove_stale(target: Path, keep: set[str]) -> None:
    """Remove files of the previous checkpoint in this folder that the new one lacks; the user's own files stay."""
    try:
        old = read_manifest(target)
    except CheckpointError:
        return
    for name in {Path(name).parts[0] for name in old.files} - keep if old else ():
        entry = inside(target, name)
        if entry.is_dir() and not entry.is_symlink():
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
        surplus: Folders of the checkpoints; of a link only the link is removed.

    Raises:
        OSError: Some could not be removed; the others have been.
    """
    failure: OSError | None = None
    for folder in (*project_dir.glob(checkpoint_layout.removal_name("*")), *surplus):
        try:
            hidden = project_dir / checkpoint_layout.removal_name(folder.name)
            _remove_folder(folder if folder.parent == project_dir else folder.rename(hidden))
        except OSError as error:  # one that cannot be removed does not keep the others
            failure = failure or error
    if failure is not None:
        raise failure


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


# Writes single files so that each is complete or unchanged, on the disk or behind a URL.

_PARTIAL = ".partial"


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary file on the disk that replaces `path` when the block ends; on failure `path` is unchanged.

    Args:
        path: The destination; a URL is uploaded to.

    Raises:
        CheckpointError: The file could not be written or uploaded.
    """
    if not isinstance(path, Path):
        with guarded_files.scratch() as folder:
            with _as_checkpoint_error(folder):
                yield folder / path.name
            path.upload(folder / path.name)
        return
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with _as_checkpoint_error(path):
            yield partial
            sync_file(partial)
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, AttributeError, TypeError):  # caused by the object, not by the disk
        raise
    except Exception as error:
        raise write_error(path, error) from error


@contextmanager
def local_copy(path: AnyPath) -> Iterator[Path]:
    """Yield a file on the disk to read: `path` itself, or a temporary copy of a remote file.

    Args:
        path: The file.
    """
    if isinstance(path, Path):
        yield path
        return
    with guarded_files.scratch() as folder:
        path.download(folder / path.name)
        yield folder / path.name


def make_folder(folder: AnyPath) -> None:
    """Create a folder if it is missing; object stores have no folders to create.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: It cannot be created.
    """
    if isinstance(folder, Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from error


def is_writer(path: AnyPath, state: RankControl, each_node: bool) -> bool:
    """Tell whether this rank writes a file that one rank writes for all others.

    Args:
        path: The destination; all machines see the same object store, so its writer is the main rank.
        state: The state of the world, or the Accelerator.
        each_node: Whether the first rank of every machine writes, for machines with disks of their own.
    """
    return state.is_local_main_process if each_node and isinstance(path, Path) else state.is_main_process
