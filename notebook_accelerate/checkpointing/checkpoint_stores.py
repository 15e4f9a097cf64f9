"""`Store`, the interface to the place of a checkpoint: a folder on a disk, or one that fsspec reaches by URL."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.checkpointing import staging
from notebook_accelerate.checkpointing.checkpoint_layout import FileRecord, Manifest
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
    """The place of one checkpoint, as one rank sees it.

    A save calls `open` (one rank per place), `can_see` and `prepare_folder` (all ranks), then per rank `deliver` and
    `write_report`, then `commit` on the rank that called `open`.

    Attributes:
        poll_interval: Seconds between two checks for another rank's report.
        folder: Where this rank writes its files, on a disk; set by `prepare_folder` at the latest.
    """

    poll_interval: float
    folder: Path

    # -- existing checkpoints -----------------------------------------------------------------------------------------

    @abstractmethod
    def is_checkpoint(self) -> bool:
        """Tell whether the folder, which has the name of a checkpoint, contains one."""

    @abstractmethod
    def is_occupied(self) -> bool:
        """Tell whether something exists that a new checkpoint of this name would change."""

    @abstractmethod
    def unfinished_save(self) -> str | None:
        """Return the location of an unfinished save if it is the reason that there is no checkpoint here."""

    @abstractmethod
    def finish_commit(self, main: bool, local_main: bool) -> None:
        """Finish moving new files over old ones after a process ended in the middle of it.

        Args:
            main: Whether this is the main rank.
            local_main: Whether this is the first rank of its machine.
        """

    @abstractmethod
    def generation(self) -> Any:
        """Return a value that another save to this folder changes, never None.

        Equal values before and after reading show that all that was read is of one save.
        """

    @abstractmethod
    def source(self) -> AnyPath:
        """Return the folder that holds the files of the newest complete save, as `generation` found it."""

    # -- saving -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, token: str) -> None:
        """Prepare the place for a new checkpoint, and remove what an ended process left behind.

        Args:
            token: A unique name; a rank that sees it sees this place.

        Raises:
            CheckpointError: The place cannot be written to.
        """

    @abstractmethod
    def can_see(self, token: str) -> bool:
        """Tell whether this rank sees what the main rank opened.

        Args:
            token: The main rank's argument of `open`.

        Raises:
            CheckpointError: It does not, and the kind of store requires it.
        """

    @abstractmethod
    def prepare_folder(self) -> None:
        """Prepare this rank's folder; called after every rank has called `can_see`."""

    @abstractmethod
    def sync(self, path: Path) -> None:
        """Flush a file in the folder to the disk, if the checkpoint's durability depends on that disk.

        Args:
            path: The file.
        """

    @abstractmethod
    def deliver(self, rank: int, records: FileRecords) -> FileRecords:
        """Transfer this rank's files to the place.

        Args:
            rank: This rank.
            records: Records of its files that are known already; hooks and strategies may have written more files.

        Returns:
            Records of all files that this rank delivered.
        """

    @abstractmethod
    def write_report(self, rank: int, content: dict[str, Any]) -> None:
        """Report this rank's success or failure to the committing rank.

        Args:
            rank: This rank.
            content: JSON-serializable.
        """

    @abstractmethod
    def read_report(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's report, or None while there is none.

        Args:
            rank: The rank.
        """

    @abstractmethod
    def activity(self, rank: int) -> Any:
        """Return a value that changes while a rank is working; None if the place no longer exists.

        Args:
            rank: The rank.
        """

    @abstractmethod
    def commit(self, manifest: Manifest, parts: Sequence[FileRecords]) -> None:
        """Make the checkpoint visible, all files at once.

        Args:
            manifest: The manifest; its `files` are filled in here.
            parts: The records that the ranks delivered.
        """

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
        return error if isinstance(error, CheckpointError) else staging.write_error(self.folder, error)

    # -- loading ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open_for_reading(self, local_rank: int) -> contextlib.AbstractContextManager[ReadLocation]:
        """Provide a folder on the disk for the files; every rank must call this.

        Args:
            local_rank: Index of this rank on its machine.
        """

    @abstractmethod
    def fetch(self, names: Sequence[str] | None, location: ReadLocation) -> list[str]:
        """Copy this rank's share of the files to the disk, where they are not there already.

        Args:
            names: The files of the checkpoint, sorted; None: all that exist.
            location: The destination.

        Returns:
            The names of the files in this rank's share.
        """


def store_for(target: AnyPath) -> Store:
    """Return the store of a checkpoint.

    Args:
        target: Folder of the checkpoint.
    """
    if isinstance(target, Path):
        from notebook_accelerate.checkpointing.disk_store import DiskStore

        return DiskStore(target)
    from notebook_accelerate.checkpointing.object_store import ObjectStore

    return ObjectStore(target)
