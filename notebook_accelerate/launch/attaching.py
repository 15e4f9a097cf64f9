"""Attach to detached runs and to the live runs of other kernels, list detached runs, and stop them."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path

from notebook_accelerate._mistakes import reports_mistakes
from notebook_accelerate.config.plain_values import did_you_mean, given_folder
from notebook_accelerate.errors import BrokenRunError
from notebook_accelerate.hardware.process_liveness import parse_identity
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.control_client import ControlClient, silence_text, warn
from notebook_accelerate.launch.detached.run_directory import DirectoryEntry
from notebook_accelerate.launch.kept.opened_run import open_live, open_run
from notebook_accelerate.launch.kept.run_folder import read_summary
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.interrupts import SLICE
from notebook_accelerate.launch.state.run_view import internals

OPEN_SECONDS = 20.0
"""How many seconds the journal of a run that has just started may take to receive its first events."""
LISTED_RUNS = 20
"""Maximum number of ended detached runs to list. Older ones are left out."""
_attached: dict[str, Run] = {}
"""The attached runs by folder, so that a run has the same number each time it is listed."""
_lock = threading.Lock()


@reports_mistakes
def attach(name: str | PathLike[str]) -> Run:
    """Attach to a run from any process of the user who launched it: a detached run, or a live run of another kernel.

    Args:
        name: The run's name, or its folder. If several runs of one process have the name, or several detached runs, the
            last one is used. "NAME@PID" selects a process.

    Returns:
        The run, with everything that its ranks have logged and printed, even while no kernel was attached. While the
        run is running, it can be stopped, queried, diagnosed and debugged from this process. After it has ended, its
        records can still be read. Repeated calls in a process return the same object.

    Raises:
        ValueError: There is no such run, or runs of several processes have the name.
        LaunchError: The records of detached runs are ignored, because another user can change them.
        FileNotFoundError: There is no kept run in this folder.
        BrokenRunError: The run's journal is damaged.
        NotebookAccelerateError: The run's process does not answer.
    """
    entry = _entry_of(name)
    folder = given_folder(name) if entry is None else Path(entry.folder)
    key = entry.socket if entry is not None and not entry.folder else str(folder)
    with _lock:
        known = _attached.get(key)
        if known is not None and known.status != "lost":
            return known
        run = _attached[key] = open_live(entry) if entry is not None and not entry.folder else _open(folder)
        return run


def _entry_of(name: str | PathLike[str]) -> DirectoryEntry | None:
    """Return the entry of a run, given its name, or None for a path.

    Raises:
        ValueError: There is no such run, or runs of several processes have the name.
    """
    if not isinstance(name, str) or os.sep in name:
        return None
    entries = run_directory.all_entries()
    found = [entry for entry in entries if name in (entry.name, entry.label)]
    labels = sorted({entry.label for entry in found if entry.lives})
    if len(labels) > 1:
        raise ValueError(f"runs of several processes are named {name!r}; pass one of {', '.join(labels)}")
    if found:
        return max(found, key=lambda entry: (entry.lives, entry.created))
    run_directory.check_records()
    names = list(dict.fromkeys(entry.name for entry in entries))
    raise ValueError(
        f"there is no detached or live run named {name!r}{did_you_mean(name, names)}; "
        f"the runs are: {', '.join(names) or 'none'}. "
        "To open a kept run, pass its folder: notebook_accelerate.open_run('runs/NAME')"
    )


def _open(folder: Path) -> Run:
    """Open a run. If it has just started, wait until its journal can be read."""
    deadline = time.monotonic() + OPEN_SECONDS
    while True:
        entry = next((entry for entry in run_directory.all_entries() if entry.folder == str(folder)), None)
        try:
            run = open_run(folder)
        except BrokenRunError:
            process = None if entry is None else parse_identity(entry.process)
            if time.monotonic() > deadline or process is None or process.has_ended():
                raise
            if process.is_suspended():
                raise
            time.sleep(0.05)
        else:
            run.origin = str(entry.origin.get("notebook") or entry.origin.get("folder") or "") if entry else ""
            return run


def detached_runs(project: Path | None = None) -> list[Run]:
    """Return the user's detached runs, oldest first: all running ones and the latest ended ones that can be read.

    Args:
        project: Return only runs that were launched below this folder, and runs that this kernel has attached to. None
            means all runs.
    """
    found = []
    for entry in _listed(project):
        with suppress(BrokenRunError, OSError, ValueError):
            found.append(attach(Path(entry.folder)))
    return found


def count_elsewhere(project: Path) -> int:
    """Return how many listed detached runs `detached_runs` omits for a project."""
    return len(_listed(None)) - len(_listed(project))


def _listed(project: Path | None) -> list[DirectoryEntry]:
    found = [entry for entry in run_directory.entries() if project is None or _belongs(entry, project)]
    ended = [entry for entry in found if not entry.lives][-LISTED_RUNS:]
    return [entry for entry in found if entry in ended or entry.lives]


def _belongs(entry: DirectoryEntry, project: Path) -> bool:
    folder = entry.origin.get("folder")
    if entry.folder in _attached or not isinstance(folder, str):
        return True
    return Path(folder).is_relative_to(project)


def project_folder() -> Path | None:
    """Return the root of the git repository that contains the working directory, or else the working directory.

    If the working directory has been deleted, return None.
    """
    try:
        here = Path.cwd()
    except OSError:
        return None
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def running_entries() -> list[DirectoryEntry]:
    """Return the entries of the detached runs that are still running."""
    found = []
    for entry in run_directory.entries():
        known = _attached.get(entry.folder)
        # Check the attached run's state too, because its folder, with the summary, may have been deleted.
        ended = known is not None and known.ended is not None and known.status != "lost"
        # A run with a summary is over, even if its process needs another moment to exit.
        if entry.lives and not ended and read_summary(Path(entry.folder)) is None:
            found.append(entry)
    return found


def attached_runs() -> list[Run]:
    """Return the detached runs that this kernel has attached to."""
    with _lock:
        return list(_attached.values())


def stop_detached(grace: float) -> None:
    """Stop all of the user's detached runs on this machine at the same time, and wait for them to end.

    A supervisor that does not answer is named in a warning, and killed a few seconds after ``grace``.
    """
    found = [run for run in detached_runs() if not internals(run).commands.refusal]
    running = [run for run in found if run.ended is None or run.held or internals(run).commands.connected]
    known = {str(run.folder) for run in running}
    tasks = [partial(_stop_read, run, grace) for run in running]
    tasks += [partial(_stop_unread, entry, grace) for entry in running_entries() if entry.folder not in known]
    threads = [threading.Thread(target=task, name="notebook-accelerate-stop", daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(SLICE)
    run_directory.entries()  # Listing the entries removes the sockets of processes that were killed.


def _stop_read(run: Run, grace: float) -> None:
    run.stop(grace, wait=False)  # Even with wait=False, this blocks for seconds if the supervisor does not read.
    while not run.done or run.held or internals(run).commands.connected:
        time.sleep(0.05)


def _stop_unread(entry: DirectoryEntry, grace: float) -> None:
    """Stop a run that cannot be read, for example because its folder was deleted."""
    process = parse_identity(entry.process)
    try:
        client = ControlClient(Path(entry.socket), process)
    except BlockingIOError:  # The process is suspended, and its connection queue is full.
        if process is not None:
            warn(silence_text(process, grace))
            time.sleep(grace)
            process.kill_tree()
        return
    except OSError:
        return
    client.stop(grace)
    while client.connected:
        time.sleep(0.05)
    client.close()
