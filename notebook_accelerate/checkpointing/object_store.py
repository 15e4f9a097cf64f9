"""A checkpoint in a store that fsspec reaches: ranks write on their machines' disks and upload their files.

An object store cannot rename. The manifest, which is uploaded in one piece or not at all, makes the checkpoint: a
folder without it is none. New files go to their final names if nothing is there yet. Otherwise they go to a folder
inside (``.committing``), whose manifest marks them as complete, and the store then copies them to their final names.
``.incomplete`` contains the messages of the ranks during a save, and the names of the files to remove if it fails.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from notebook_accelerate.big_modeling.remote_paths import RemotePath
from notebook_accelerate.big_modeling.weight_files import inside
from notebook_accelerate.checkpointing.checkpoint_layout import (
    CHECKPOINTS_FOLDER,
    JOURNAL_NAME,
    MANIFEST_NAME,
    STAGING_SUFFIX,
    FileRecord,
    Manifest,
    files_below,
    is_numbered,
    make_record,
    manifest_json,
    read_manifest,
    removal_name,
)
from notebook_accelerate.checkpointing.checkpoint_stores import FileRecords, ReadLocation, Store
from notebook_accelerate.checkpointing.rank_agreement import gather_values
from notebook_accelerate.checkpointing.save_lock import second_writer_error
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.hardware import guarded_files
from notebook_accelerate.hardware.process_liveness import parse_identity, this_process
from notebook_accelerate.state.world import world_from_environ

_HEARTBEAT = 30.0
"""Seconds between two heartbeats of a rank that is uploading: a store does not show partial files."""


def _read_message(path: RemotePath) -> dict[str, Any]:
    """Return the content of a rank's message; empty if it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _planned(plan: RemotePath) -> list[str]:
    """Return the names of the files that a rank was going to upload; none if the message was not complete."""
    try:
        names = json.loads(plan.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


class ObjectStore(Store):
    """A folder behind a URL.

    Args:
        target: Folder of the checkpoint.
    """

    poll_interval = 0.2

    def __init__(self, target: RemotePath) -> None:
        self.target = target
        self._messages = target / STAGING_SUFFIX
        self._journal = target / JOURNAL_NAME
        self._destination = self._source = target

    # -- existing checkpoints -----------------------------------------------------------------------------------------

    def is_checkpoint(self) -> bool:
        """See `Store.is_checkpoint`; True if there is a manifest, at its final name or in the journal."""
        return any((folder / MANIFEST_NAME).is_file() for folder in (self.target, self._journal))

    def is_occupied(self) -> bool:
        """See `Store.is_occupied`; the remains of an unfinished save do not count."""
        if self.is_checkpoint():
            return True
        return not self.unfinished_save() and any(
            path.name not in {STAGING_SUFFIX, JOURNAL_NAME} for path in self.target.iterdir()
        )

    def unfinished_save(self) -> str | None:
        """See `Store.unfinished_save`."""
        if self.is_checkpoint():
            return None
        opened = [path for path in self._messages.iterdir() if path.name.startswith("open_")]
        return str(self._messages) if any(_read_message(path).get("into") == "" for path in opened) else None

    def finish_commit(self, main: bool, local_main: bool) -> None:
        """See `Store.finish_commit`; does nothing: files are read from a complete journal (`source`)."""

    def _finish_journal(self) -> None:
        """Copy the files of a complete journal over the old ones; idempotent."""
        new = read_manifest(self._journal)
        if new is None:
            return
        with contextlib.suppress(CheckpointError):
            old = read_manifest(self.target)
            self.target.remove_files(old.files.keys() - new.files.keys() if old is not None else ())
        self._journal.copy_files(sorted(new.files), self.target)
        self._journal.copy_files([MANIFEST_NAME], self.target)
        (self._journal / MANIFEST_NAME).unlink(missing_ok=True)  # first: without it the other files are ignored
        self._journal.remove_tree()

    def generation(self) -> Any:
        """See `Store.generation`; the text of the manifest and where it is."""
        for folder in (self._journal, self.target):
            self._source = folder
            with contextlib.suppress(FileNotFoundError):
                return str(folder), (folder / MANIFEST_NAME).read_text()
        return str(self.target), ""

    def source(self) -> RemotePath:
        """See `Store.source`; a complete journal, which its writer or the next save copies to the final names."""
        return self._source

    # -- saving -------------------------------------------------------------------------------------------------------

    def open(self, token: str) -> None:
        """See `Store.open`; records that a save has started, and by which process."""
        self._refuse_second_writer()
        self._finish_journal()
        self._finish_removals()
        self._remove_unfinished()
        into = JOURNAL_NAME if any(True for _ in self.target.iterdir()) else ""
        self._message = self._open_message(token)
        self._message.write_text(json.dumps({"into": into, "owner": asdict(this_process())}))

    def _refuse_second_writer(self) -> None:
        """Raise if another process of this machine is saving to this folder; `commit` notices those of others."""
        here = this_process()
        opened = [path for path in self._messages.iterdir() if path.name.startswith("open_")]
        for owner in (parse_identity(_read_message(path).get("owner")) for path in opened):
            if owner and owner.machine == here.machine and owner != here and not owner.has_ended():
                raise CheckpointError(second_writer_error(self.target, str(owner)))

    def _open_message(self, token: str) -> RemotePath:
        return self._messages / f"open_{token.strip('.')}.json"

    def _remove_unfinished(self) -> None:
        """Remove the files that an unfinished save recorded; other files in this folder are the user's."""
        messages = list(self._messages.iterdir())
        if not messages:
            return
        if not self.is_checkpoint():
            plans = [path for path in messages if path.name.startswith("plan_")]
            self.target.remove_files({name for plan in plans for name in _planned(plan)})
        self._journal.remove_tree()
        self._messages.remove_tree()

    def can_see(self, token: str) -> bool:
        """See `Store.can_see`; reads the destination of the files from the main rank's message."""
        try:
            message = json.loads(self._open_message(token).read_text())
        except FileNotFoundError as error:
            raise CheckpointError(
                f"This rank does not see what the main rank has just written to {self.target}: all ranks must reach "
                "the same store (the same endpoint, account and region; memory:// is local to one process)."
            ) from error
        self._destination = self.target / message["into"] if message["into"] else self.target
        return True

    def prepare_folder(self) -> None:
        """See `Store.prepare_folder`; creates a folder of this rank's own in the machine's temporary files."""
        self.folder = guarded_files.make() / self.target.name
        self.folder.mkdir()

    def sync(self, path: Path) -> None:
        """See `Store.sync`; does nothing, because files are only uploaded from this disk."""

    def deliver(self, rank: int, records: FileRecords) -> FileRecords:
        """See `Store.deliver`; uploads all files in this rank's folder, after a list of their names for cleanup."""
        found = {path.relative_to(self.folder).as_posix(): path for path in files_below(self.folder)}
        delivered = {name: records[name] if name in records else make_record(path) for name, path in found.items()}
        (self._messages / f"plan_{rank}.json").write_text(json.dumps(sorted(delivered)))
        with self._sending_heartbeats(rank):
            for name, path in found.items():
                (self._destination / name).upload(path)
                path.unlink()
        guarded_files.remove(self.folder.parent)
        return delivered

    @contextmanager
    def _sending_heartbeats(self, rank: int) -> Iterator[None]:
        """Show other ranks that this one is alive while the block runs."""
        finished = threading.Event()

        def send_heartbeats() -> None:
            count = 0
            while not finished.wait(_HEARTBEAT):
                count += 1
                with contextlib.suppress(CheckpointError):
                    (self._messages / f"beat_{rank}").write_text(str(count))

        thread = threading.Thread(target=send_heartbeats, name=f"upload to {self.target.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()

    def write_report(self, rank: int, content: dict[str, Any]) -> None:
        """See `Store.write_report`."""
        (self._messages / f"rank_{rank}.json").write_text(json.dumps(content))

    def read_report(self, rank: int) -> dict[str, Any] | None:
        """See `Store.read_report`."""
        try:
            content: dict[str, Any] = json.loads((self._messages / f"rank_{rank}.json").read_text())
        except (FileNotFoundError, ValueError):  # missing, or partial where the store is a file system
            return None
        return content

    def activity(self, rank: int) -> Any:
        """See `Store.activity`; returns the rank's last heartbeat."""
        try:
            return (self._messages / f"beat_{rank}").read_text()
        except FileNotFoundError:
            return ""

    def commit(self, manifest: Manifest, parts: Sequence[FileRecords]) -> None:
        """See `Store.commit`; writing the manifest makes the checkpoint."""
        writers = Counter(name for part in parts for name in part)
        for part in parts:
            for name, record in part.items():
                known = manifest.files.setdefault(name, record)
                if writers[name] > 1 and known != record:  # hooks on several ranks wrote it: the last upload is stored
                    manifest.files[name] = self._stored_record(name)
        if not self._message.is_file():
            raise CheckpointError(second_writer_error(self.target, "another run"))
        (self._destination / MANIFEST_NAME).write_text(manifest_json(manifest))
        if self._destination != self.target:
            self._finish_journal()
        with contextlib.suppress(CheckpointError):  # the checkpoint is complete; the next save removes the messages
            self._messages.remove_tree()

    def _stored_record(self, name: str) -> FileRecord:
        with guarded_files.scratch() as folder:
            (self._destination / name).download(folder / "file")
            return make_record(folder / "file")

    def discard(self, opened: bool, delivering: bool = True) -> None:
        """See `Store.discard`; uploaded files stay for the next save, because other ranks may still be uploading."""
        if hasattr(self, "folder"):
            guarded_files.remove(self.folder.parent)
        if not opened:
            return
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            if not delivering:
                self._messages.remove_tree()
            elif self._message.is_file():  # no longer this process's
                self._message.write_text(json.dumps({"into": _read_message(self._message).get("into")}))

    # -- numbered checkpoints -----------------------------------------------------------------------------------------

    def remove_checkpoints(self, surplus: Sequence[Any]) -> None:
        """See `Store.remove_checkpoints`; also removes saves that never finished.

        Each removal is recorded in the project first, and the manifest is removed before the other files: what an
        interrupted removal leaves is not a checkpoint, and the next one finishes it.
        """
        for folder in surplus:
            (folder.parent.parent / removal_name(folder.name)).write_text("")
        self._finish_removals()
        for folder in self.target.parent.iterdir():
            if is_numbered(folder.name) and folder != self.target and ObjectStore(folder).unfinished_save():
                ObjectStore(folder)._remove_unfinished()

    def _finish_removals(self) -> None:
        checkpoints = self.target.parent
        if checkpoints.name != CHECKPOINTS_FOLDER or not is_numbered(self.target.name):
            return
        for record in checkpoints.parent.iterdir():
            name = record.name[1:].rpartition(".")[0]
            if is_numbered(name) and record.name == removal_name(name):
                (checkpoints / name / MANIFEST_NAME).unlink(missing_ok=True)
                (checkpoints / name).remove_tree()
                record.unlink(missing_ok=True)

    # -- loading ------------------------------------------------------------------------------------------------------

    @contextmanager
    def open_for_reading(self, local_rank: int) -> Iterator[ReadLocation]:
        """See `Store.open_for_reading`; the ranks of a machine fill one temporary folder together."""
        with guarded_files.scratch() as scratch:
            own = scratch / self.target.name
            own.mkdir()
            before = gather_values((local_rank == 0, str(own)), "load_state")[: world_from_environ().rank + 1]
            folder = Path(next((path for first, path in reversed(before) if first), str(own)))
            shared = folder.is_dir()  # containers on one machine may have separate temporary files
            share = slice(local_rank, None, world_from_environ().local_size) if shared else slice(None)
            yield ReadLocation(folder if shared else own, share)

    def fetch(self, names: Sequence[str] | None, location: ReadLocation) -> list[str]:
        """See `Store.fetch`; the verification reports files that are missing in the store."""
        if names is None:
            names = sorted(name for name in self._source.files() if not name.startswith((STAGING_SUFFIX, JOURNAL_NAME)))
        share = list(names)[location.share]
        for name in share:
            destination = inside(location.folder, name)
            destination.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (self._source / name).download(destination)
        return share
