"""What DeepSpeed compiles on a machine when it is first used: with its tools found, and no lock of a dead process."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import util
from pathlib import Path

import psutil

from notebook_accelerate.config import environ
from notebook_accelerate.state.warn_once import warn_once

_OF_CONTAINER = frozenset({"overlay", "ramfs", "tmpfs"})
"""Types of file systems that a container has for itself."""
_OF_MACHINE = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"})
"""Types of file systems that a machine has for itself; its containers may share one."""
_FIRST_PIDS = "pid:[4026531836]"
"""The machine's own name space of process ids (PROC_PID_INIT_INO of Linux): whoever has it sees all processes."""
_AGAIN = 0.2
"""Seconds between two looks at a lock: one that is being given up is closed a moment before it is removed."""


def compiling() -> AbstractContextManager[None]:
    """Let DeepSpeed compile: locks that dead processes have left are removed, and inside the block ninja is found.

    Returns:
        The block.
    """
    remove_dead_locks(extensions())
    return _tools_on_path()


def extensions() -> Path:
    """Return the folder in which torch compiles extensions, without torch's own word: that takes a second to import.

    Returns:
        What torch.utils.cpp_extension.get_default_build_root returns on Linux, or TORCH_EXTENSIONS_DIR.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or caches / "torch_extensions")


@contextmanager
def _tools_on_path() -> Iterator[None]:
    """Let DeepSpeed find ninja inside the block, where it is installed beside a Python that is not activated."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja") is None and util.find_spec("ninja") is not None and (beside / "ninja").exists():
        with environ.patch_environment(PATH=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"):
            yield
    else:
        yield


def remove_dead_locks(root: Path) -> list[Path]:
    """Remove the locks in a folder of torch's extensions whose processes have died; others wait for them for ever.

    torch keeps a lock (torch.utils.file_baton) open while it compiles, and removes it even when that fails; only a
    process that is killed leaves it.

    Args:
        root: The folder; its folders hold an extension each, or those of a version of Python.

    Returns:
        The locks that were removed. Of a lock that nobody on this machine holds, but somebody elsewhere may, only a
        warning tells.
    """
    suspects = [lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern) if not _may_be_held(lock)]
    if not suspects:
        return []
    before = {lock: _identity(lock) for lock in suspects}
    time.sleep(_AGAIN)
    return [lock for lock in suspects if not _may_be_held(lock) and _remove(lock, before[lock])]


def _remove(lock: Path, seen: tuple[int, int] | None) -> bool:
    kind = _file_system(lock.resolve())
    if not _is_seen_whole(kind):
        warn_once(
            f"{lock} says that an extension is being compiled, but no process that is seen from here does that, and "
            f"ranks wait until the file is gone; if none does on another machine or in another container that has "
            f"this {kind or 'file system'} either: rm {lock}"
        )
        return False
    if seen is None or seen != _identity(lock):
        return False  # another rank was faster, and may compile already
    lock.unlink(missing_ok=True)
    warn_once(f"removed {lock}: who compiled an extension there was killed, and ranks would wait for it for ever")
    return True


def _is_seen_whole(kind: str) -> bool:
    """Say whether /proc shows all processes that can use a file system of this type."""
    return kind in _OF_CONTAINER or (kind in _OF_MACHINE and str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PIDS)


def _identity(lock: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = lock.stat()
        return found.st_ino, found.st_ctime_ns
    return None


def _may_be_held(lock: Path) -> bool:
    """Say whether a process has a file open, or could have without being seen."""
    processes = Path("/proc")
    if not (processes / "self" / "fd").exists():
        return True
    try:
        wanted = lock.stat()
        return any(_holds(process, wanted) for process in processes.iterdir() if process.name.isdigit())
    except FileNotFoundError:
        return True  # it has just been given up


def _holds(process: Path, wanted: os.stat_result) -> bool:
    try:
        if process.stat().st_uid != wanted.st_uid:
            return False  # it could not have made the file
        descriptors = list((process / "fd").iterdir())
    except PermissionError:
        return not _has_ended(process)
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended
    for descriptor in descriptors:
        with suppress(OSError):
            found = descriptor.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _has_ended(process: Path) -> bool:
    """Say whether a process waits for its parent only: its files are closed, but are nobody's to list."""
    try:
        return psutil.Process(int(process.resolve().name)).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _file_system(path: Path) -> str:
    """Return the type of the file system that a path is on, as the kernel calls it; empty where that is not known."""
    best, kind = -1, ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, found, *_ = line.split()
            if path.is_relative_to(place.replace("\\040", " ")) and len(place) >= best:
                best, kind = len(place), found
    return kind


__all__ = ["compiling", "extensions", "remove_dead_locks"]
