"""Private temporary folders for the ranks of a run, for traces, and for files on their way to or from remote stores.

Each folder is locked by its process. The next process that creates such a folder removes the folders of killed
processes, which may contain gigabytes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "notebook_accelerate-"
_LOCK = ".lock"
_locks: dict[Path, int] = {}


def make_private_folder(parent: Path | None = None) -> Path:
    """Create an empty folder with mode 0700, and remove the folders of processes that have exited.

    See `remove_private_folder`.

    Args:
        parent: The parent folder. If None, the system's folder for temporary files is used.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getuid()}-", suffix=_LOCK, dir=parent)
        folder = Path(name.removesuffix(_LOCK))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # Otherwise, another process removed the file before it was locked.
                folder.mkdir(mode=0o700)
                _locks[folder] = descriptor
                return folder
        except FileExistsError:  # Another user has seen the lock's name, and taken the folder's name.
            pass
        finally:
            if folder not in _locks:
                Path(name).unlink(missing_ok=True)
                os.close(descriptor)


def make_private_folder_for(owner: object) -> Path:
    """Create a folder that is removed together with an object, or when this process exits."""
    folder = make_private_folder()
    weakref.finalize(owner, _remove_of, os.getpid(), folder)
    return folder


def _remove_of(process: int, folder: Path) -> None:
    if os.getpid() == process:  # A forked process must not remove its parent's folder.
        remove_private_folder(folder)


def remove_private_folder(folder: Path) -> None:
    """Remove a folder and its contents.

    Args:
        folder: A folder from `make_private_folder`, which may already have been removed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _locks.pop(folder, None)
    if descriptor is not None:
        _lock_of(folder).unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a folder that exists inside the block."""
    folder = make_private_folder()
    try:
        yield folder
    finally:
        remove_private_folder(folder)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}{os.getuid()}-*{_LOCK}"):
        with suppress(OSError):  # The folder may be in use, or another process may be removing it.
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if os.fstat(descriptor).st_uid != os.getuid():  # Other users can create files in /tmp, too.
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
                lock.unlink()
            finally:
                os.close(descriptor)
