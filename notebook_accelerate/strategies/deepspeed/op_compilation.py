"""Compilation of DeepSpeed's operators at their first use: finds ninja, and removes locks of dead processes."""

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

_CONTAINER_FILE_SYSTEMS = frozenset({"overlay", "ramfs", "tmpfs"})
"""Types of file systems that a container does not share."""
_MACHINE_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"})
"""Types of file systems that a machine does not share; its containers may share one."""
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The machine's initial namespace of process ids (PROC_PID_INIT_INO of Linux), in which all processes are visible."""
_RECHECK_SECONDS = 0.2
"""Seconds between two checks of a lock: torch closes a lock a moment before it removes it."""


def compilation_context() -> AbstractContextManager[None]:
    """Remove the locks of dead processes, and return a context in which DeepSpeed finds ninja.

    Returns:
        A context manager for the compilation.
    """
    remove_dead_locks(extensions_folder())
    return _tools_on_path()


def extensions_folder() -> Path:
    """Return the folder in which torch compiles extensions; torch's own function takes a second to import.

    Returns:
        The result of torch.utils.cpp_extension.get_default_build_root on Linux, or TORCH_EXTENSIONS_DIR.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or caches / "torch_extensions")


@contextmanager
def _tools_on_path() -> Iterator[None]:
    """Put ninja on PATH inside the block, where it is installed beside a Python that is not activated."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja") is None and util.find_spec("ninja") is not None and (beside / "ninja").exists():
        with environ.patch_environment(PATH=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"):
            yield
    else:
        yield


def remove_dead_locks(root: Path) -> list[Path]:
    """Remove the locks in a folder of torch's extensions whose processes have died; others wait for them forever.

    torch keeps a lock (torch.utils.file_baton) open while it compiles, and removes it also on failure; only a killed
    process leaves it.

    Args:
        root: The folder; each of its folders contains an extension, or the extensions of a version of Python.

    Returns:
        The removed locks. A lock that no process on this machine holds, but one elsewhere may, stays with a warning.
    """
    suspects = [lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern) if not _may_be_held(lock)]
    if not suspects:
        return []
    before = {lock: _identity(lock) for lock in suspects}
    time.sleep(_RECHECK_SECONDS)
    return [lock for lock in suspects if not _may_be_held(lock) and _remove(lock, before[lock])]


def _remove(lock: Path, seen: tuple[int, int] | None) -> bool:
    kind = _file_system_type(lock.resolve())
    if not _shows_all_processes(kind):
        warn_once(
            f"{lock} marks an extension as being compiled, but no process visible from here compiles it, and ranks "
            f"wait until the file is removed; if no process on another machine or in another container with this "
            f"{kind or 'file system'} compiles it either: rm {lock}"
        )
        return False
    if seen is None or seen != _identity(lock):
        return False  # another rank was faster, and may compile already
    lock.unlink(missing_ok=True)
    warn_once(f"removed {lock}: the process that compiled there was killed, and ranks would wait for it forever")
    return True


def _shows_all_processes(kind: str) -> bool:
    """Return whether /proc shows all processes that can use a file system of this type."""
    return kind in _CONTAINER_FILE_SYSTEMS or (
        kind in _MACHINE_FILE_SYSTEMS and str(Path("/proc/self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
    )


def _identity(lock: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = lock.stat()
        return found.st_ino, found.st_ctime_ns
    return None


def _may_be_held(lock: Path) -> bool:
    """Return whether a process has a file open, or may have it open invisibly."""
    processes = Path("/proc")
    if not (processes / "self" / "fd").exists():
        return True
    try:
        wanted = lock.stat()
        return any(_has_open(process, wanted) for process in processes.iterdir() if process.name.isdigit())
    except FileNotFoundError:
        return True  # it was released just now


def _has_open(process: Path, wanted: os.stat_result) -> bool:
    try:
        if process.stat().st_uid != wanted.st_uid:
            return False  # it could not have created the file
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
    """Return whether a process is a zombie: its files are closed, but cannot be listed."""
    try:
        return psutil.Process(int(process.resolve().name)).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _file_system_type(path: Path) -> str:
    """Return the kernel's name for the type of a path's file system; "" where it is not known."""
    mounts = []
    with suppress(OSError):  # a sandbox may hide /proc/filesystems or the mounts
        mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    mounts.sort(key=lambda mount: len(mount.mountpoint))  # of several on one folder, the last one is visible
    return mounts[-1].fstype if mounts else ""
