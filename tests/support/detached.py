"""A user's folder for detached runs, and the processes that belong to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_accelerate import Run, shutdown
from notebook_accelerate.config import environ
from notebook_accelerate.launch import attaching, detached_launch
from notebook_accelerate.launch.detached.control_client import ControlClient
from notebook_accelerate.launch.processes import interpreters
from tests.support import kernel_forks
from tests.support.waiting import until


@contextmanager
def user_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Record detached runs in a folder. At the end, stop them and check that none of their processes is left."""
    monkeypatch.setattr(detached_launch, "start_interpreter", _start_interpreter)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    try:
        yield folder
    finally:
        shutdown(all=True)
        disconnect_all()
    until(lambda: not processes_of(folder), seconds=60)
    sockets = folder / "notebook-accelerate" / "sockets"
    assert not sockets.exists() or not list(sockets.iterdir())


def _start_interpreter(call: str, descriptors: Sequence[int], log: int) -> Any:
    """Fork the process of a detached run, which would take seconds to import torch, from one that has imported it."""
    request = {
        "code": interpreters.interpreter_command(call)[-1],
        "module": call.split()[1],
        "cwd": str(Path.cwd()),
        "env": interpreters.isolated_variables(environ.inheritable()),
        "numbers": [0, 1, 2, *descriptors],
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }
    with Path(os.devnull).open() as nothing:
        forked = kernel_forks.fork_interpreter(request, nothing.fileno(), log, log, *descriptors)
    return forked or interpreters.start_interpreter(call, descriptors, log)


def disconnect_all() -> None:
    """Disconnect from all detached runs without stopping them, as the exit of a kernel does."""
    with attaching._lock:
        runs = list(attaching._attached.values())
        attaching._attached.clear()
    for run in runs:
        if isinstance(run._internals.commands, ControlClient):
            run._internals.commands.close()


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes, except for this one, whose detached runs are recorded in a folder."""
    # Tests call this in a loop. Reading these files with psutil would take three times as long.
    variable, found = os.fsencode(f"XDG_STATE_HOME={folder}"), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError, psutil.Error):  # The process has exited, or belongs to another user.
            if variable in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(psutil.Process(int(path.parent.name)))
    return found


def supervisor_of(run: Run) -> psutil.Process:
    """Return the process that supervises a detached run: the parent of its zygote."""
    rank = psutil.Process(run.ranks[0].pid or 0)
    return next(process for process in reversed(rank.parents()) if "detached_process" in " ".join(process.cmdline()))
