"""A checkpoint on a file system, written in a staging folder and renamed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from notebook_accelerate.checkpointing import checkpoint_layout, staging
from notebook_accelerate.checkpointing.checkpoint_layout import Manifest, files_below, make_record, manifest_json
from notebook_accelerate.checkpointing.checkpoint_stores import FileRecords, ReadLocation, Store
from notebook_accelerate.checkpointing.save_lock import SaveLock
from notebook_accelerate.config import constants
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state.world import world_from_environ


class DiskStore(Store):
    """A folder on a file system; the ranks that share it write into one staging folder.

    Args:
        target: Folder of the checkpoint.
    """

    poll_interval = 0.01

    def __init__(self, target: Path) -> None:
        self.target = target
        self._lock: SaveLock | None = None

    def is_checkpoint(self) -> bool:
        """See `Store.is_checkpoint`; on a disk only a complete checkpoint gets its name."""
        return self.target.is_dir()

    def is_occupied(self) -> bool:
        """See `Store.is_occupied`."""
        return self.target.exists()

    def unfinished_save(self) -> str | None:
        """See `Store.unfinished_save`."""
        if self.target.is_dir() and any(self.target.glob(f"{constants.RNG_STATE_NAME}_*.pkl")):
            return None
        left = checkpoint_layout.unfinished_staging(self.target)
        return None if left is None else str(left)

    def finish_commit(self, main: bool, local_main: bool) -> None:
        """See `Store.finish_commit`; the first rank of each machine does it."""
        if local_main:
            staging.finish_abandoned_journal(self.target)

    def generation(self) -> Any:
        """See `Store.generation`; another value each time while a save is moving its files."""
        if (self.target / checkpoint_layout.JOURNAL_NAME).exists():  # first: a save that ended since has a new manifest
            return object()
        try:
            manifest = (self.target / checkpoint_layout.MANIFEST_NAME).stat()
        except OSError:
            return self.target.is_dir()
        return manifest.st_dev, manifest.st_ino, manifest.st_size, manifest.st_mtime_ns

    def source(self) -> Path:
        """See `Store.source`."""
        return self.target

    def open(self, token: str) -> None:
        """See `Store.open`; locks the folder and creates an empty staging folder."""
        try:
            self.folder, self._lock = staging.open_staging(self.target, token)
        except OSError as error:
            raise staging.write_error(self.target, error) from error

    def can_see(self, token: str) -> bool:
        """See `Store.can_see`; False on a machine with a disk of its own."""
        if self._lock is None:
            place = checkpoint_layout.staging_folder(self.target)
            self.folder = checkpoint_layout.folder_for_files(place, self.target, token)
        return self.folder.is_dir()

    def prepare_folder(self) -> None:
        """See `Store.prepare_folder`; ranks write into the staging folder, which `open` has created."""

    def sync(self, path: Path) -> None:
        """See `Store.sync`."""
        staging.sync_file(path)

    def deliver(self, rank: int, records: FileRecords) -> FileRecords:
        """See `Store.deliver`; the files are in the staging folder already."""
        return records

    def _report_file(self, rank: int) -> Path:
        return self.folder / f".rank_{rank}.json"

    def write_report(self, rank: int, content: dict[str, Any]) -> None:
        """See `Store.write_report`; an error that cannot be written is reported by removing the staging folder."""
        report = self._report_file(rank)
        temporary = report.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            temporary.replace(report)
        except OSError:
            if "error" not in content:
                raise
            staging.discard(self.folder)

    def read_report(self, rank: int) -> dict[str, Any] | None:
        """See `Store.read_report`; a report is removed once read."""
        report = self._report_file(rank)
        if not report.exists():
            return None
        content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        report.unlink()
        return content

    def activity(self, rank: int) -> Any:
        """See `Store.activity`; returns the number of bytes in the staging folder."""
        return folder_size(self.folder) if self.folder.is_dir() else None

    def commit(self, manifest: Manifest, parts: Sequence[FileRecords]) -> None:
        """See `Store.commit`; writes the manifest and renames the folder."""
        for part in parts:
            manifest.files.update(part)
        for path in files_below(self.folder):  # hooks and the strategy may have written files without records
            name = path.relative_to(self.folder).as_posix()
            if name not in manifest.files:
                manifest.files[name] = make_record(path)
                staging.sync_file(path)
        path = self.folder / checkpoint_layout.MANIFEST_NAME
        path.write_text(manifest_json(manifest), encoding="utf-8")
        staging.sync_file(path)
        assert self._lock is not None
        staging.commit(self.folder, self.target, self._lock)

    def discard(self, opened: bool, delivering: bool = True) -> None:
        """See `Store.discard`; the rank that created the staging folder removes it and its lock."""
        if opened and self._lock is not None:
            if self._lock.is_held():
                staging.discard(self.folder.parent.parent)
            self._lock.release()

    def remove_checkpoints(self, surplus: Sequence[Any]) -> None:
        """See `Store.remove_checkpoints`."""
        staging.remove_numbered(self.target.parent.parent, surplus)

    def write_error(self, error: BaseException) -> CheckpointError:
        """See `Store.write_error`."""
        return error if isinstance(error, CheckpointError) else staging.write_error(self.target, error)

    @contextmanager
    def open_for_reading(self, local_rank: int) -> Iterator[ReadLocation]:
        """See `Store.open_for_reading`; files are read in place, and the ranks of a machine divide the verification."""
        yield ReadLocation(self.target, slice(local_rank, None, world_from_environ().local_size))

    def fetch(self, names: Sequence[str] | None, location: ReadLocation) -> list[str]:
        """See `Store.fetch`; the files are on the disk already."""
        return list(names or ())[location.share]


def folder_size(folder: Path) -> int:
    """Return the bytes in a folder that other processes write to; a file that was renamed after listing is skipped.

    Args:
        folder: The folder.
    """
    size = 0
    for path in files_below(folder):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
