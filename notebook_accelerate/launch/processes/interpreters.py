"""Interpreters that the kernel starts: they import what the kernel imports, and nothing of the working directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from notebook_accelerate.config.environ import inheritable
from notebook_accelerate.errors import LaunchError

_PACKAGE_ROOT = Path(__file__).parents[3]
_STANDARD_LIBRARY = Path(os.__file__).parent
_FIRST, _INSTALLED, _LAST = range(3)


def interpreter_command(call: str) -> list[str]:
    """Return the command line of a fresh interpreter that imports what this one imports and evaluates ``call``."""
    setup = f"import sys; sys.path[:] = {json.dumps(isolated_path(sys.path))}; "
    return [*isolated_interpreter(), "-c", setup + call]


def start_interpreter(call: str, descriptors: Sequence[int], log: int, **environment: str) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter in its own session that evaluates ``call``.

    Args:
        call: A Python expression or statements.
        descriptors: Descriptors that the interpreter inherits.
        log: Descriptor of a file for its output.
        environment: Variables that replace the kernel's.
    """
    return subprocess.Popen(
        interpreter_command(call),
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**isolated_variables(inheritable()), **environment},
        cwd=existing_folder(),
    )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Start processes with SIGINT blocked.

    Until a new process leads its own session, it is in the kernel's process group, where the front end's interrupt
    would end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def log_tail(log: IO[bytes]) -> str:
    """Return the last 2,000 bytes of a process's log, for an error message; "" when the log is empty."""
    log.seek(0)
    text = log.read()[-2000:].decode(errors="replace").strip()
    return f"; its output ends with:\n{text}" if text else ""


def isolated_path(path: Iterable[object]) -> list[str]:
    """Return the kernel's import path with the standard library first, and the working directory last.

    A file such as random.py or types.py there would otherwise replace a module that this package or torch imports.
    Ranks get the kernel's path as it is.

    Args:
        path: ``sys.path`` of the kernel; Python ignores what is no string.
    """
    return sorted((entry for entry in path if isinstance(entry, str)), key=_place)  # stable


def _place(entry: str) -> int:
    folder, current = Path(entry), working_directory()
    if folder in (_STANDARD_LIBRARY, _STANDARD_LIBRARY / "lib-dynload"):
        return _FIRST
    if current is not None and current / folder == _PACKAGE_ROOT:
        return _INSTALLED
    return _INSTALLED if folder.is_absolute() and folder != current else _LAST


def working_directory() -> Path | None:
    """Return the working directory; None when it was deleted."""
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return None


def existing_folder() -> str | None:
    """Return a folder for a process that is started while the working directory is deleted; None while it exists.

    Libraries of torch cannot be loaded in a deleted folder.
    """
    return None if working_directory() is not None else _STANDARD_LIBRARY.anchor


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
