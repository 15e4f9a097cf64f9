"""The lock on a checkpoint's folder. It lets only one process write there, and shows whether that process is alive.

The process locks a file with flock. The system releases the lock when the process exits, even on network file systems.
If flock is not supported, or if a forked child still holds the lock, the lock belongs to the process that is
named in the file, until that process exits.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
import weakref
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.files.remote_paths import AnyPath
from notebook_accelerate.hardware.process_liveness import UNKNOWN, ProcessIdentity, parse_identity, this_process

_TRIES = 200
"""The number of attempts before a lock is considered held. Other processes may merely be inspecting or removing it."""
_PAUSE = 0.005
_MAX_BYTES = 4096
_UNSUPPORTED = {errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP}
_held: weakref.WeakSet[SaveLock] = weakref.WeakSet()


class LockHeldError(CheckpointError):
    """Raised when another process holds the lock.

    Attributes:
        owner: A description of the process that holds the lock, for messages.
    """

    def __init__(self, path: Path, owner: ProcessIdentity | None) -> None:
        self.owner = str(owner or UNKNOWN)
        super().__init__(f"{self.owner} holds the lock {path}")


def second_writer_error(target: AnyPath, owner: str) -> str:
    """Return the error message for a run that saves to the same folder as another run.

    Args:
        target: The folder of the checkpoint.
        owner: A description of the process that is saving, such as `LockHeldError.owner`.
    """
    return (
        f"The checkpoint {target} was not written: {owner} is saving to this folder. Its previous content is "
        'unchanged. Save each run to a separate folder: accelerator.save_state("my_checkpoint_2")'
    )


class SaveLock:
    """A lock that this process holds. Use `acquire_lock` to create one.

    Args:
        path: The file that is locked.
        descriptor: The descriptor of the open file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _held.add(self)

    def is_held(self) -> bool:
        """Return whether the lock file still exists. A user or a clean-up script may have removed it."""
        return self._descriptor is not None and _same_file(self.path, self._descriptor)

    def release(self) -> None:
        """Remove the file and release the lock, unless this has already been done."""
        if self._descriptor is None:
            return
        if self.is_held():
            with suppress(OSError):
                self.path.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Close the file without removing it, as a forked child does with its parent's lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> SaveLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        with suppress(Exception):  # The interpreter may be shutting down.
            self.release()


def _forget_parents_locks() -> None:
    for lock in list(_held):
        lock.abandon()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_locks)


def acquire_lock(path: Path) -> SaveLock:
    """Lock a folder for this process.

    Args:
        path: The file to lock, in an existing folder.

    Raises:
        LockHeldError: Another process holds the lock.
        OSError: The file cannot be created.
    """
    owner = None
    for attempt in range(_TRIES):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except PermissionError:
            _remove_of_another_user(path)
            continue
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileExistsError(errno.EEXIST, "not a lock file; remove it", str(path))
            if _try_lock(descriptor) and _same_file(path, descriptor):
                _write_owner(descriptor)
                lock, descriptor = SaveLock(path, descriptor), -1
                return lock
            owner = _read_owner(descriptor)
            if owner is not None and owner.has_ended() and attempt > _TRIES // 4 and _same_file(path, descriptor):
                path.unlink()  # The owner is dead, but a process that it forked holds the flock.
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        time.sleep(_PAUSE)
    raise LockHeldError(path, owner)


def _remove_of_another_user(path: Path) -> None:
    """Remove the lock of another user's process, if that process has exited.

    Raises:
        LockHeldError: The other process is alive.
        PermissionError: The folder is not writable.
    """
    if not path.exists():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))
    if (owner := live_owner(path)) is not None:
        raise LockHeldError(path, owner)
    path.unlink()


def live_owner(path: Path) -> ProcessIdentity | None:
    """Return the process that holds a lock, or None if no process holds it.

    This function does not change anything, and needs no write permission.

    Args:
        path: The lock file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return UNKNOWN
    except OSError:
        return None
    try:
        owner = _read_owner(descriptor)
        if owner is not None and owner.has_ended():
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return owner or UNKNOWN
        except OSError:
            return owner
        return None
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Acquire the lock if it is free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return _try_without_flock(descriptor)
    return True


def _try_without_flock(descriptor: int) -> bool:
    """Acquire the lock by writing this process to its file.

    If two processes do this at the same time, the later one wins.
    """
    owner = _read_owner(descriptor)
    if owner is not None and not owner.has_ended():
        return False
    _write_owner(descriptor)
    time.sleep(4 * _PAUSE)
    return _read_owner(descriptor) == this_process()


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        there, here = path.lstat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _write_owner(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(this_process())).encode(), 0)


def _read_owner(descriptor: int) -> ProcessIdentity | None:
    """Return the process that a lock file names, or None if the file does not name a process."""
    try:
        return parse_identity(json.loads(os.pread(descriptor, _MAX_BYTES, 0)))
    except (OSError, ValueError, RecursionError):
        return None
