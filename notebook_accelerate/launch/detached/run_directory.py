"""The directory of a user's detached runs and of the live runs of kernels, with a file and a socket for each run."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.files import guarded_files
from notebook_accelerate.hardware.process_liveness import parse_identity, this_process

LISTED_SECONDS = 30 * 86400.0
"""Seconds from a detached run's launch until it is no longer listed, unless it is running. Its folder remains."""
_MAX_ENTRY_BYTES = 1 << 16


@dataclass(frozen=True)
class DirectoryEntry:
    """The entry of a run, which lets other processes of the user find the run.

    Attributes:
        name: The run's name.
        folder: The folder where the run is kept, or "" if it is not kept. A detached run is always kept.
        socket: The path of the socket over which other processes control the run's process.
        created: When the run was launched, in seconds since the epoch.
        process: The identity of the run's process; see ``hardware.process_liveness``.
        origin: Where the run was launched: "pid", and "folder" and "notebook" if they are known.
        detached: Whether the run is detached. Otherwise, a kernel supervises the run, and the entry exists only while
            the run is live.
        ranks: The number of ranks on this machine.
    """

    name: str
    folder: str
    socket: str
    created: float
    process: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)
    detached: bool = True
    ranks: int = 0

    @property
    def label(self) -> str:
        """The run's name with the process id, which is unique among the live runs of different processes."""
        return f"{self.name}@{self.process.get('pid', 0)}"

    @property
    def lives(self) -> bool:
        """Whether the run's process is known to be alive."""
        identity, here = parse_identity(self.process), this_process()
        if identity is None or identity.machine != here.machine:
            return False
        if here.machine:
            return not identity.has_ended()
        # This machine has no id, as on macOS. Only detached runs lock their names.
        return _is_claimed(self.name) if self.detached else Path(self.socket).exists()

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have exited. If it is on another machine or in a container, this is False."""
        identity = parse_identity(self.process)
        return identity is None or identity.has_ended()


def runs_folder() -> Path:
    """Return the folder for detached runs that are launched without ``save``. A new folder is private to the user.

    Raises:
        LaunchError: The user has no home directory, or other users can replace the contents of the folder.
    """
    folder = guarded_files.state_folder() / "runs"
    try:
        guarded_files.make_folder(folder, private=False)
    except OSError as error:
        raise LaunchError(_advice(error)) from error
    return folder


def new_socket() -> Path:
    """Return an unused path for a socket, in a private folder of the user.

    Raises:
        LaunchError: No private folder can be created.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    folders = [base / "notebook-accelerate"] if base.is_absolute() and guarded_files.is_own_folder(base) else []
    folders.append(guarded_files.state_folder() / "sockets")
    problem = OSError()
    for folder in folders:
        try:
            guarded_files.make_folder(folder)
        except OSError as error:
            problem = error
        else:
            return folder / secrets.token_hex(8)
    raise LaunchError(_advice(problem)) from problem


def _advice(problem: OSError) -> str:
    return (
        f"detached runs need a folder that no other user can change: {problem}. "
        "Fix its permissions, or set XDG_STATE_HOME to a directory you own"
    )


def add_entry(entry: DirectoryEntry) -> Path:
    """Write the entry of a run, so that other processes find the run. Return the path of the entry's file.

    Raises:
        LaunchError: The user has no home directory.
        OSError: The file cannot be written.
    """
    folder = _entries_folder() if entry.detached else _live_folder()
    guarded_files.make_folder(folder)
    path = folder / f"{secrets.token_hex(8)}.json"
    part = path.with_suffix(".new")
    part.write_text(json.dumps(asdict(entry)))
    part.replace(path)
    return path


def check_records() -> None:
    """Check that no other user can change the records of detached runs. If others can, `entries` ignores the records.

    Raises:
        LaunchError: Another user can change the records.
    """
    try:
        guarded_files.check_folder(_entries_folder(), private=False)
    except guarded_files.ForeignFileError as error:
        raise LaunchError(_advice(error)) from error
    except OSError:  # The folder does not exist until the user launches a detached run.
        pass


def entries() -> list[DirectoryEntry]:
    """Return the entries of the user's detached runs, oldest first.

    Entries of ended runs are removed if the run was launched more than `LISTED_SECONDS` ago, or if its folder is gone.
    """
    found = []
    for path in _files():
        entry = _read(path)
        if entry is None:
            continue
        lives = entry.lives
        if not lives and (time.time() - entry.created > LISTED_SECONDS or is_gone(Path(entry.folder))):
            with suppress(OSError):
                path.unlink()
        else:
            found.append(entry)
        if entry.has_ended:
            _remove_socket(Path(entry.socket))
    return sorted(found, key=lambda entry: (entry.created, entry.folder))


def live_entries() -> list[DirectoryEntry]:
    """Return the entries of the live runs of kernels, oldest first. Entries of killed kernels are removed."""
    found = []
    for path in _files(live=True):
        entry = _read(path)
        if entry is None or entry.detached:
            continue
        if entry.has_ended:
            remove_files(path, Path(entry.socket))
        elif entry.lives:
            found.append(entry)
    return sorted(found, key=lambda entry: (entry.created, entry.socket))


def all_entries() -> list[DirectoryEntry]:
    """Return the entries of the user's detached runs, and of the live runs of the user's kernels."""
    return [*entries(), *live_entries()]


def remove_files(path: Path, socket: Path) -> None:
    """Remove the file of an entry, and its socket."""
    with suppress(OSError):
        path.unlink()
    _remove_socket(socket)


def _remove_socket(path: Path) -> None:
    """Remove the socket of a killed process. Leave any other file alone, because an entry may name any path."""
    with suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def is_gone(folder: Path) -> bool:
    """Return whether a folder is known to be gone. If its disk cannot be reached or read, return False."""
    try:
        return not stat.S_ISDIR(folder.stat().st_mode)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)


def claim_name(name: str) -> int | None:
    """Claim the name of a detached run. Only one process at a time can hold a name.

    Returns:
        The descriptor of a locked file, or None if another process holds the name. The name is held until
        `release_name` is called, or until all processes that have the file open have exited.

    Raises:
        LaunchError: Other users can replace the contents of the folder for entries.
        OSError: The file cannot be created.
    """
    try:
        guarded_files.make_folder(_entries_folder())
    except guarded_files.ForeignFileError as error:
        raise LaunchError(_advice(error)) from error
    path = _claim_file(name)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(descriptor):
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # The previous holder has removed the file since it was opened here, so try again.


def _is_claimed(name: str) -> bool:
    """Return whether a running process holds the lock on a run's name."""
    try:
        descriptor = os.open(_claim_file(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # The file system does not support locks.
        pass
    return True


def release_name(name: str, descriptor: int) -> None:
    """Release a name claimed with `claim_name`, even if other processes still have the file open."""
    with suppress(OSError):
        _claim_file(name).unlink()
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _claim_file(name: str) -> Path:
    return _entries_folder() / f"{name}.lock"


def _files(*, live: bool = False) -> list[Path]:
    try:
        folder = _live_folder() if live else _entries_folder()
        return list(folder.glob("*.json")) if guarded_files.is_own_folder(folder) else []
    except (LaunchError, OSError):
        return []


def _entries_folder() -> Path:
    return guarded_files.state_folder() / "detached"


def _live_folder() -> Path:
    return guarded_files.state_folder() / "live"


def _read(path: Path) -> DirectoryEntry | None:
    try:
        content = guarded_files.parse_json(guarded_files.read_limited(path, _MAX_ENTRY_BYTES, own=True))
        guarded_files.check_depth(content)
        known = {each.name for each in fields(DirectoryEntry)}  # The entry of a newer version may have more fields.
        entry = DirectoryEntry(**{name: value for name, value in content.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    texts = all(isinstance(text, str) for text in (entry.name, entry.folder, entry.socket))
    maps = all(isinstance(each, dict) for each in (entry.origin, entry.process))
    if not texts or not maps or not (isinstance(entry.created, (int, float)) and math.isfinite(entry.created)):
        return None
    kinds = type(entry.detached) is bool and type(entry.ranks) is int
    kept = Path(entry.folder).is_absolute() or (kinds and not entry.detached and not entry.folder)
    paths = all("\0" not in text for text in (entry.folder, entry.socket)) and kinds and kept
    return entry if paths and entry.name == Path(entry.name).name and "\0" not in entry.name else None
