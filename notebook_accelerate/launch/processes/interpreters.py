"""Start interpreters that import the same modules as the kernel, but never from the working directory."""

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
RAY_PACKAGES = "thirdparty_files"
"""The name of the folder with Ray's copies of packages, which Ray adds to the import path."""


def interpreter_command(call: str) -> list[str]:
    """Return the command line of a fresh interpreter that has this one's import path and executes ``call``."""
    setup = f"import sys; sys.path[:] = {json.dumps(isolated_path(sys.path))}; "
    return [*isolated_interpreter(), "-c", setup + call]


def start_interpreter(call: str, descriptors: Sequence[int], log: int, **environment: str) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that executes ``call`` in its own session.

    Args:
        call: The Python code to execute.
        descriptors: The descriptors that the interpreter inherits.
        log: The descriptor of a file for the interpreter's output.
        environment: Environment variables that override the kernel's.
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
    """Block SIGINT while processes are started.

    Until a new process leads its own session, it belongs to the kernel's process group, where an interrupt from the
    front end would kill it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def log_tail(log: IO[bytes]) -> str:
    """Return "; its output ends with:" and the last 2,000 bytes of a process's log, or "" if the log is empty."""
    log.seek(0)
    text = log.read()[-2000:].decode(errors="replace").strip()
    return f"; its output ends with:\n{text}" if text else ""


def isolated_path(path: Iterable[object]) -> list[str]:
    """Return the kernel's import path with the standard library first and the working directory last.

    With the kernel's own order, a file such as random.py or types.py in the working directory would replace a module
    that this package or torch imports. Ranks later get the kernel's path unchanged.

    Args:
        path: The kernel's ``sys.path``. Entries that are not strings are dropped, because Python ignores them, and so
            is the folder with the packages that Ray has copied for itself, such as psutil.
    """
    entries = [entry for entry in path if isinstance(entry, str) and not entry.endswith(RAY_PACKAGES)]
    # The sort is stable, so all other entries keep their order.
    return sorted(entries, key=_place)


def _place(entry: str) -> int:
    folder, current = Path(entry), working_directory()
    if folder in (_STANDARD_LIBRARY, _STANDARD_LIBRARY / "lib-dynload"):
        return _FIRST
    if current is not None and current / folder == _PACKAGE_ROOT:
        return _INSTALLED
    return _INSTALLED if folder.is_absolute() and folder != current else _LAST


def working_directory() -> Path | None:
    """Return the working directory, or None if it has been deleted."""
    try:
        return Path.cwd()
    except OSError:  # The directory has been deleted.
        return None


def existing_folder() -> str | None:
    """Return a working directory for a new process if the current one has been deleted, or None if it exists.

    Torch's libraries cannot be loaded by a process whose working directory has been deleted.
    """
    return None if working_directory() is not None else _STANDARD_LIBRARY.anchor


def isolated_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without the entries of PYTHONPATH that refer to the working directory.

    An interpreter imports modules from these entries before it runs its first line. Ranks later get the kernel's
    variables unchanged.

    Args:
        environment: The kernel's environment variables.
    """
    found = dict(environment)
    entries = [entry for entry in found.pop("PYTHONPATH", "").split(os.pathsep) if _place(entry) != _LAST]
    return {**found, "PYTHONPATH": os.pathsep.join(entries)} if entries else found


def isolated_interpreter() -> list[str]:
    """Return the command for an interpreter that does not add the working directory to the start of the import path.

    Raises:
        LaunchError: ``sys.executable`` is empty.
    """
    if not sys.executable:
        raise LaunchError(
            f"sys.executable={sys.executable!r} does not name an interpreter; set it, or pass start_method='fork'"
        )
    return [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
