"""One save on its way to the disk: every rank's files, then the manifest, then the place.

The ranks report through small files in the staging folder rather than through collectives, which a thread must not use
while training does. Only for states in pieces, which torch's distributed checkpoints write, the threads have a process
group of their own. One rank per file system commits: the main one, or the first of a machine with disks of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from notebook_accelerate.checkpointing import files, layout, staging
from notebook_accelerate.checkpointing.capture import StateFile
from notebook_accelerate.checkpointing.manifest import (
    FileRecord,
    Manifest,
    files_below,
    record_of,
    write_manifest,
)
from notebook_accelerate.checkpointing.peers import Peer
from notebook_accelerate.checkpointing.ranks import failures_in
from notebook_accelerate.checkpointing.snapshot import Snapshot
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state.notices import warn_once

_REPORT = ".rank_{rank}.json"
_STALL = 600.0
"""Seconds without any change in the staging folder after which a silent rank counts as dead."""
_DYING = 2.0
"""Seconds in which a process whose connections are closed is given up for alive."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a checkpoint goes, as one rank sees it."""

    target: Path
    """The checkpoint's folder."""
    staging: Path
    """Where it is written first."""
    rank: int
    """This rank."""
    commits: bool
    """Whether this rank moves the staging folder to its place."""
    group: dict[int, Peer] = field(default_factory=dict)
    """The ranks that write to this file system, and their processes."""


@dataclass
class Writing:
    """What one rank does for one checkpoint after its state was captured.

    Attributes:
        snapshot: The copies it writes; None where it writes the training's own tensors.
        optimizers: Those whose next step must wait until the snapshot is filled.
        hooks: What makes them wait.
        group: The process group of the ranks' threads; None for torch's default one, in the caller's thread.
        thread: The thread that runs it; None when it runs in the caller.
        error: Why it failed; None while it has not.
    """

    place: Place
    manifest: Manifest
    state_files: list[StateFile]
    after: Callable[[], None]
    snapshot: Snapshot | None = None
    optimizers: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    group: Any = None
    thread: threading.Thread | None = None
    error: BaseException | None = None
    _records: dict[str, FileRecord] = field(default_factory=dict)
    _known: bool = False

    def start(self) -> None:
        """Run in a thread. It is no daemon: the interpreter does not end before the checkpoint is written."""
        if self.snapshot is not None:
            copied = self.snapshot.copied
            self.hooks = [item.register_step_pre_hook(lambda *_: copied.wait() and None) for item in self.optimizers]
        self.thread = threading.Thread(target=self.run, name=f"save_state {self.place.target.name}")
        try:
            self.thread.start()
        except RuntimeError as error:  # a limit on threads, or an interpreter that is ending
            self.thread = None
            self.run()
            warn_once(f"save_state(blocking=False) wrote the checkpoint in the foreground: {error}.")

    def join(self) -> None:
        """Wait for the thread, where there is one."""
        if self.thread is not None:
            self.thread.join()
        for hook in self.hooks:  # here, in the caller's thread: an optimizer may be running its hooks
            hook.remove()

    def run(self) -> None:
        """Write this rank's files, report, and commit where that is this rank's part; errors end up in `error`."""
        try:
            self._fill_copies()
            self._write_files()
            self._report({"files": {name: asdict(record) for name, record in self._records.items()}})
            if self.place.commits:
                self._commit()
        except BaseException as error:  # whatever a writer raises is this checkpoint's failure
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.state_files, self.snapshot = [], None  # a gigabyte of references

    def _fill_copies(self) -> None:
        """Fill the copies; where the ranks write together they all go on, or none."""
        failure: CheckpointError | None = None
        try:
            if self.snapshot is not None:
                self.snapshot.finish()
        except Exception as error:  # noqa: BLE001 - reported to the others first
            failure = self._explained(error)
        if self.group is not None:
            failed = failures_in(self.group, "" if failure is None else str(failure))
            self._known = bool(failed)
            if failed and failure is None:
                raise CheckpointError("; ".join(f"Rank {rank}: {text}" for rank, text in failed.items()))
        if failure is not None:
            raise failure

    def _write_files(self) -> None:
        for file in self.state_files:
            path = self.place.staging / file.name
            if file.write is not None:
                written = file.write(file.value, path, self.group).items()
                records = {
                    f"{file.name}/{name}": FileRecord(size=size, crc32=f"{crc:08x}") for name, (size, crc) in written
                }
                self._records.update(records)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write(file.value, path)
                self._records[file.name] = record_of(path)
                staging.sync_file(path)
            file.value = None

    def _report(self, content: dict[str, object]) -> None:
        report = self.place.staging / _REPORT.format(rank=self.place.rank)
        temporary = report.with_suffix(".tmp")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(report)

    def _fail(self, error: BaseException) -> None:
        self.error = self._explained(error)
        if self.thread is not None:
            _log.error("%s", self.error)  # the training goes on: say it now, raise it at the next save or the end
        if self.place.commits:
            staging.discard(self.place.staging)
            return
        if self._known or hasattr(error, "failures"):
            return  # the committing rank knows, and may be removing the folder already
        try:
            self._report({"error": str(self.error)})
        except OSError:
            shutil.rmtree(self.place.staging, ignore_errors=True)  # the committing rank sees that it is gone

    def _explained(self, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        explained = self._lost(error) or self._of_another_rank(error)
        if explained is None and not self.place.commits and not self.place.staging.is_dir():
            explained = CheckpointError(f"The checkpoint {self.place.target} was not written: another rank gave it up.")
        explained = explained or staging.write_error(self.place.target, error)
        explained.__cause__ = error
        return explained

    def _lost(self, error: BaseException) -> CheckpointError | None:
        """Return which rank's end is why a collective of the threads failed, if it did."""
        if self.group is None or not isinstance(error, RuntimeError) or hasattr(error, "failures"):
            return None
        end = time.monotonic() + _DYING
        while True:  # a process closes its connections before it has ended
            for rank, peer in self.place.group.items():
                if peer.ended():
                    return self._unfinished(rank, f"its process {peer.pid} has ended")
            if time.monotonic() > end:
                return None
            time.sleep(0.05)

    def _unfinished(self, rank: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {self.place.target} was not written: rank {rank} did not finish its part, {reason}."
        )

    def _of_another_rank(self, error: BaseException) -> CheckpointError | None:
        """Return what another rank could not do: where ranks write together, all learn of it, and none goes on."""
        failures = getattr(error, "failures", {})
        if not failures:
            return None
        rank = self.place.rank if self.place.rank in failures else min(failures)
        explained = staging.write_error(self.place.target, failures[rank])
        return explained if rank == self.place.rank else CheckpointError(f"Rank {rank}: {explained}")

    def _commit(self) -> None:
        for rank, peer in self.place.group.items():
            self._records.update(self._await_report(rank, peer))
        for path in files_below(self.place.staging):  # written by hooks and by the strategy
            name = path.relative_to(self.place.staging).as_posix()
            if name not in self._records:
                self._records[name] = record_of(path)
                staging.sync_file(path)
        self.manifest.files = self._records
        write_manifest(self.place.staging, self.manifest)
        staging.commit(self.place.staging, self.place.target)
        self.after()

    def _await_report(self, rank: int, peer: Peer) -> dict[str, FileRecord]:
        report = self.place.staging / _REPORT.format(rank=rank)
        watch = _Watch(self.place.staging, peer)
        while not report.exists():
            if (reason := watch.lost()) and not report.exists():  # its report may be the last thing it did
                raise self._unfinished(rank, reason)
            time.sleep(0.01)
        content = json.loads(report.read_text(encoding="utf-8"))
        report.unlink()
        if "error" in content:
            raise CheckpointError(f"Rank {rank}: {content['error']}")
        return {name: FileRecord(**record) for name, record in content["files"].items()}


class _Watch:
    """Notices when a rank will not write any more to a folder.

    Args:
        folder: The folder.
        peer: The rank's process.
    """

    def __init__(self, folder: Path, peer: Peer) -> None:
        self._folder = folder
        self._peer = peer
        self._size = -1
        self._since = time.monotonic()
        self._next_look = 0.0

    def lost(self) -> str:
        """Return why there is nothing to wait for, or an empty text; the system is asked once a second."""
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + 1.0
        if self._peer.ended():
            return f"its process {self._peer.pid} has ended"
        if not self._folder.is_dir():
            return f"and {self._folder} is gone"
        size = _size_of(self._folder)
        if size != self._size:
            self._size, self._since = size, now
        silent = now - self._since > _STALL
        return f"and nothing was written for {_STALL / 60:.0f} minutes" if silent else ""


def _size_of(folder: Path) -> int:
    """Return the bytes in a folder that others write to: a file may have got another name since it was listed."""
    size = 0
    for path in files_below(folder):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def prune(project_dir: Path, total_limit: int | None) -> None:
    """Remove the oldest automatically named checkpoints above the limit.

    A folder is renamed before it is removed, so that what an ended process leaves is no checkpoint.

    Args:
        project_dir: Folder of the project.
        total_limit: How many to keep; None keeps all.
    """
    for left in project_dir.glob(f".*{layout.DOOMED_SUFFIX}"):
        shutil.rmtree(left)
    for folder in layout.surplus(project_dir, total_limit):
        doomed = folder.rename(project_dir / f".{folder.name}{layout.DOOMED_SUFFIX}")
        shutil.rmtree(doomed)
