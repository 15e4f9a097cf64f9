"""The protocol that commits a checkpoint completely or not at all, to a file system or to an object store.

1. `CheckpointStore.open`: one rank claims the destination. If an earlier process died during step 4, the rank finishes
   that commit. If it died before step 3 was complete, the rank removes that process's files.
2. Every rank writes its files to a folder on a disk. `deliver` transfers them to the store, unless the store is this
   disk, and `write_report` reports their sizes and checksums.
3. `commit`, on the rank that called `open`: the manifest of all files is written last. A folder without a manifest is
   not a checkpoint, so a save that fails before this point has changed nothing.
4. If the destination already had files, the new ones are in a folder inside it, ``.committing``. They now replace the
   old files: those that the new checkpoint does not have are removed, and then the new files get their final names, the
   manifest last. If the process dies during this step, another process finds the manifest in ``.committing``, and
   completes the step.

Ranks exchange messages through files, because a thread must not use collectives while training uses them.

The two kinds of stores have different abilities. A file system can rename files, so the files have other names until
their manifest is written, and its locks show whether a writer is alive (`DiskStore`). An object store cannot rename
files, but a file becomes visible only when it is complete, so writing the manifest under its final name creates the
checkpoint (`ObjectStore`).
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebook_accelerate.checkpointing.manifest import (
    COMMITTING_NAME,
    FileRecord,
    Manifest,
    manifest_json,
    read_manifest,
)
from notebook_accelerate.checkpointing.single_files import write_error, write_text
from notebook_accelerate.config.constants import MANIFEST_NAME
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.files.remote_paths import AnyPath

FileRecords = dict[str, FileRecord]
"""The sizes and checksums of files, by path relative to the checkpoint."""


@dataclass(frozen=True)
class ReadLocation:
    """The folder that one rank reads a checkpoint from.

    Attributes:
        folder: A folder on the disk of the rank's machine.
        share: The slice of the sorted file names that this rank fetches and verifies. The other ranks on its machine
            handle the remaining files.
    """

    folder: Path
    share: slice


class CheckpointStore(ABC):
    """The destination of a checkpoint, as seen by one rank: a folder on a disk, or a folder that fsspec reaches by URL.

    A save calls `open` on one rank per destination, `can_see` on all ranks, `deliver` and `write_report` on each rank,
    and `commit` on the rank that called `open`.

    Args:
        target: The folder of the checkpoint.
    """

    poll_interval: float
    """Seconds to wait between two checks for another rank's report."""
    target: AnyPath
    """The folder of the checkpoint."""
    committing: AnyPath
    """The folder inside `target` whose files replace the old ones during a commit."""
    folder: Path
    """The folder on a disk that this rank writes its files to. `can_see` sets it."""
    delivered: AnyPath
    """The folder that holds delivered files until they are published. `can_see` sets it."""
    messages: AnyPath
    """The folder of the ranks' reports. The constructor or `can_see` sets it."""

    def __init__(self, target: AnyPath) -> None:
        self.target = target
        self.committing = target / COMMITTING_NAME

    # ---- saving

    def open(self, token: str) -> None:
        """Prepare the destination for a new checkpoint, and remove files that a dead process has left behind.

        Args:
            token: A unique name. All ranks that see this name see the same destination.

        Raises:
            CheckpointError: Another process is saving here, or the destination cannot be written to.
        """
        self._claim()
        self._replace_old_files()
        self._remove_unfinished()
        self._make_room(token)

    @abstractmethod
    def can_see(self, token: str) -> bool:
        """Return whether this rank sees the destination that the main rank has opened. Set `folder` and `delivered`.

        Args:
            token: The name that the main rank passed to `open`.

        Raises:
            CheckpointError: The rank does not see the destination, even though this kind of store requires it.
        """

    @abstractmethod
    def sync(self, path: Path) -> None:
        """Flush a file in the folder to the disk, if the checkpoint's durability depends on this.

        Args:
            path: The file to flush.
        """

    def deliver(self, rank: int, records: FileRecords) -> FileRecords:
        """Transfer this rank's files to the destination.

        Args:
            rank: This process's rank.
            records: The records of this rank's files, as far as they are known. Hooks and strategies may have written
                further files.

        Returns:
            The records of all files that this rank has delivered.
        """
        return records

    def write_report(self, rank: int, content: dict[str, Any]) -> None:
        """Report to the committing rank whether this rank has succeeded or failed.

        Args:
            rank: This process's rank.
            content: The report, which must be JSON-serializable.
        """
        write_text(self._report(rank), json.dumps(content))

    def read_report(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's report, or None if the rank has not reported yet.

        Args:
            rank: The rank that reports.
        """
        content = read_message(self._report(rank))
        return content if isinstance(content, dict) else None

    def _report(self, rank: int) -> AnyPath:
        return self.messages / f"rank_{rank}.json"

    @abstractmethod
    def activity(self, rank: int) -> Any:
        """Return a value that changes while a rank is working, or None if the destination no longer exists.

        Args:
            rank: The rank to check.
        """

    def commit(self, manifest: Manifest, parts: Sequence[FileRecords]) -> None:
        """Turn the delivered files into the checkpoint.

        Args:
            manifest: The manifest, whose `files` are filled in here.
            parts: The records of the files that the ranks delivered.

        Raises:
            CheckpointError: This process no longer owns the destination.
        """
        manifest.files.update(self._all_records(parts))
        self._check_claim()
        write_text(self.delivered / MANIFEST_NAME, manifest_json(manifest))
        self._publish()
        self._release()

    def _all_records(self, parts: Iterable[FileRecords]) -> FileRecords:
        records: FileRecords = {}
        for part in parts:
            for name, record in part.items():
                if records.setdefault(name, record) != record:
                    # Hooks on several ranks have written this file, so use the record of the version that was stored
                    # last.
                    records[name] = self._stored_record(name)
        return records

    def _replace_old_files(self) -> None:
        """Replace the old files with those in ``.committing`` if these are complete. It is safe to repeat this.

        Only the process that has claimed the destination may call this.

        Raises:
            BrokenCheckpointError: ``.committing`` is a link, or its manifest cannot be read.
        """
        if not self._is_committing():
            return
        # The manifest is moved last. If it is not here, only the folder remains to be removed.
        if (new := read_manifest(self.committing)) is not None:
            self._remove(self._old_entries() - {self._entry_of(name) for name in new.files})
            self._move_to_target(self._committing_entries(new))
            self._move_to_target([MANIFEST_NAME])
        self._remove_committing()

    def _old_entries(self) -> set[str]:
        """Return the entries of this folder that belong to the previous checkpoint, but not the user's own files."""
        try:
            old = read_manifest(self.target)
        except CheckpointError:
            return set()
        return set() if old is None else {self._entry_of(name) for name in old.files}

    @abstractmethod
    def discard(self, opened: bool, delivering: bool = True) -> None:
        """Abandon a save on this rank.

        Args:
            opened: Whether this rank called `open`.
            delivering: Whether any rank may have started delivering files.
        """

    @abstractmethod
    def remove_checkpoints(self, surplus: Sequence[Any]) -> None:
        """Remove numbered checkpoints of the same project, and anything left by interrupted removals.

        Args:
            surplus: The folders of the checkpoints to remove.
        """

    def write_error(self, error: BaseException) -> CheckpointError:
        """Return the error for a checkpoint that could not be written.

        Args:
            error: The error that was raised while writing.
        """
        return error if isinstance(error, CheckpointError) else write_error(self.folder, error)

    # ---- steps of a save that differ between stores

    @abstractmethod
    def _claim(self) -> None:
        """Claim the destination for this process, or raise if another live process is saving to it."""

    @abstractmethod
    def _check_claim(self) -> None:
        """Raise if this process no longer owns the destination."""

    @abstractmethod
    def _release(self) -> None:
        """Remove the ranks' messages, and give up the claim."""

    @abstractmethod
    def _remove_unfinished(self) -> None:
        """Remove the files of unfinished saves, but not the user's files in the folder."""

    @abstractmethod
    def _make_room(self, token: str) -> None:
        """Choose where new files are written, and store the information that `can_see` needs."""

    @abstractmethod
    def _stored_record(self, name: str) -> FileRecord:
        """Return the size and checksum of a delivered file."""

    @abstractmethod
    def _publish(self) -> None:
        """Turn files with a manifest into the checkpoint. Files in ``.committing`` replace the old ones."""

    @abstractmethod
    def _is_committing(self) -> bool:
        """Return whether ``.committing`` exists, which means that a commit has not replaced all old files yet."""

    def _entry_of(self, name: str) -> str:
        """Return the entry of the checkpoint's folder to remove or replace for a file: by default, the file itself."""
        return name

    def _committing_entries(self, new: Manifest) -> list[str]:
        """List the entries of ``.committing`` that do not have their final names yet, except the manifest."""
        return sorted(new.files)

    @abstractmethod
    def _move_to_target(self, entries: Sequence[str]) -> None:
        """Move entries of ``.committing`` to their final names, replacing old entries."""

    @abstractmethod
    def _remove_committing(self) -> None:
        """Remove everything that is left in ``.committing``."""

    @abstractmethod
    def _remove(self, entries: Collection[str]) -> None:
        """Remove entries of the checkpoint, ignoring missing ones."""

    # ---- existing checkpoints

    @abstractmethod
    def is_checkpoint(self) -> bool:
        """Return whether the folder, which has a checkpoint's name, contains a checkpoint."""

    @abstractmethod
    def is_occupied(self) -> bool:
        """Return whether a new checkpoint with this name would change anything that already exists."""

    @abstractmethod
    def unfinished_save(self) -> str | None:
        """Return the location of an unfinished save if this is why there is no checkpoint here, otherwise None."""

    @abstractmethod
    def finish_commit(self) -> None:
        """Finish the commit of a process that died while committing, if the files cannot be read otherwise.

        The first rank of each machine calls this before a load.
        """

    @abstractmethod
    def generation(self) -> Any:
        """Return a value, never None, that changes with each save to this folder.

        If the value is the same before and after files are read, all of them belong to the same save.
        """

    def source(self) -> AnyPath:
        """Return the folder that contains the files of the newest complete save, which `generation` has found."""
        return self.target

    @abstractmethod
    def open_for_reading(self, local_rank: int) -> contextlib.AbstractContextManager[ReadLocation]:
        """Provide a folder on a disk that has the files, or that `fetch` copies them to; every rank must call this.

        Args:
            local_rank: The index of this rank on its machine.
        """

    @abstractmethod
    def fetch(self, names: Sequence[str] | None, location: ReadLocation) -> list[str]:
        """Copy this rank's share of the files to the disk, unless they are already there.

        Args:
            names: The files of the checkpoint in sorted order. If None, all existing files are copied.
            location: The folder to copy to, and this rank's share.

        Returns:
            The names of the files in this rank's share.
        """


def read_message(path: AnyPath) -> Any:
    """Return the content of a rank's message, or None if it is missing or incomplete.

    Messages can be incomplete if the store behind the URL is a file system.

    Args:
        path: The file that contains the message.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
