"""Checkpoints on a file system, which are written to a staging folder under a lock, and renamed once complete.

A new checkpoint is written to a folder next to its final location, and then renamed. A folder that already exists must
keep its mode and its other files, and it may be a mount point or the working directory, which cannot be renamed. The
new files are therefore written to a folder inside it, which is renamed to ``.committing`` once it is complete. A
process that finds this folder finishes the commit if the writer is dead, which the lock of the staging folder shows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from notebook_accelerate.checkpointing.commit import CheckpointStore, FileRecords, ReadLocation
from notebook_accelerate.checkpointing.manifest import (
    CHECKPOINTS_FOLDER,
    COMMITTING_NAME,
    LOCK_SUFFIX,
    RESERVED,
    STAGING_SUFFIX,
    FileRecord,
    Manifest,
    files_below,
    is_numbered,
    make_record,
    removal_name,
)
from notebook_accelerate.checkpointing.save_lock import (
    LockHeldError,
    SaveLock,
    acquire_lock,
    live_owner,
    second_writer_error,
)
from notebook_accelerate.checkpointing.single_files import sync_file, write_error
from notebook_accelerate.config.constants import MANIFEST_NAME, RNG_STATE_NAME
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.files.weight_files import inside
from notebook_accelerate.state.process_group import world_from_environ

_MOVE_LIMIT = 60.0
"""Seconds to wait while another process moves its new files, which involves only renames and removals."""
_MOVE_PAUSE = 0.01
_MAX_STEM = 240


class DiskStore(CheckpointStore):
    """A folder on a file system. The ranks that share the file system write to one staging folder.

    Args:
        target: The folder of the checkpoint.
    """

    poll_interval = 0.01
    target: Path
    committing: Path
    delivered: Path
    messages: Path
    _lock: SaveLock | None = None

    # ---- saving

    def open(self, token: str) -> None:
        try:
            super().open(token)
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError):
                raise write_error(self.target, error) from error
            raise

    def _claim(self) -> None:
        if self.target.exists() and not self.target.is_dir():
            raise CheckpointError(
                f"Cannot write the checkpoint {self.target}: a file with this name exists. Pass another folder: "
                'accelerator.save_state("my_checkpoint")'
            )
        self._staging = _staging_folder(self.target)
        if self._staging.parent != self.target:
            self._staging.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked(self._staging)

    def _locked(self, staging: Path) -> SaveLock:
        try:
            return acquire_lock(_lock_of(staging))
        except LockHeldError as error:
            raise CheckpointError(second_writer_error(self.target, error.owner)) from error

    def _check_claim(self) -> None:
        assert self._lock is not None
        if not self._lock.is_held():
            raise CheckpointError(
                f"The checkpoint {self.target} was not written: the lock {self._lock.path} was removed while it was "
                "being saved. Its previous content is unchanged. Save again."
            )

    def _remove_unfinished(self) -> None:
        for left in _staging_folders(self.target):
            own = left == self._staging
            if own or left.exists() or _lock_of(left).exists():
                with nullcontext() if own else self._locked(left):
                    _delete(left)

    def _make_room(self, token: str) -> None:
        self._write_into(_folder_for_files(self._staging, self.target, token))
        self.folder.mkdir(parents=True)

    def _write_into(self, folder: Path) -> None:
        self.folder = self.delivered = folder
        self.messages = folder.parent

    def can_see(self, token: str) -> bool:
        """Return whether this rank sees the folder that the main rank has opened.

        If the rank's machine has a separate disk, the rank does not see the folder.
        """
        if self._lock is None:
            self._write_into(_folder_for_files(_staging_folder(self.target), self.target, token))
        return self.folder.is_dir()

    def sync(self, path: Path) -> None:
        sync_file(path)

    def write_report(self, rank: int, content: dict[str, Any]) -> None:
        """Report success or failure. If an error cannot be written, removing the staging folder reports it."""
        try:
            super().write_report(rank, content)
        except OSError:
            if "error" not in content:
                raise
            shutil.rmtree(self.folder, ignore_errors=True)

    def activity(self, rank: int) -> Any:
        """Return the number of bytes in the staging folder."""
        return _folder_size(self.folder) if self.folder.is_dir() else None

    def _all_records(self, parts: Iterable[FileRecords]) -> FileRecords:
        records = super()._all_records(parts)
        for path in files_below(self.folder):  # Hooks and strategies may have written files without records.
            name = path.relative_to(self.folder).as_posix()
            if name not in records:
                records[name] = make_record(path)
                sync_file(path)
        return records

    def _stored_record(self, name: str) -> FileRecord:
        return make_record(self.folder / name)

    def _publish(self) -> None:
        sync_file(self.folder / MANIFEST_NAME)
        for root, _, _ in os.walk(self.folder):
            _sync_folder(Path(root))
        self._check_claim()
        if self._become_target():
            return
        inner = self.target / STAGING_SUFFIX
        # If the staging folder is outside of the target, the target was created during the save. Lock it, too.
        with nullcontext() if self._staging == inner else self._locked(inner):
            self.folder.rename(self.committing)
            self._remove_emptied()
            _sync_folder(self.target)
            self._replace_old_files()

    def _become_target(self) -> bool:
        """Give the folder of files the checkpoint's name. Return False if a folder with this name already exists."""
        if self.target.is_dir():
            return False
        self.target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.folder.rename(self.target)
        except OSError:
            if self.target.is_dir():  # The target was created during the save, and is not empty.
                return False
            raise
        _sync_folder(self.target.parent)
        return True

    def _remove_emptied(self) -> None:
        """Remove the folder of reports once the files are renamed, and the staging folder if it is now empty."""
        shutil.rmtree(self.messages, ignore_errors=True)
        with suppress(OSError):
            self._staging.rmdir()

    def _release(self) -> None:
        self._remove_emptied()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def discard(self, opened: bool, delivering: bool = True) -> None:
        """Abandon a save. The rank that has created the staging folder removes the folder and its lock."""
        if opened and self._lock is not None:
            if self._lock.is_held():
                shutil.rmtree(self._staging, ignore_errors=True)  # The next save removes the rest.
            self._lock.release()

    def write_error(self, error: BaseException) -> CheckpointError:
        return error if isinstance(error, CheckpointError) else write_error(self.target, error)

    def remove_checkpoints(self, surplus: Sequence[Path]) -> None:
        """Remove numbered checkpoints. If a checkpoint is a link, only the link is removed.

        A folder is renamed before it is removed, so that a process that dies in between leaves no partial checkpoint.

        Args:
            surplus: The folders of the checkpoints to remove.

        Raises:
            OSError: Some checkpoints could not be removed. All others have been removed.
        """
        project_dir = self.target.parent.parent
        failure: OSError | None = None
        for folder in (*project_dir.glob(removal_name("*")), *surplus):
            try:
                hidden = project_dir / removal_name(folder.name)
                _delete(folder if folder.parent == project_dir else folder.rename(hidden))
            except OSError as error:  # Continue, so that one failure does not prevent other removals.
                failure = failure or error
        if failure is not None:
            raise failure

    # ---- replacing old files

    def _is_committing(self) -> bool:
        if self.committing.is_symlink() and self.committing.is_dir():
            raise BrokenCheckpointError(
                f"{self.committing} is a link, which no save creates: remove it, and load or save again."
            )
        return self.committing.is_dir()

    def _committing_entries(self, new: Manifest) -> list[str]:
        return [entry.name for entry in self.committing.iterdir() if entry.name not in RESERVED]

    def _entry_of(self, name: str) -> str:
        return Path(name).parts[0]

    def _move_to_target(self, entries: Sequence[str]) -> None:
        for name in entries:
            destination = self.target / name
            if destination.is_dir():
                _delete(destination)
            (self.committing / name).replace(destination)

    def _remove(self, entries: Collection[str]) -> None:
        for name in entries:
            _delete(inside(self.target, name))

    def _remove_committing(self) -> None:
        shutil.rmtree(self.committing)
        _sync_folder(self.target)

    def finish_commit(self) -> None:
        """Finish a commit whose writer is dead, or wait for a writer that is alive.

        Raises:
            CheckpointError: The writer did not finish in time, or this process may not write to the folder.
        """
        lock = self.target / LOCK_SUFFIX
        deadline = time.monotonic() + _MOVE_LIMIT
        while self.committing.is_dir():
            if (owner := live_owner(lock)) is None:
                try:
                    with acquire_lock(lock):
                        return self._replace_old_files()
                except LockHeldError:  # Another process was faster.
                    continue
                except OSError as error:
                    raise CheckpointError(
                        f"Checkpoint {self.target} was not loaded: the process that saved it died while moving the "
                        f"new files out of {COMMITTING_NAME}, and this process cannot finish the move ({error}). Load "
                        "it once with write permission for the folder."
                    ) from error
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Checkpoint {self.target} was not loaded: {owner} has been moving new files there for "
                    f"{_MOVE_LIMIT:.0f} s. Load it when that save has finished."
                )
            time.sleep(_MOVE_PAUSE)
        return None

    # ---- existing checkpoints

    def is_checkpoint(self) -> bool:
        """Return whether the folder exists. On a disk, only a complete checkpoint gets its final name."""
        return self.target.is_dir()

    def is_occupied(self) -> bool:
        return self.target.exists()

    def unfinished_save(self) -> str | None:
        if self.target.is_dir() and any(self.target.glob(f"{RNG_STATE_NAME}_*.pkl")):
            return None
        return next((str(left) for left in _staging_folders(self.target) if left.is_dir()), None)

    def generation(self) -> Any:
        """Return the identity of the manifest, or a new value each time while a save is moving its files."""
        # Check this before reading the manifest, because a save that finishes in between leaves a new manifest.
        if self.committing.exists():
            return object()
        try:
            manifest = (self.target / MANIFEST_NAME).stat()
        except OSError:
            return self.target.is_dir()
        return manifest.st_dev, manifest.st_ino, manifest.st_size, manifest.st_mtime_ns

    @contextmanager
    def open_for_reading(self, local_rank: int) -> Iterator[ReadLocation]:
        """Read files in place. The ranks on a machine share the work of verifying them."""
        yield ReadLocation(self.target, slice(local_rank, None, world_from_environ().local_size))

    def fetch(self, names: Sequence[str] | None, location: ReadLocation) -> list[str]:
        """Return the names in this rank's share. Nothing is copied, because the files are already on the disk."""
        return list(names or ())[location.share]


# ---- names of staging folders and locks


def _staging_folder(target: Path) -> Path:
    """Return the folder that the checkpoint `target` is written to before it gets its final name.

    If `target` exists, the staging folder is inside it, because `target` must keep its mode, owner and group, may be a
    link or a mount point, and may have a read-only parent. Otherwise, the staging folder is next to `target`, on the
    same file system. Accelerate reads every folder inside ``checkpoints`` as a checkpoint, so an automatically named
    checkpoint is staged one level higher.
    """
    return target / STAGING_SUFFIX if target.is_dir() else _next_to(target)


def _staging_folders(target: Path) -> list[Path]:
    """List all folders that a checkpoint may have been staged in, whether or not its folder existed at the time."""
    return list(dict.fromkeys([target / STAGING_SUFFIX, _hidden(target.parent, target), _next_to(target)]))


def _next_to(target: Path) -> Path:
    automatic = target.parent.name == CHECKPOINTS_FOLDER and is_numbered(target.name)
    return _hidden(target.parent.parent if automatic else target.parent, target)


def _hidden(parent: Path, target: Path) -> Path:
    encoded = os.fsencode(target.name)  # File systems limit names, including suffixes, to 255 bytes.
    stem = target.name if len(encoded) <= _MAX_STEM else hashlib.sha256(encoded).hexdigest()
    return parent / f".{stem}{STAGING_SUFFIX}"


def _lock_of(staging: Path) -> Path:
    return staging.with_name(staging.name.removesuffix(STAGING_SUFFIX) + LOCK_SUFFIX)


def _folder_for_files(staging: Path, target: Path, token: str) -> Path:
    """Return the folder inside a staging folder that becomes the checkpoint.

    The folder already has the checkpoint's final name, because hooks receive its path. The token in the path keeps the
    ranks of an earlier save, which may still be writing, out of the new checkpoint.
    """
    # The root folder has no name.
    name = Path(os.path.normpath(target.absolute())).name or "checkpoint"
    return staging / token / name


# ---- file systems


def _delete(path: Path) -> None:
    """Delete a file, a folder or a link (but not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, if the system supports this."""
    with suppress(OSError):  # Windows and some network file systems cannot open folders.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _folder_size(folder: Path) -> int:
    """Return the size in bytes of a folder that other processes may be changing. Files that disappear are skipped."""
    size = 0
    for path in files_below(folder):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
