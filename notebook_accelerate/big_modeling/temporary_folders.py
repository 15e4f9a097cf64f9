"""Folders in the temporary files of a machine, for what goes to a remote store or comes from there.

Each is locked by its process: what a killed one has left, gigabytes perhaps, is removed by the next.
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
    """Make an empty folder, and remove those of processes that have ended; see `remove`."""
    _sweep()
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getuid()}-", suffix=_LOCK)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # otherwise another process has swept it away before it was locked
            break
        os.close(descriptor)
    folder = Path(name.removesuffix(_LOCK))
    folder.mkdir(mode=0o700)
    _locks[folder] = descriptor
    return folder


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it.

    Args:
        folder: What `make` returned; one that has gone already is no matter.
    """
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _locks.pop(folder, None)
    if descriptor is not None:
        _lock_of(folder).unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a folder for the time of a context."""
    folder = make()
    try:
        yield folder
    finally:
        remove(folder)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _sweep() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{os.getuid()}-*{_LOCK}"):
        with contextlib.suppress(OSError):  # another process sweeps too
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
                lock.unlink()
            finally:
                os.close(descriptor)


__all__ = ["make", "remove", "scratch"]
