"""Where the detached runs of a user are found: a file for each, and a socket while its process lives."""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.hardware.process_liveness import parse_identity, this_process

LISTED_SECONDS = 30 * 86400.0
"""Seconds after which a detached run is listed no more; its folder stays."""
_MAX_ENTRY_BYTES = 1 << 16


@dataclass(frozen=True)
class DetachedEntry:
    """A detached run as other kernels find it.

    Attributes:
        name: The run's name.
        folder: Where it is kept.
        socket: Where its process is steered.
        created: When it was launched, in seconds since the epoch.
        process: The identity of its process; see ``hardware.process_liveness``.
        origin: Where it was launched: "folder", and where they are known "notebook" and "pid".
    """

    name: str
    folder: str
    socket: str
    created: float
    process: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        """Whether the process of the run has not ended."""
        identity = parse_identity(self.process)
        return identity is not None and identity.machine == this_process().machine and not identity.has_ended()

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended; False also for one of another machine or container."""
        identity = parse_identity(self.process)
        return identity is None or identity.has_ended()


def state_folder() -> Path:
    """Return the user's folder for what outlives a process.

    Raises:
        LaunchError: The user has no home, and XDG_STATE_HOME is not set.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    home = os.environ.get("HOME", os.path.expanduser("~"))  # noqa: PTH111 - "~" where the user database has none
    if base.startswith("/"):
        return Path(base) / "notebook-accelerate"
    if not home.startswith("/"):
        raise LaunchError("detached runs are recorded in the user's home, and there is none; set XDG_STATE_HOME")
    return Path(home) / ".local" / "state" / "notebook-accelerate"


def runs_folder() -> Path:
    """Return the folder of the detached runs that are launched without ``save``; nobody else can enter a new one.

    Raises:
        LaunchError: The user has no home.
    """
    folder = state_folder() / "runs"
    with suppress(OSError):  # one that others can enter is used as it is; other errors come when it is written to
        make_private(folder)
    return folder


def new_socket() -> Path:
    """Return an unused path for a socket, in a folder of the user that nobody else can enter.

    Raises:
        LaunchError: There is no such folder.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    for parent in ([Path(base)] if base.startswith("/") else []) + [state_folder()]:
        folder = parent / ("notebook-accelerate" if parent != state_folder() else "sockets")
        with suppress(OSError):
            make_private(folder)
            return folder / secrets.token_hex(8)
    raise LaunchError(
        f"a detached run needs a folder that only you can enter, and {state_folder()} is none; "
        "set XDG_STATE_HOME to a folder of yours"
    )


def make_private(folder: Path) -> None:
    """Create a folder with mode 0700.

    Raises:
        OSError: It cannot be created, or it is there and others own it or can enter it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user can enter")


def add(entry: DetachedEntry) -> None:
    """Record a detached run.

    Raises:
        OSError: The file cannot be written.
    """
    folder = _entries_folder()
    make_private(folder)
    path = folder / f"{secrets.token_hex(8)}.json"
    part = path.with_suffix(".new")
    part.write_text(json.dumps(asdict(entry)))
    part.replace(path)


def entries() -> list[DetachedEntry]:
    """Return the user's detached runs, the oldest first; those whose folder was deleted are forgotten."""
    found = []
    for path in _files():
        entry = _read(path)
        old = entry is not None and time.time() - entry.created > LISTED_SECONDS and not entry.lives
        if entry is None or old or not Path(entry.folder).is_dir():
            with suppress(OSError):
                path.unlink()
        else:
            found.append(entry)
        if entry is not None and (old or entry.has_ended):  # killed processes leave their sockets
            with suppress(OSError):
                Path(entry.socket).unlink()
    return sorted(found, key=lambda entry: (entry.created, entry.folder))


def _files() -> list[Path]:
    try:
        return list(_entries_folder().glob("*.json"))
    except (LaunchError, OSError):
        return []


def _entries_folder() -> Path:
    return state_folder() / "detached"


def _read(path: Path) -> DetachedEntry | None:
    try:
        if path.stat().st_size > _MAX_ENTRY_BYTES:
            return None
        entry = DetachedEntry(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    texts = all(isinstance(text, str) for text in (entry.name, entry.folder, entry.socket))
    maps = isinstance(entry.origin, dict) and isinstance(entry.process, dict)
    return entry if texts and maps and isinstance(entry.created, (int, float)) else None


__all__ = ["DetachedEntry", "add", "entries", "make_private", "new_socket", "runs_folder", "state_folder"]
