"""How a checkpoint gets to its place, complete or not at all: one protocol for file systems and object stores.

1. `Store.open`: one rank claims the place, finishes the commit of a process that ended during step 4, and removes the
   files of a process that ended before step 3.
2. Every rank writes its files to a folder on a disk. `deliver` transfers them to the store, unless the store is that
   disk, and `write_report` reports their sizes and checksums.
3. `commit`, on the rank that opened: the manifest of all files is written, last. What has no manifest is not a
   checkpoint, so a save that ends before this point has changed nothing.
4. If the place had files before, the new ones are in a folder inside it, the journal (``.committing``). They now
   replace the old ones: old files that the new checkpoint lacks are removed, the new ones get their final names, the
   manifest last. If the process ends in between, another one finds the manifest in the journal and finishes.

The ranks exchange messages through files, because a thread must not use collectives while training does.

Stores differ in what they can do. A file system can rename, so files wait under another name until their manifest is
written, and it has locks that show whether a writer is alive (`DiskStore`). An object store cannot rename, but shows a
file only when it is complete: writing the manifest to its final name makes the checkpoint (`ObjectStore`).
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.checkpointing.manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    manifest_json,
    read_manifest,
)
from notebook_accelerate.checkpointing.single_files import write_error, write_text
from notebook_accelerate.errors import CheckpointError

FileRecords = dict[str, FileRecord]
"""Sizes and checksums of files, by path relative to the checkpoint."""


@dataclass(frozen=True)
class ReadLocation:
    """The folder from which one rank reads a checkpoint.

    Attributes:
        folder: A folder on the disk of its machine.
        share: The files, as a slice of the sorted names, that this rank fetches and verifies; the other ranks of its
            machine do the rest.
    """

    folder: Path
    share: slice


class Store(ABC):
    """The place of one checkpoint, as one rank sees it: a folder on a disk, or one that fsspec reaches by URL.

    A save calls `open` (one rank per place), `can_see` (all ranks), then per rank `deliver` and `write_report`, then
    `commit` on the rank that called `open`.

    Args:
        target: Folder of the checkpoint.
    """

    poll_interval: float
    """Seconds between two checks for another rank's report."""
    target: AnyPath
    """The folder of the checkpoint."""
    journal: AnyPath
    """The folder inside it whose files replace the old ones during a commit."""
    folder: Path
    """Where this rank writes its files, on a disk; set by `can_see`."""
    delivered: AnyPath
    """Where delivered files are until they are published; set by `can_see`."""
    messages: AnyPath
    """Where the ranks' reports are; set by the constructor or by `can_see`."""

    def __init__(self, target: AnyPath) -> None:
        self.target = target
        self.journal = target / JOURNAL_NAME

    # ---- saving

    def open(self, token: str) -> None:
        """Prepare the place for a new checkpoint, and remove what an ended process left behind.

        Args:
            token: A unique name; a rank that sees it sees this place.

        Raises:
            CheckpointError: Another process is saving here, or the place cannot be written to.
        """
        self._claim()
        self._finish_journal()
        self._remove_unfinished()
        self._make_room(token)

    @abstractmethod
    def can_see(self, token: str) -> bool:
        """Return whether this rank sees what the main rank opened, and set `folder` and `delivered`.

        Args:
            token: The main rank's argument of `open`.

        Raises:
            CheckpointError: It does not, and the kind of store requires it.
        """

    @abstractmethod
    def sync(self, path: Path) -> None:
        """Flush a file in the folder to the disk, if the checkpoint's durability depends on that disk.

        Args:
            path: The file.
        """

    def deliver(self, rank: int, records: FileRecords) -> FileRecords:
        """Transfer this rank's files to the place.

        Args:
            rank: This rank.
            records: Records of its files that are known already; hooks and strategies may have written more files.

        Returns:
            Records of all files that this rank delivered.
        """
        return records

    def write_report(self, rank: int, content: dict[str, Any]) -> None:
        """Report this rank's success or failure to the committing rank.

        Args:
            rank: This rank.
            content: JSON-serializable.
        """
        write_text(self._report(rank), json.dumps(content))

    def read_report(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's report, or None while there is none.

        Args:
            rank: The rank.
        """
        content = read_message(self._report(rank))
        return content if isinstance(content, dict) else None

    def _report(self, rank: int) -> AnyPath:
        return self.messages / f"rank_{rank}.json"

    @abstractmethod
    def activity(self, rank: int) -> Any:
        """Return a value that changes while a rank is working; None if the place no longer exists.

        Args:
            rank: The rank.
        """

    def commit(self, manifest: Manifest, parts: Sequence[FileRecords]) -> None:
        """Make the delivered files the checkpoint.

        Args:
            manifest: The manifest; its `files` are filled in here.
            parts: The records that the ranks delivered.

        Raises:
            CheckpointError: The place is no longer this process's.
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
                if records.setdefault(name, record) != record:  # hooks on several ranks wrote it: the last one is there
                    records[name] = self._stored_record(name)
        return records

    def _finish_journal(self) -> None:
        """Replace the old files with the ones in a complete journal; idempotent.

        Only the process that has claimed the place may call this.

        Raises:
            BrokenCheckpointError: The journal is a link, or its manifest cannot be read.
        """
        if not self._has_journal():
            return
        if (new := read_manifest(self.journal)) is not None:  # moved last: without it, only the folder is left
            self._remove(self._old_entries() - {self._entry_of(name) for name in new.files})
            self._take_from_journal(self._journal_entries(new))
            self._take_from_journal([MANIFEST_NAME])
        self._remove_journal()

    def _old_entries(self) -> set[str]:
        """Return what the previous checkpoint in this folder consists of; the user's own files are not part of it."""
        try:
            old = read_manifest(self.target)
        except CheckpointError:
            return set()
        return set() if old is None else {self._entry_of(name) for name in old.files}

    @abstractmethod
    def discard(self, opened: bool, delivering: bool = True) -> None:
        """Give up a save on this rank.

        Args:
            opened: Whether this rank called `open`.
            delivering: Whether any rank may have started to deliver files.
        """

    @abstractmethod
    def remove_checkpoints(self, surplus: Sequence[Any]) -> None:
        """Remove numbered checkpoints of this one's project, and the remains of interrupted removals.

        Args:
            surplus: Their folders.
        """

    def write_error(self, error: BaseException) -> CheckpointError:
        """Return the error for a checkpoint that could not be written.

        Args:
            error: The original error.
        """
        return error if isinstance(error, CheckpointError) else write_error(self.folder, error)

    # ---- what a save needs of each kind of store

    @abstractmethod
    def _claim(self) -> None:
        """Make the place this process's; raise if another process that is alive is saving there."""

    @abstractmethod
    def _check_claim(self) -> None:
        """Raise if the place is no longer this process's."""

    @abstractmethod
    def _release(self) -> None:
        """Remove the messages of the ranks, and give up the claim."""

    @abstractmethod
    def _remove_unfinished(self) -> None:
        """Remove the files of unfinished saves; other files in the folder are the user's."""

    @abstractmethod
    def _make_room(self, token: str) -> None:
        """Create what `can_see` looks for, and decide where the new files go."""

    @abstractmethod
    def _stored_record(self, name: str) -> FileRecord:
        """Return the size and checksum of a delivered file."""

    @abstractmethod
    def _publish(self) -> None:
        """Make files that have a manifest the checkpoint; those in a journal replace the old ones."""

    @abstractmethod
    def _has_journal(self) -> bool:
        """Return whether there is a journal whose manifest was written."""

    def _entry_of(self, name: str) -> str:
        """Return the entry of the checkpoint's folder that is removed or replaced when this file is."""
        return name

    def _journal_entries(self, new: Manifest) -> list[str]:
        """List the entries of the journal that do not have their final names yet, without the manifest."""
        return sorted(new.files)

    @abstractmethod
    def _take_from_journal(self, entries: Sequence[str]) -> None:
        """Give entries of the journal their final names, in place of old ones."""

    @abstractmethod
    def _remove_journal(self) -> None:
        """Remove what is left of the journal."""

    @abstractmethod
    def _remove(self, entries: Collection[str]) -> None:
        """Remove entries of the checkpoint; missing ones are ignored."""

    # ---- existing checkpoints

    @abstractmethod
    def is_checkpoint(self) -> bool:
        """Return whether the folder, which has the name of a checkpoint, contains one."""

    @abstractmethod
    def is_occupied(self) -> bool:
        """Return whether something exists that a new checkpoint of this name would change."""

    @abstractmethod
    def unfinished_save(self) -> str | None:
        """Return the location of an unfinished save if it is the reason that there is no checkpoint here."""

    @abstractmethod
    def finish_commit(self) -> None:
        """Finish the commit of a process that ended in the middle of it, if files cannot be read before that.

        The first rank of each machine calls this before a load.
        """

    @abstractmethod
    def generation(self) -> Any:
        """Return a value that another save to this folder changes, never None.

        If the value is the same before and after reading, everything that was read belongs to one save.
        """

    def source(self) -> AnyPath:
        """Return the folder that holds the files of the newest complete save, as `generation` found it."""
        return self.target

    @abstractmethod
    def open_for_reading(self, local_rank: int) -> contextlib.AbstractContextManager[ReadLocation]:
        """Provide a folder on the disk for the files; every rank must call this.

        Args:
            local_rank: Index of this rank on its machine.
        """

    @abstractmethod
    def fetch(self, names: Sequence[str] | None, location: ReadLocation) -> list[str]:
        """Copy this rank's share of the files to the disk, unless they are on it already.

        Args:
            names: The files of the checkpoint, sorted; None: all that exist.
            location: The destination.

        Returns:
            The names of the files in this rank's share.
        """


def read_message(path: AnyPath) -> Any:
    """Return the content of a rank's message; None if it is missing, or incomplete (a store may be a file system).

    Args:
        path: The file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
