"""Checkpoints in a store that fsspec reaches. Ranks write to the disks of their machines, and upload their files.

An object store cannot rename files. If the folder is empty, new files are uploaded under their final names. Otherwise,
they are uploaded to ``.committing``, and the store copies them from there. During a save, ``.incomplete`` contains the
ranks' messages: the process that is saving, the files to remove if it dies, heartbeats, and reports.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from notebook_accelerate.checkpointing.commit import CheckpointStore, FileRecords, ReadLocation, read_message
from notebook_accelerate.checkpointing.manifest import (
    CHECKPOINTS_FOLDER,
    COMMITTING_NAME,
    STAGING_SUFFIX,
    FileRecord,
    files_below,
    is_numbered,
    make_record,
    removal_name,
)
from notebook_accelerate.checkpointing.rank_agreement import gather_values
from notebook_accelerate.checkpointing.save_lock import second_writer_error
from notebook_accelerate.config.constants import MANIFEST_NAME
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.files.remote_paths import RemotePath
from notebook_accelerate.files.temporary_folders import make_private_folder, remove_private_folder, scratch_folder
from notebook_accelerate.files.weight_files import inside
from notebook_accelerate.hardware.process_liveness import parse_identity, this_process
from notebook_accelerate.state.process_group import world_from_environ

_HEARTBEAT = 30.0
"""Seconds between two heartbeats of a rank that is uploading, whose partial files the store does not show."""


class ObjectStore(CheckpointStore):
    """The folder of a checkpoint at a URL. Each rank writes its files to a temporary folder, and uploads them.

    Args:
        target: The folder of the checkpoint.
    """

    poll_interval = 0.2
    target: RemotePath
    committing: RemotePath
    delivered: RemotePath
    messages: RemotePath

    def __init__(self, target: RemotePath) -> None:
        super().__init__(target)
        self.messages = target / STAGING_SUFFIX
        self._source = target

    # ---- saving

    def _claim(self) -> None:
        """Raise if another process on this machine is saving here.

        `_check_claim` detects processes on other machines.
        """
        here = this_process()
        for owner in (parse_identity(message.get("owner")) for message in self._open_messages()):
            if owner and owner.machine == here.machine and owner != here and not owner.has_ended():
                raise CheckpointError(second_writer_error(self.target, str(owner)))

    def _open_messages(self) -> list[dict[str, Any]]:
        opened = [read_message(path) for path in self.messages.iterdir() if path.name.startswith("open_")]
        return [message for message in opened if isinstance(message, dict)]

    def _open_message(self, token: str) -> RemotePath:
        return self.messages / f"open_{token.strip('.')}.json"

    def _check_claim(self) -> None:
        if not self._message.is_file():
            raise CheckpointError(second_writer_error(self.target, "another run"))

    def _remove_unfinished(self) -> None:
        self._finish_removals()
        self._remove_planned()

    def _remove_planned(self) -> None:
        """Remove the files that an unfinished save has recorded, but not the user's files in the folder."""
        messages = list(self.messages.iterdir())
        if not messages:
            return
        if not self.is_checkpoint():
            plans = [read_message(path) for path in messages if path.name.startswith("plan_")]
            self.target.remove_files(
                {name for plan in plans if isinstance(plan, list) for name in plan if isinstance(name, str)}
            )
        self.committing.remove_tree()
        self.messages.remove_tree()

    def _make_room(self, token: str) -> None:
        into = COMMITTING_NAME if any(True for _ in self.target.iterdir()) else ""
        self._message = self._open_message(token)
        self._message.write_text(json.dumps({"into": into, "owner": asdict(this_process())}))

    def can_see(self, token: str) -> bool:
        """Read the destination from the main rank's message, and create a temporary folder for this rank's files."""
        try:
            message = json.loads(self._open_message(token).read_text())
        except FileNotFoundError as error:
            raise CheckpointError(
                f"This rank does not see what the main rank has just written to {self.target}: all ranks must reach "
                "the same store (the same endpoint, account and region; memory:// is local to one process)."
            ) from error
        self.delivered = self.target / message["into"] if message["into"] else self.target
        self.folder = make_private_folder() / self.target.name
        self.folder.mkdir()
        return True

    def sync(self, path: Path) -> None:
        """Do nothing, because the files on this disk are only temporary."""

    def deliver(self, rank: int, records: FileRecords) -> FileRecords:
        """Upload a list of names, which `_remove_planned` uses, and then all files in this rank's folder."""
        found = {path.relative_to(self.folder).as_posix(): path for path in files_below(self.folder)}
        delivered = {name: records[name] if name in records else make_record(path) for name, path in found.items()}
        (self.messages / f"plan_{rank}.json").write_text(json.dumps(sorted(delivered)))
        with self._sending_heartbeats(rank):
            for name, path in found.items():
                (self.delivered / name).upload(path)
                path.unlink()
        remove_private_folder(self.folder.parent)
        return delivered

    @contextmanager
    def _sending_heartbeats(self, rank: int) -> Iterator[None]:
        """Send heartbeats to the other ranks while the block runs."""
        finished = threading.Event()

        def send_heartbeats() -> None:
            count = 0
            while not finished.wait(_HEARTBEAT):
                count += 1
                with contextlib.suppress(CheckpointError):
                    (self.messages / f"beat_{rank}").write_text(str(count))

        thread = threading.Thread(target=send_heartbeats, name=f"upload to {self.target.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()

    def activity(self, rank: int) -> Any:
        """Return the rank's last heartbeat."""
        try:
            return (self.messages / f"beat_{rank}").read_text()
        except FileNotFoundError:
            return ""

    def _stored_record(self, name: str) -> FileRecord:
        with scratch_folder() as folder:
            (self.delivered / name).download(folder / "file")
            return make_record(folder / "file")

    def _publish(self) -> None:
        if self.delivered == self.committing:
            self._replace_old_files()

    def _release(self) -> None:
        # The checkpoint is already complete. If removing the messages fails, the next save removes them.
        with contextlib.suppress(CheckpointError):
            self.messages.remove_tree()

    def discard(self, opened: bool, delivering: bool = True) -> None:
        """Abandon a save.

        Uploaded files are left for the next save to remove, because other ranks may still be uploading.
        """
        if hasattr(self, "folder"):
            remove_private_folder(self.folder.parent)
        if not opened:
            return
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            if not delivering:
                self.messages.remove_tree()
            elif self._message.is_file():  # Remove the owner from the message, so that the next save can start.
                into = COMMITTING_NAME if self.delivered == self.committing else ""
                self._message.write_text(json.dumps({"into": into}))

    def remove_checkpoints(self, surplus: Sequence[RemotePath]) -> None:
        """Remove numbered checkpoints, and saves that never finished.

        Each removal is first recorded in the project, and the manifest is removed before the other files. If a removal
        is interrupted, the files that are left are not a checkpoint, and the next removal deletes them.

        Args:
            surplus: The folders of the checkpoints to remove.
        """
        for folder in surplus:
            (folder.parent.parent / removal_name(folder.name)).write_text("")
        self._finish_removals()
        for folder in self.target.parent.iterdir():
            if is_numbered(folder.name) and folder != self.target and ObjectStore(folder).unfinished_save():
                ObjectStore(folder)._remove_planned()

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

    # ---- replacing old files

    def _is_committing(self) -> bool:
        return (self.committing / MANIFEST_NAME).is_file()

    def _move_to_target(self, entries: Sequence[str]) -> None:
        self.committing.copy_files(entries, self.target)

    def _remove(self, entries: Collection[str]) -> None:
        self.target.remove_files(entries)

    def _remove_committing(self) -> None:
        (self.committing / MANIFEST_NAME).unlink(missing_ok=True)  # Remove this first, so that the rest is ignored.
        self.committing.remove_tree()

    # ---- existing checkpoints

    def is_checkpoint(self) -> bool:
        """Return whether there is a manifest, in the folder or in ``.committing``."""
        return any((folder / MANIFEST_NAME).is_file() for folder in (self.target, self.committing))

    def is_occupied(self) -> bool:
        """Return whether there is a checkpoint or a user's file. Files of an unfinished save do not count."""
        if self.is_checkpoint():
            return True
        return not self.unfinished_save() and any(
            path.name not in {STAGING_SUFFIX, COMMITTING_NAME} for path in self.target.iterdir()
        )

    def unfinished_save(self) -> str | None:
        if self.is_checkpoint():
            return None
        return str(self.messages) if any(message.get("into") == "" for message in self._open_messages()) else None

    def finish_commit(self) -> None:
        """Do nothing, because complete files in ``.committing`` can be read in place (see `source`)."""

    def generation(self) -> Any:
        """Return the manifest's text and folder, which is ``.committing`` if the files there are complete."""
        for folder in (self.committing, self.target):
            self._source = folder
            with contextlib.suppress(FileNotFoundError):
                return str(folder), (folder / MANIFEST_NAME).read_text()
        return str(self.target), ""

    def source(self) -> RemotePath:
        return self._source

    @contextmanager
    def open_for_reading(self, local_rank: int) -> Iterator[ReadLocation]:
        """Provide a temporary folder that the ranks on a machine fill together."""
        with scratch_folder() as scratch:
            own = scratch / self.target.name
            own.mkdir()
            before = gather_values((local_rank == 0, str(own)), "load_state")[: world_from_environ().rank + 1]
            folder = Path(next((path for first, path in reversed(before) if first), str(own)))
            shared = folder.is_dir()  # Containers on one machine may have separate temporary folders.
            share = slice(local_rank, None, world_from_environ().local_size) if shared else slice(None)
            yield ReadLocation(folder if shared else own, share)

    def fetch(self, names: Sequence[str] | None, location: ReadLocation) -> list[str]:
        """Download this rank's share. Files that are missing from the store are skipped; verification reports them."""
        if names is None:
            names = sorted(
                name for name in self._source.files() if not name.startswith((STAGING_SUFFIX, COMMITTING_NAME))
            )
        share = list(names)[location.share]
        for name in share:
            destination = inside(location.folder, name)
            destination.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (self._source / name).download(destination)
        return share
