"""One save on its way to the disk: every rank's files, then the manifest, then the place.

The ranks report through small files in the staging folder rather than through collectives, which a thread must not use
while training does. Only for states in pieces, which torch's distributed checkpoints write, the threads have a process
group of their own. One rank per file system commits: the main one, or the first of a machine with disks of its own.
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

from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.checkpointing import tensor_files
from notebook_accelerate.checkpointing.capture import StateFile
from notebook_accelerate.checkpointing.checkpoint_stores import Records, Store
from notebook_accelerate.checkpointing.manifest import FileRecord, Manifest, record_of
from notebook_accelerate.checkpointing.process_liveness import ProcessIdentity
from notebook_accelerate.checkpointing.rank_agreement import failures_in
from notebook_accelerate.checkpointing.snapshot import Snapshot
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state.warn_once import warn_once

_STALL = 600.0
"""Seconds without any change in the staging folder after which a silent rank counts as dead."""
_DYING = 2.0
"""Seconds in which a process whose connections are closed is given up for alive."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SaveTarget:
    """Where a checkpoint goes, as one rank sees it."""

    target: AnyPath
    """The checkpoint's folder."""
    store: Store
    """How it gets there."""
    rank: int
    """This rank."""
    commits: bool
    """Whether this rank moves the staging folder to its place."""
    group: dict[int, ProcessIdentity] = field(default_factory=dict)
    """The ranks that write to this file system, and their processes."""

    @property
    def staging(self) -> Path:
        """Where this rank writes its files first."""
        return self.store.folder


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

    place: SaveTarget
    manifest: Manifest
    state_files: list[StateFile]
    after: Callable[[], None]
    snapshot: Snapshot | None = None
    optimizers: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    group: Any = None
    thread: threading.Thread | None = None
    error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _records: Records = field(default_factory=dict)
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
        """Wait for the thread, where there is one; an interrupt may come, and whoever calls again waits again."""
        if self.thread is not None:
            self._over.wait()  # Python before 3.13 takes a thread whose join was interrupted for ended (gh-90882)
            self.thread.join()
        for hook in self.hooks:  # here, in the caller's thread: an optimizer may be running its hooks
            hook.remove()

    def run(self) -> None:
        """Write this rank's files, report, and commit where that is this rank's part; errors end up in `error`."""
        try:
            self._fill_copies()
            self._write_files()
            brought = self.place.store.deliver(self.place.rank, self._records)
            self._report({"files": {name: asdict(record) for name, record in brought.items()}})
            if self.place.commits:
                self._commit()
        except BaseException as error:  # noqa: BLE001 - whatever a writer raises is this checkpoint's failure
            self._fail(error)
            own = getattr(error, "failures", {}).get(self.place.rank, error)
            if not isinstance(own, Exception):  # an interrupt: where ranks agree on errors, it went the way of these
                raise own from None
        finally:
            self.state_files, self.snapshot = [], None  # a gigabyte of references
            self._over.set()

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
                tensor_files.write(file.value, path)
                self._records[file.name] = record_of(path)
                self.place.store.flush(path)
            file.value = None

    def _report(self, content: dict[str, object]) -> None:
        self.place.store.report(self.place.rank, content)

    def _fail(self, error: BaseException) -> None:
        self.error = self._explained(error)
        if self.thread is not None:
            _log.error("%s", self.error)  # the training goes on: say it now, raise it at the next save or the end
        known = self._known or hasattr(error, "failures")  # to the committing rank, which may be removing all already
        if not (known or self.place.commits):
            with contextlib.suppress(CheckpointError):  # a store that cannot be told: it is given up there too
                self._report({"error": str(self.error)})
        self.place.store.discard(self.place.commits)

    def _explained(self, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        explained = self._lost(error) or self._of_another_rank(error)
        if explained is None and not self.place.commits and not self.place.staging.is_dir():
            explained = CheckpointError(f"The checkpoint {self.place.target} was not written: another rank gave it up.")
        explained = explained or self.place.store.explain(error)
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
        explained = self.place.store.explain(failures[rank])
        return explained if rank == self.place.rank else CheckpointError(f"Rank {rank}: {explained}")

    def _commit(self) -> None:
        parts = [self._await_report(rank, peer) for rank, peer in self.place.group.items()]
        self.place.store.commit(self.manifest, parts)
        try:
            self.after()
        except (CheckpointError, OSError) as error:  # those may be in use, or gone already
            written = f"{self.place.target} is written"
            warn_once(f"{written}, but checkpoints above total_limit could not be removed: {error}")

    def _await_report(self, rank: int, peer: ProcessIdentity) -> Records:
        store = self.place.store
        watch = _Watch(store, rank, peer)
        while (content := store.reported(rank)) is None:
            if reason := watch.lost():
                if (content := store.reported(rank)) is not None:  # its report may be the last thing it did
                    break
                raise self._unfinished(rank, reason)
            time.sleep(store.pause)
        if "error" in content:
            raise CheckpointError(f"Rank {rank}: {content['error']}")
        return {name: FileRecord(**record) for name, record in content["files"].items()}


class _Watch:
    """Notices when a rank will not write any more.

    Args:
        store: Where it writes.
        rank: The rank.
        peer: The rank's process.
    """

    def __init__(self, store: Store, rank: int, peer: ProcessIdentity) -> None:
        self._store = store
        self._rank = rank
        self._peer = peer
        self._activity: object = object()
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
        activity = self._store.activity(self._rank)
        if activity is None:
            return f"and {self._store.folder} is gone"
        if activity != self._activity:
            self._activity, self._since = activity, now
        silent = now - self._since > _STALL
        return f"and nothing was written for {_STALL / 60:.0f} minutes" if silent else ""
