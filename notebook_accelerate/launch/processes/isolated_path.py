"""The import path and variables of interpreters that the kernel starts, safe from modules of the working directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from notebook_accelerate.errors import LaunchError

_PACKAGE_ROOT = Path(__file__).parents[3]
_STANDARD_LIBRARY = Path(os.__file__).parent
_FIRST, _INSTALLED, _LAST = range(3)


def isolated_path(path: Iterable[object]) -> list[str]:
    """Return the kernel's import path with the standard library first, and the working directory last.

    A file such as random.py or types.py there would otherwise replace a module that this package or torch imports.
    Ranks get the kernel's path as it is.

    Args:
        path: ``sys.path`` of the kernel; Python ignores what is no string.
    """
    return sorted((entry for entry in path if isinstance(entry, str)), key=_place)  # stable


def _place(entry: str) -> int:
    folder, current = Path(entry), _working_directory()
    if folder in (_STANDARD_LIBRARY, _STANDARD_LIBRARY / "lib-dynload"):
        return _FIRST
    if current is not None and current / folder == _PACKAGE_ROOT:
        return _INSTALLED
    return _INSTALLED if folder.is_absolute() and folder != current else _LAST


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return None


def existing_folder() -> str | None:
    """Return a folder for a process that is started while the working directory is deleted; None while it exists.

    Libraries of torch cannot be loaded in a deleted folder.
    """
    return None if _working_directory() is not None else _STANDARD_LIBRARY.anchor


def isolated_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those entries of PYTHONPATH that mean the working directory.

    An interpreter imports modules from there before it runs its first line; ranks get the kernel's variables.

    Args:
        environment: Variables of the kernel.
    """
    found = dict(environment)
    entries = [entry for entry in found.pop("PYTHONPATH", "").split(os.pathsep) if _place(entry) != _LAST]
    return {**found, "PYTHONPATH": os.pathsep.join(entries)} if entries else found


def isolated_interpreter() -> list[str]:
    """Return the command of an interpreter that does not put the working directory in front of its import path.

    Raises:
        LaunchError: Python does not know its own program.
    """
    if not sys.executable:
        raise LaunchError(
            f"sys.executable={sys.executable!r} names no interpreter to start; set it, or pass start_method='fork'"
        )
    return [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
