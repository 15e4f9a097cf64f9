"""Write a captured checkpoint: first the files of all ranks, then the manifest, then the commit.

Ranks report through small files in the staging folder, because a thread must not use the process group that training
uses. Only sharded states, which torch's distributed checkpoint writes, need collectives. The threads have a separate
process group for them. One rank per file system commits: the main rank, or the first rank of each machine that has a
separate disk.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from notebook_accelerate.checkpointing.commit import CheckpointStore, FileRecords
from notebook_accelerate.checkpointing.manifest import FileRecord, Manifest, make_record
from notebook_accelerate.checkpointing.rank_agreement import gather_failures
from notebook_accelerate.checkpointing.single_files import write_file
from notebook_accelerate.checkpointing.snapshot import Snapshot
from notebook_accelerate.checkpointing.state_files import StateFile
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.files.remote_paths import AnyPath
from notebook_accelerate.hardware import device_table
from notebook_accelerate.hardware.process_liveness import ProcessIdentity
from notebook_accelerate.state.warn_once import warn_once

_SILENCE_LIMIT = 600.0
"""Seconds that the staging folder may stay unchanged before a rank that has not reported is considered dead."""
_EXIT_GRACE = 2.0
"""Seconds to wait for a process to exit once its connections are closed, before it is considered alive."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SaveTarget:
    """The destination of a checkpoint, as seen by one rank."""

    folder: AnyPath
    """The folder of the checkpoint."""
    store: CheckpointStore
    """The store that contains the folder."""
    rank: int
    """This process's rank."""
    commits: bool
    """Whether this rank is the one that commits the checkpoint."""
    peers: dict[int, ProcessIdentity] = field(default_factory=dict)
    """The processes of the ranks that write to the same file system, by rank."""

    @property
    def staging(self) -> Path:
        """The folder that this rank writes its files to before the commit."""
        return self.store.folder


@dataclass
class PendingSave:
    """The work that is left for one rank once the state of a checkpoint has been captured.

    Attributes:
        target: The destination of the files.
        manifest: The manifest, which the committing rank completes and writes.
        state_files: The files that this rank writes. Each value is released once its file is written.
        after_commit: The function to call once the checkpoint is committed.
        snapshot: The copies to write, or None if the original tensors are written.
        optimizers: The optimizers whose next step must wait until the snapshot is filled.
        step_hooks: The hooks that make these optimizers wait.
        process_group: The process group of the ranks' threads. If None, the work is done in the caller's thread, with
            torch's default group.
        thread: The thread that does the work, or None for the caller's thread.
        error: The error if the work failed, otherwise None.
    """

    target: SaveTarget
    manifest: Manifest
    state_files: list[StateFile]
    after_commit: Callable[[], None]
    snapshot: Snapshot | None = None
    optimizers: list[Any] = field(default_factory=list)
    step_hooks: list[Any] = field(default_factory=list)
    process_group: Any = None
    thread: threading.Thread | None = None
    error: BaseException | None = None
    _finished: threading.Event = field(default_factory=threading.Event)
    _records: FileRecords = field(default_factory=dict)
    _failure_shared: bool = False

    def start(self) -> None:
        """Start `run` in a thread that is not a daemon, so that the interpreter waits for the checkpoint."""
        if self.snapshot is not None:
            copied = self.snapshot.copied
            self.step_hooks = [
                optimizer.register_step_pre_hook(lambda *_: copied.wait() and None) for optimizer in self.optimizers
            ]
        self.thread = threading.Thread(target=self.run, name=f"save_state {self.target.folder.name}")
        try:
            self.thread.start()
        except RuntimeError as error:  # The limit on threads is reached, or the interpreter is exiting.
            self.thread = None
            self.run()
            warn_once(f"save_state(blocking=False) wrote the checkpoint in the foreground: {error}.")

    def join(self) -> None:
        """Wait for the thread, if there is one. After an interrupt, the caller can call this again."""
        if self.thread is not None:
            # Before Python 3.13, a thread is considered finished once its join has been interrupted (gh-90882).
            self._finished.wait()
            self.thread.join()
        # Remove the hooks in the caller's thread, because that is where optimizers run them.
        for hook in self.step_hooks:
            hook.remove()

    def run(self) -> None:
        """Write this rank's files, report the result, and commit if this rank is the one that commits.

        Errors are kept in `error`.
        """
        try:
            if self.thread is not None:
                device_table.select_again()
            self._fill_snapshot()
            self._write_files()
            delivered = self.target.store.deliver(self.target.rank, self._records)
            files = {name: asdict(record) for name, record in delivered.items()}
            self.target.store.write_report(self.target.rank, {"files": files})
            if self.target.commits:
                self._commit()
        except BaseException as error:  # noqa: BLE001 - any error in a writer makes this checkpoint fail
            self._record_failure(error)
            own = getattr(error, "failures", {}).get(self.target.rank, error)
            if not isinstance(own, Exception):  # Raise an interrupt itself, without its wrapper for other ranks.
                raise own from None
        finally:
            self.state_files, self.snapshot = [], None  # Free the memory, which may be gigabytes.
            self._finished.set()

    def _fill_snapshot(self) -> None:
        """Fill the deferred copies. If ranks write together, either all continue or all raise."""
        failure: CheckpointError | None = None
        try:
            if self.snapshot is not None:
                self.snapshot.finish()
        except Exception as error:  # noqa: BLE001 - raised below, after it has been reported to the other ranks
            failure = self._checkpoint_error(error)
        if self.process_group is not None:
            failures = gather_failures(self.process_group, "" if failure is None else str(failure))
            self._failure_shared = bool(failures)
            if failures and failure is None:
                raise CheckpointError("; ".join(f"Rank {rank}: {text}" for rank, text in failures.items()))
        if failure is not None:
            raise failure

    def _write_files(self) -> None:
        for file in self.state_files:
            path = self.target.staging / file.name
            if file.write is not None:
                for name, (size, crc) in file.write(file.value, path, self.process_group).items():
                    self._records[f"{file.name}/{name}"] = FileRecord(size=size, crc32=f"{crc:08x}")
            else:
                if path.parent != self.target.staging:
                    path.parent.mkdir(parents=True, exist_ok=True)
                write_file(file.value, path)
                self._records[file.name] = make_record(path)
                self.target.store.sync(path)
            file.value = None

    def _record_failure(self, error: BaseException) -> None:
        self.error = self._checkpoint_error(error)
        if self.thread is not None:
            # Training continues, so log the error now. It is raised in the next save or at the end of training.
            _log.error("%s", self.error)
        # If the failure was shared, the committing rank already knows about it, and may be removing the staging folder.
        shared = self._failure_shared or hasattr(error, "failures")
        if not (shared or self.target.commits):
            # If the store cannot be reached, the committing rank fails, too.
            with contextlib.suppress(CheckpointError):
                self.target.store.write_report(self.target.rank, {"error": str(self.error)})
        self.target.store.discard(self.target.commits)

    def _checkpoint_error(self, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        explained = self._dead_peer_error(error) or self._other_rank_error(error)
        if explained is None and not self.target.commits and not self.target.staging.is_dir():
            explained = CheckpointError(f"The checkpoint {self.target.folder} was not written: another rank failed.")
        explained = explained or self.target.store.write_error(error)
        explained.__cause__ = error
        return explained

    def _dead_peer_error(self, error: BaseException) -> CheckpointError | None:
        """Return an error that names the dead rank, if a collective between threads failed because a rank died."""
        if self.process_group is None or not isinstance(error, RuntimeError) or hasattr(error, "failures"):
            return None
        deadline = time.monotonic() + _EXIT_GRACE
        while True:  # A dying process closes its connections just before it exits.
            for rank, peer in self.target.peers.items():
                if peer.has_ended():
                    return self._unfinished_error(rank, f"because its process {peer.pid} has ended")
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    def _unfinished_error(self, rank: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {self.target.folder} was not written: rank {rank} did not finish its part, {reason}."
        )

    def _other_rank_error(self, error: BaseException) -> CheckpointError | None:
        """Return the error of the rank whose failure made all ranks raise, or None if ranks do not write together."""
        failures = getattr(error, "failures", {})
        if not failures:
            return None
        rank = self.target.rank if self.target.rank in failures else min(failures)
        explained = self.target.store.write_error(failures[rank])
        return explained if rank == self.target.rank else CheckpointError(f"Rank {rank}: {explained}")

    def _commit(self) -> None:
        parts = [self._wait_for_report(rank, peer) for rank, peer in self.target.peers.items()]
        self.target.store.commit(self.manifest, parts)
        try:
            self.after_commit()
        except (CheckpointError, OSError) as error:  # An old checkpoint may be in use, or already removed.
            written = f"{self.target.folder} is written"
            warn_once(f"{written}, but checkpoints above total_limit could not be removed: {error}")

    def _wait_for_report(self, rank: int, peer: ProcessIdentity) -> FileRecords:
        store = self.target.store
        watch = _PeerWatch(store, rank, peer)
        while (content := store.read_report(rank)) is None:
            if reason := watch.death_reason():
                if (content := store.read_report(rank)) is not None:  # The rank may have reported just before exiting.
                    break
                raise self._unfinished_error(rank, reason)
            time.sleep(store.poll_interval)
        if "error" in content:
            raise CheckpointError(f"Rank {rank}: {content['error']}")
        return {name: FileRecord(**record) for name, record in content["files"].items()}


class _PeerWatch:
    """Detects that a rank will never report.

    Args:
        store: The store that the rank writes to.
        rank: The rank that is watched.
        peer: The process of the rank.
    """

    def __init__(self, store: CheckpointStore, rank: int, peer: ProcessIdentity) -> None:
        self._store = store
        self._rank = rank
        self._peer = peer
        self._activity: object = object()
        self._active_at = time.monotonic()
        self._next_check = 0.0

    def death_reason(self) -> str:
        """Return why the rank will never report, or "" if it still may.

        The operating system is queried at most once per second.
        """
        now = time.monotonic()
        if now < self._next_check:
            return ""
        self._next_check = now + 1.0
        if self._peer.has_ended():
            return f"because its process {self._peer.pid} has ended"
        activity = self._store.activity(self._rank)
        if activity is None:
            return f"and {self._store.folder} no longer exists"
        if activity != self._activity:
            self._activity, self._active_at = activity, now
        silent = now - self._active_at > _SILENCE_LIMIT
        return f"and nothing was written for {_SILENCE_LIMIT / 60:.0f} minutes" if silent else ""
