"""A checkpoint in a store that fsspec reaches: the ranks write on their machines' disks and bring their files there.

An object store renames nothing: the manifest, which it takes whole or not at all, makes the checkpoint, and a folder
without it is none. New files go to their places where there is nothing yet; where there is, they go to a folder inside
(``.committing``), whose manifest says that they are whole, and are then copied to their places by the store itself.
``.incomplete`` holds what the ranks tell each other meanwhile, and the names of the files that may have to go.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from notebook_accelerate.big_modeling import temporary_folders
from notebook_accelerate.big_modeling.remote_paths import RemotePath
from notebook_accelerate.big_modeling.weight_files import inside
from notebook_accelerate.checkpointing import checkpoint_layout
from notebook_accelerate.checkpointing.checkpoint_stores import Reading, Records, Store
from notebook_accelerate.checkpointing.manifest import (
    FileRecord,
    Manifest,
    files_below,
    manifest_text,
    read_manifest,
    record_of,
)
from notebook_accelerate.checkpointing.rank_agreement import exchange
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state.world import world_from_environ

_BEAT = 30.0
"""Seconds between two signs of life of a rank that is uploading: a store does not show half a file."""


class ObjectStore(Store):
    """A folder behind a URL.

    Args:
        target: Folder of the checkpoint.
    """

    pause = 0.2

    def __init__(self, target: RemotePath) -> None:
        self.target = target
        self._marks = target / checkpoint_layout.STAGING_SUFFIX
        self._journal = target / checkpoint_layout.JOURNAL_NAME
        self._into = target

    # -- what is there ------------------------------------------------------------------------------------------------

    def is_checkpoint(self) -> bool:
        """Tell whether the folder has a manifest, in its place or about to come there."""
        return (self.target / checkpoint_layout.MANIFEST_NAME).is_file() or (
            self._journal / checkpoint_layout.MANIFEST_NAME
        ).is_file()

    def is_taken(self) -> bool:
        """Tell whether there is a checkpoint, or something that is not left of an unfinished save."""
        ours = {checkpoint_layout.STAGING_SUFFIX, checkpoint_layout.JOURNAL_NAME}
        return self.is_checkpoint() or (
            not self.unfinished() and any(p.name not in ours for p in self.target.iterdir())
        )

    def unfinished(self) -> str | None:
        """Return where an unfinished save is, if that is why there is no checkpoint here."""
        if self.is_checkpoint():
            return None
        begun = [mark for mark in self._marks.iterdir() if mark.name.startswith("open_")]
        return str(self._marks) if any(json.loads(mark.read_text())["into"] == "" for mark in begun) else None

    def finish(self, main: bool, first: bool) -> None:
        """Finish copying new files over old ones, on the main rank; repeating it does no harm."""
        if main:
            self._finish_journal()

    def _finish_journal(self) -> None:
        new = read_manifest(self._journal)
        if new is None:
            return
        with contextlib.suppress(CheckpointError):
            old = read_manifest(self.target)
            self.target.remove_files(old.files.keys() - new.files.keys() if old is not None else ())
        self._journal.copy_files(sorted(new.files), self.target)
        self._journal.copy_files([checkpoint_layout.MANIFEST_NAME], self.target)
        (self._journal / checkpoint_layout.MANIFEST_NAME).unlink(
            missing_ok=True
        )  # first: without it the rest is rubbish
        self._journal.remove_tree()

    # -- saving -------------------------------------------------------------------------------------------------------

    def open(self, token: str) -> None:
        """Remove what is left of unfinished saves and removals, and note that a save has begun."""
        self._finish_journal()
        self._finish_removals()
        self._sweep()
        into = checkpoint_layout.JOURNAL_NAME if any(True for _ in self.target.iterdir()) else ""
        self._mark_of(token).write_text(json.dumps({"into": into}))

    def _mark_of(self, token: str) -> RemotePath:
        return self._marks / f"open_{token.strip('.')}.json"

    def _sweep(self) -> None:
        """Remove the files of an unfinished save by the names it has left; other files here are not ours."""
        if not any(True for _ in self._marks.iterdir()):
            return
        if not self.is_checkpoint():
            plans = [mark for mark in self._marks.iterdir() if mark.name.startswith("plan_")]
            names = {name for plan in plans for name in json.loads(plan.read_text())}
            self.target.remove_files(names)
        self._journal.remove_tree()
        self._marks.remove_tree()

    def sees(self, token: str) -> bool:
        """Learn from the main rank's note where files go."""
        try:
            note = json.loads(self._mark_of(token).read_text())
        except FileNotFoundError as error:
            raise CheckpointError(
                f"This rank does not see what the main rank has just written to {self.target}: all ranks must reach "
                "the same store (the same endpoint, account and region; memory:// is one process's own)."
            ) from error
        self._into = self.target / note["into"] if note["into"] else self.target
        return True

    def begin(self) -> None:
        """Write into a folder of this rank's own, in the machine's temporary files."""
        self.folder = temporary_folders.make() / self.target.name
        self.folder.mkdir()

    def flush(self, path: Path) -> None:
        """Do nothing: the disk here only passes files on."""

    def deliver(self, rank: int, records: Records) -> Records:
        """Upload all files in this rank's folder; their names first, for whoever has to tidy up."""
        found = {path.relative_to(self.folder).as_posix(): path for path in files_below(self.folder)}
        brought = {name: records[name] if name in records else record_of(path) for name, path in found.items()}
        (self._marks / f"plan_{rank}.json").write_text(json.dumps(sorted(brought)))
        with self._beating(rank):
            for name, path in found.items():
                (self._into / name).upload(path)
                path.unlink()
        temporary_folders.remove(self.folder.parent)
        return brought

    @contextmanager
    def _beating(self, rank: int) -> Iterator[None]:
        """Show from time to time that this rank is alive."""
        done = threading.Event()

        def beat() -> None:
            count = 0
            while not done.wait(_BEAT):
                count += 1
                with contextlib.suppress(CheckpointError):
                    (self._marks / f"beat_{rank}").write_text(str(count))

        thread = threading.Thread(target=beat, name=f"upload to {self.target.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def report(self, rank: int, content: dict[str, Any]) -> None:
        """Tell the committing rank how it went."""
        (self._marks / f"rank_{rank}.json").write_text(json.dumps(content))

    def reported(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's report, or None as long as there is none."""
        try:
            content: dict[str, Any] = json.loads((self._marks / f"rank_{rank}.json").read_text())
        except (FileNotFoundError, ValueError):  # not there, or, where files are no objects, half there
            return None
        return content

    def activity(self, rank: int) -> Any:
        """Return the rank's last sign of life."""
        try:
            return (self._marks / f"beat_{rank}").read_text()
        except FileNotFoundError:
            return ""

    def commit(self, manifest: Manifest, parts: Sequence[Records]) -> None:
        """Write the manifest; the checkpoint is there from then on."""
        times = Counter(name for part in parts for name in part)
        for part in parts:
            for name, record in part.items():
                known = manifest.files.setdefault(name, record)
                if times[name] > 1 and known != record:  # written by hooks on several ranks: what counts is what stays
                    manifest.files[name] = self._record_there(name)
        (self._into / checkpoint_layout.MANIFEST_NAME).write_text(manifest_text(manifest))
        if self._into != self.target:
            self._finish_journal()
        with contextlib.suppress(CheckpointError):  # the checkpoint is there; the next save removes this
            self._marks.remove_tree()

    def _record_there(self, name: str) -> FileRecord:
        with temporary_folders.scratch() as folder:
            place = folder / "file"
            (self._into / name).download(place)
            return record_of(place)

    def discard(self, opened: bool, begun: bool = True) -> None:
        """Remove this rank's folder; uploaded files stay for the next save, other ranks may still be uploading."""
        if hasattr(self, "folder"):
            temporary_folders.remove(self.folder.parent)
        if opened and not begun:
            with contextlib.suppress(CheckpointError):
                self._marks.remove_tree()

    # -- numbered checkpoints -----------------------------------------------------------------------------------------

    def prune(self, surplus: Sequence[Any]) -> None:
        """Remove checkpoints, and what is left of saves that never finished.

        Each is noted in the project before, and its manifest goes first: what an ended process leaves is no checkpoint,
        and is known to be none of ours.
        """
        for folder in surplus:
            self._doom_of(folder).write_text("")
        self._finish_removals()
        for folder in self.target.parent.iterdir():
            if (
                checkpoint_layout.is_numbered(folder.name)
                and folder != self.target
                and ObjectStore(folder).unfinished()
            ):
                ObjectStore(folder)._sweep()

    def _doom_of(self, folder: RemotePath) -> RemotePath:
        return folder.parent.parent / f".{folder.name}{checkpoint_layout.DOOMED_SUFFIX}"

    def _finish_removals(self) -> None:
        checkpoints = self.target.parent
        if checkpoints.name != checkpoint_layout.CHECKPOINTS_FOLDER or not checkpoint_layout.is_numbered(
            self.target.name
        ):
            return
        for note in checkpoints.parent.iterdir():
            name = note.name[1:].removesuffix(checkpoint_layout.DOOMED_SUFFIX)
            if note.name == f".{name}{checkpoint_layout.DOOMED_SUFFIX}" and checkpoint_layout.is_numbered(name):
                (checkpoints / name / checkpoint_layout.MANIFEST_NAME).unlink(missing_ok=True)
                (checkpoints / name).remove_tree()
                note.unlink(missing_ok=True)

    # -- loading ------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, local_rank: int) -> Iterator[Reading]:
        """Give the ranks of a machine a folder that they fill together; it goes when all have read."""
        with temporary_folders.scratch() as place:
            own = place / self.target.name
            own.mkdir()
            before = exchange((local_rank == 0, str(own)), "load_state")[: world_from_environ().rank + 1]
            folder = Path(next((path for first, path in reversed(before) if first), str(own)))
            shared = folder.is_dir()  # containers of one machine may have temporary files of their own
            share = slice(local_rank, None, world_from_environ().local_size) if shared else slice(None)
            yield Reading(folder if shared else own, share)

    def fetch(self, names: Sequence[str] | None, reading: Reading) -> list[str]:
        """Download this rank's share of the files; those that are not there are left to the check."""
        if names is None:
            ours = (checkpoint_layout.STAGING_SUFFIX, checkpoint_layout.JOURNAL_NAME)
            names = sorted(name for name in self.target.files() if not name.startswith(ours))
        share = list(names)[reading.share]
        for name in share:
            place = inside(reading.folder, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (self.target / name).download(place)
        return share


__all__ = ["ObjectStore"]
