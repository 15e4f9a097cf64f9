"""Temporary folders for files on their way to and from remote stores.

Each is locked by its process. The next process removes the folders, perhaps gigabytes, that a killed one left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "notebook_accelerate-"
_LOCK = ".lock"
_locks: dict[Path, int] = {}


def make() -> Path:
    """Make an empty folder, and remove those of ended processes; see `remove`."""
    _remove_abandoned()
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getuid()}-", suffix=_LOCK)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # otherwise another process removed it before it was locked
            break
        os.close(descriptor)
    folder = Path(name.removesuffix(_LOCK))
    folder.mkdir(mode=0o700)
    _locks[folder] = descriptor
    return folder


def remove(folder: Path) -> None:
    """Remove a folder and its contents.

    Args:
        folder: A folder from `make`; it may be missing.
    """
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _locks.pop(folder, None)
    if descriptor is not None:
        _lock_of(folder).unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for the time of a context."""
    folder = make()
    try:
        yield folder
    finally:
        remove(folder)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.getuid()}-*{_LOCK}"):
        with contextlib.suppress(OSError):  # in use, or another process removes it too
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
                lock.unlink()
            finally:
                os.close(descriptor)
