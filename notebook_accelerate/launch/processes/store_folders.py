"""Private folders in which the ranks of runs on this machine find each other, instead of at a port."""

from __future__ import annotations

import os
from pathlib import Path

from notebook_accelerate.hardware import temporary_folders

_MEMORY = Path("/dev/shm")  # noqa: S108 - the folders in it have mode 0700 and names that cannot be guessed
_folders: dict[int, Path] = {}


def make(run_id: int) -> str:
    """Make the folder of a run, in memory where the system has such files: a full disk does not prevent a launch."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    _folders[run_id] = temporary_folders.make(parent)
    return str(_folders[run_id])


def remove(run_id: int) -> None:
    """Remove the folder of a run, if it has one."""
    if (folder := _folders.pop(run_id, None)) is not None:
        temporary_folders.remove(folder)
