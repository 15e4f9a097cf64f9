"""Where a checkpoint is: on a disk, or in a store that fsspec reaches. What differs between them is behind `Store`."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebook_accelerate.big_modeling import temporary_folders
from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.checkpointing import checkpoint_layout, staging
from notebook_accelerate.checkpointing.manifest import FileRecord, Manifest, files_below, record_of, write_manifest
from notebook_accelerate.config import constants
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state.world import world_from_environ

_PARTIAL = ".partial"
Records = dict[str, FileRecord]
"""Sizes and checksums of files, by path relative to the checkpoint."""


@dataclass(frozen=True)
class Reading:
    """From where one rank reads a checkpoint.

    Attributes:
        folder: A folder on the disk of its machine.
        share: Which of the files, sorted, it fetches and checks; the other ranks of its machine do the rest.
    """

    folder: Path
    share: slice


class Store(ABC):
    """One checkpoint's place, as one rank sees it.

    A save goes through `open` (one rank per place), `sees` and `begin` (all ranks), then per rank `deliver` and
    `report`, then `commit` by the rank that has opened.

    Attributes:
        pause: Seconds between two looks for another rank's report.
        folder: Where this rank writes its files, on a disk, from `begin` on.
    """

    pause: float
    folder: Path

    # -- what is there ------------------------------------------------------------------------------------------------

    @abstractmethod
    def is_checkpoint(self) -> bool:
        """Tell whether a folder with the name of a checkpoint is one."""

    @abstractmethod
    def is_taken(self) -> bool:
        """Tell whether there is something that a new checkpoint of this name would change."""

    @abstractmethod
    def unfinished(self) -> str | None:
        """Return where an unfinished save is, if that is why there is no checkpoint here."""

    @abstractmethod
    def finish(self, main: bool, first: bool) -> None:
        """Finish moving new files over old ones, where a process ended on the way.

        Args:
            main: Whether this is the main rank.
            first: Whether it is the first one of its machine.
        """

    # -- saving -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, token: str) -> None:
        """Make room for a new checkpoint, in place of what an ended process left behind.

        Args:
            token: A name that nothing has; whoever sees it sees this place.

        Raises:
            CheckpointError: The place cannot be written to.
        """

    @abstractmethod
    def sees(self, token: str) -> bool:
        """Tell whether this rank sees what the main one has opened.

        Args:
            token: What the main rank gave `open`.

        Raises:
            CheckpointError: It does not, and should.
        """

    @abstractmethod
    def begin(self) -> None:
        """Give this rank its folder to write to, once every rank has looked at the place."""

    @abstractmethod
    def flush(self, path: Path) -> None:
        """Wait until a file in the folder would outlive the machine, where that is up to its disk.

        Args:
            path: The file.
        """

    @abstractmethod
    def deliver(self, rank: int, records: Records) -> Records:
        """Bring this rank's files to the place.

        Args:
            rank: This rank.
            records: Those of its files whose checksums are known; hooks and strategies may have written more.

        Returns:
            All that this rank has brought.
        """

    @abstractmethod
    def report(self, rank: int, content: dict[str, Any]) -> None:
        """Tell the committing rank how it went.

        Args:
            rank: This rank.
            content: What JSON can hold.
        """

    @abstractmethod
    def reported(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's report, or None as long as there is none.

        Args:
            rank: The rank.
        """

    @abstractmethod
    def activity(self, rank: int) -> Any:
        """Return something that changes as long as a rank is at work; None where the place is gone.

        Args:
            rank: The rank.
        """

    @abstractmethod
    def commit(self, manifest: Manifest, parts: Sequence[Records]) -> None:
        """Make the checkpoint, all of it at once.

        Args:
            manifest: What to write; its files are filled in here.
            parts: What the ranks have brought.
        """

    @abstractmethod
    def discard(self, opened: bool, begun: bool = True) -> None:
        """Give up a save on this rank.

        Args:
            opened: Whether this rank has opened the place.
            begun: Whether any rank has begun to bring files.
        """

    @abstractmethod
    def prune(self, surplus: Sequence[Any]) -> None:
        """Remove numbered checkpoints, and what is left of others in the project of this one.

        Args:
            surplus: Their folders.
        """

    def explain(self, error: BaseException) -> CheckpointError:
        """Explain why the checkpoint could not be written.

        Args:
            error: What was raised.
        """
        return error if isinstance(error, CheckpointError) else staging.write_error(self.folder, error)

    # -- loading ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def reading(self, local_rank: int) -> contextlib.AbstractContextManager[Reading]:
        """Give a folder on the disk for the files; every rank must call this.

        Args:
            local_rank: Index of this rank on its machine.
        """

    @abstractmethod
    def fetch(self, names: Sequence[str] | None, reading: Reading) -> list[str]:
        """Bring this rank's share of the files to the disk.

        Args:
            names: The files of the checkpoint, sorted; None: whatever is there.
            reading: Where to.

        Returns:
            The names of the files in this rank's share.
        """


class DiskStore(Store):
    """A folder on a file system: written beside its place, or inside it, and renamed.

    Args:
        target: Folder of the checkpoint.
    """

    pause = 0.01
    _report = ".rank_{rank}.json"

    def __init__(self, target: Path) -> None:
        self.target = target
        self._token: Path | None = None

    def is_checkpoint(self) -> bool:
        """Tell whether a folder with the name of a checkpoint is one: here it got its name when it was whole."""
        return True

    def is_taken(self) -> bool:
        """Tell whether there is something that a new checkpoint of this name would change."""
        return self.target.exists()

    def unfinished(self) -> str | None:
        """Return where an unfinished save is, if that is why there is no checkpoint here."""
        left = checkpoint_layout.unfinished(self.target)
        if self.target.is_dir() and any(self.target.glob(f"{constants.RNG_STATE_NAME}_*.pkl")):
            return None
        return None if left is None else str(left)

    def finish(self, main: bool, first: bool) -> None:
        """Finish moving new files over old ones, on the first rank of the machine."""
        if first:
            staging.finish_journal(self.target)

    def open(self, token: str) -> None:
        """Make an empty staging folder."""
        try:
            self.folder = staging.open_staging(self.target)
            self._token = self.folder / token
            self._token.touch()
        except OSError as error:
            raise staging.write_error(self.target, error) from error

    def sees(self, token: str) -> bool:
        """Tell whether this rank's disk is the main rank's."""
        self.folder = checkpoint_layout.staging_folder(self.target)
        return (self.folder / token).exists()

    def begin(self) -> None:
        """Write into the staging folder."""
        if self._token is not None:
            self._token.unlink()

    def flush(self, path: Path) -> None:
        """Wait until a file's bytes are on the disk."""
        staging.sync_file(path)

    def deliver(self, rank: int, records: Records) -> Records:
        """Leave everything where it is: the folder is one with the other ranks'."""
        return records

    def report(self, rank: int, content: dict[str, Any]) -> None:
        """Tell the committing rank how it went; where even that cannot be written, by removing the staging folder."""
        report = self.folder / self._report.format(rank=rank)
        temporary = report.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            temporary.replace(report)
        except OSError:
            if "error" not in content:
                raise
            staging.discard(self.folder)

    def reported(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's report and remove it, or None as long as there is none."""
        report = self.folder / self._report.format(rank=rank)
        if not report.exists():
            return None
        content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        report.unlink()
        return content

    def activity(self, rank: int) -> Any:
        """Return the bytes in the staging folder."""
        return size_of(self.folder) if self.folder.is_dir() else None

    def commit(self, manifest: Manifest, parts: Sequence[Records]) -> None:
        """Write the manifest and rename."""
        for part in parts:
            manifest.files.update(part)
        for path in files_below(self.folder):  # written by hooks and by the strategy
            name = path.relative_to(self.folder).as_posix()
            if name not in manifest.files:
                manifest.files[name] = record_of(path)
                staging.sync_file(path)
        write_manifest(self.folder, manifest)
        staging.commit(self.folder, self.target)

    def discard(self, opened: bool, begun: bool = True) -> None:
        """Remove the staging folder, on the rank that has made it."""
        if opened:
            staging.discard(self.folder)

    def prune(self, surplus: Sequence[Any]) -> None:
        """Remove checkpoints; each is renamed first, so that what an ended process leaves is none."""
        staging.remove_numbered(self.target.parent.parent, surplus)

    def explain(self, error: BaseException) -> CheckpointError:
        """Explain why the checkpoint could not be written."""
        return error if isinstance(error, CheckpointError) else staging.write_error(self.target, error)

    @contextmanager
    def reading(self, local_rank: int) -> Iterator[Reading]:
        """Read the files where they are; the ranks of a machine divide the checking."""
        yield Reading(self.target, slice(local_rank, None, world_from_environ().local_size))

    def fetch(self, names: Sequence[str] | None, reading: Reading) -> list[str]:
        """Leave everything where it is."""
        return list(names or ())[reading.share]


def size_of(folder: Path) -> int:
    """Return the bytes in a folder that others write to: a file may have got another name since it was listed.

    Args:
        folder: The folder.
    """
    size = 0
    for path in files_below(folder):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """Give a file on the disk to write to; it takes its place when the context ends, and never where that fails.

    Args:
        path: The place.

    Raises:
        CheckpointError: The file could not be written, or not be brought there.
    """
    if not isinstance(path, Path):
        with temporary_folders.scratch() as folder:
            with _explained(folder):
                yield folder / path.name
            path.upload(folder / path.name)
        return
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with _explained(path):
            yield partial
            staging.sync_file(partial)
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, AttributeError, TypeError):  # the object's fault, not the disk's
        raise
    except Exception as error:
        raise staging.write_error(path, error) from error


@contextmanager
def on_disk(path: AnyPath) -> Iterator[Path]:
    """Give a file on the disk to read, for the time of the context.

    Args:
        path: The file.
    """
    if isinstance(path, Path):
        yield path
        return
    with temporary_folders.scratch() as folder:
        path.download(folder / path.name)
        yield folder / path.name


def make_folder(folder: AnyPath) -> None:
    """Make a folder where there is none; a store has none to make.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: It cannot be made.
    """
    if isinstance(folder, Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise staging.write_error(folder, error) from error


def writes(path: AnyPath, state: Any, each_node: bool) -> bool:
    """Tell whether this rank writes what one rank writes for all, or one of each machine where they have own disks.

    Args:
        path: Where to; all machines see the same store, so its writer is the main rank.
        state: What knows `is_main_process` and `is_local_main_process`.
        each_node: Whether the first rank of every machine is to write.
    """
    return bool(state.is_local_main_process if each_node and isinstance(path, Path) else state.is_main_process)


def store_of(target: AnyPath) -> Store:
    """Return the place of a checkpoint.

    Args:
        target: Its folder.
    """
    if isinstance(target, Path):
        return DiskStore(target)
    from notebook_accelerate.checkpointing.object_store import ObjectStore

    return ObjectStore(target)


__all__ = ["DiskStore", "Reading", "Records", "Store", "size_of", "store_of"]
