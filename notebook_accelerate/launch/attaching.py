"""Launches detached runs, and attaches to them from any kernel of the same user."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from notebook_accelerate import errors
from notebook_accelerate.config import environ
from notebook_accelerate.config.plain_values import given_folder
from notebook_accelerate.errors import BrokenRunError, LaunchError
from notebook_accelerate.hardware.process_liveness import parse_identity
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.control_client import ControlClient, silence_text, warn
from notebook_accelerate.launch.detached.run_directory import DetachedEntry
from notebook_accelerate.launch.kept.opened_run import open_run
from notebook_accelerate.launch.kept.run_folder import read_summary
from notebook_accelerate.launch.processes.interpreters import log_tail, start_interpreter, uninterrupted
from notebook_accelerate.launch.processes.pickled import to_file
from notebook_accelerate.launch.run import Run, default_name, next_number
from notebook_accelerate.launch.state.call_arguments import call_arguments
from notebook_accelerate.launch.state.interrupts import SLICE
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state
from notebook_accelerate.telemetry.notebook_settings import capture_notebook_settings
from notebook_accelerate.telemetry.pickling import dump
from notebook_accelerate.telemetry.tracebacks import cell_name, cell_sources

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig

START_SECONDS = 120.0
"""Seconds that the process of a detached run has to begin: on a slow disk the imports take long."""
FORK_SECONDS = 20.0
"""Seconds to wait for the end of a process that did not start the run in time; then it is killed."""
OPEN_SECONDS = 20.0
"""Seconds that the journal of a run that has just begun has for its first events."""
CLAIM_SECONDS = 10.0
"""Seconds to wait for a name that another process has: one whose run has ended, or whose launch is under way."""
LISTED_RUNS = 20
"""Most detached runs that are listed of those that have ended, the latest ones."""
_attached: dict[str, Run] = {}
"""By folder: a run has the same number each time it is listed."""
_lock = threading.Lock()


def launch_detached(
    config: LaunchConfig, function: Callable[..., Any], arguments: tuple[Any, ...], resume: Run | None
) -> Run:
    """Launch ``function(*arguments)`` under a process of its own, which outlives this kernel, and attach to it.

    Args:
        config: Configuration of the launch.
        function: The function.
        arguments: Its arguments.
        resume: A kept run that has ended, whose training goes on.

    Raises:
        ValueError: A detached run with this name is running.
        LaunchError: The process did not start, or it could not launch the run.
        SerializationError: The function or its arguments cannot be sent to the ranks.
        KeyboardInterrupt: The launch was interrupted, and stopped.
    """
    function_name = getattr(function, "__name__", type(function).__name__)
    if resume is not None and resume.folder is None:
        raise LaunchError(
            f"run {resume.name} is not kept in a folder, so a detached run cannot go on with it; "
            f"launch it with detach=False, or keep it next time: notebook_launcher(..., save='runs')"
        )
    with ExitStack() as undo:
        payload = to_file(function, arguments)
        undo.callback(os.close, payload)
        name, claimed = _claimed_name(config, function_name, resume)
        undo.callback(os.close, claimed)  # the process of the run has a copy
        order = {
            "config": config.changed(
                name=name,
                save=config.save or environ.text("NOTEBOOK_ACCELERATE_RUNS") or run_directory.runs_folder(),
            ),
            "function": function_name,
            "arguments": call_arguments(function, arguments),
            "resume": None if resume is None else str(resume.folder),
            "sources": (cells := cell_sources()),
            "settings": capture_notebook_settings(),
            "inherited": capture_inherited_state(),
            "names": {filename: cell_name(filename) for filename in cells},
            "origin": _origin(),
        }
        answer = _start(dump(order, "the configuration of the launch").to_file(), payload, claimed)
    if "error" in answer:
        kind = getattr(errors, answer["error"], None) or {"ValueError": ValueError, "TypeError": TypeError}.get(
            answer["error"], LaunchError
        )
        raise kind(answer["message"])
    run = attach(Path(answer["folder"]))
    run.config = config
    deadline = time.monotonic() + OPEN_SECONDS
    while run.plan is None and run.ended is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return run


def _claimed_name(config: LaunchConfig, function_name: str, resume: Run | None) -> tuple[str, int]:
    """Return the name of a new run, and the descriptor of its claim: no other detached run that goes on has it.

    Raises:
        ValueError: The user has given the name of a run that goes on, or one that is not allowed.
        LaunchError: Names cannot be claimed.
    """
    given = config.name or ("" if resume is None else resume.name)
    try:
        if given:
            config.changed(name=given)  # checks the name of a run that was opened
            return given, _claim(given)
        while True:
            name = default_name(function_name, next_number())
            if name not in _running_names() and (claimed := run_directory.claim_name(name)) is not None:
                return name, claimed
    except OSError as error:
        raise LaunchError(f"the detached run cannot be found later: {error}") from error


def _claim(name: str) -> int:
    deadline = time.monotonic() + CLAIM_SECONDS
    while name not in _running_names() and time.monotonic() < deadline:
        if (claimed := run_directory.claim_name(name)) is not None:
            return claimed
        time.sleep(0.05)
    raise ValueError(
        f"name={name!r} is the name of a detached run that has not ended: pass another name, "
        f"or use that run: notebook_accelerate.attach({name!r})"
    )


def _running_names() -> set[str]:
    return {entry.name for entry in running_entries()}


def running_entries() -> list[DetachedEntry]:
    """Return the detached runs that have not ended."""
    found = []
    for entry in run_directory.entries():
        known = _attached.get(entry.folder)
        ended = known is not None and known.ended is not None and known.status != "lost"  # its folder may be deleted
        # A run has its summary when it has ended; its process needs a moment more.
        if entry.lives and not ended and read_summary(Path(entry.folder)) is None:
            found.append(entry)
    return found


def _origin() -> dict[str, Any]:
    """Return where a run is launched, as its user knows the place."""
    found: dict[str, Any] = {"pid": os.getpid()}
    with suppress(OSError):
        found["folder"] = str(Path.cwd())
    if notebook := os.environ.get("JPY_SESSION_NAME"):
        found["notebook"] = notebook
    return found


def _start(order: int, payload: int, claimed: int) -> dict[str, Any]:
    """Start the process of a run and return its answer: the run's folder, or an error."""
    ours, theirs = socket.socketpair()
    with ours, TemporaryFile() as log:
        try:
            with theirs, uninterrupted():
                descriptors = [order, payload, theirs.fileno(), claimed]
                call = "from notebook_accelerate.launch.detached_process import main; "
                call += f"main({', '.join(map(str, descriptors))})"
                process = start_interpreter(call, descriptors, log.fileno())
        finally:
            os.close(order)
        answer = None
        try:
            answer = _answer(ours)
        finally:
            if answer is None:  # the launch was interrupted, or has taken too long
                with suppress(OSError):
                    ours.send(b"cancel")
            try:
                process.wait(FORK_SECONDS if answer is None else None)  # it has forked the process that stays
            except subprocess.TimeoutExpired:  # it is suspended
                process.kill()
                process.wait()
        if answer is None:
            raise LaunchError(f"the process of the detached run did not start{log_tail(log)}")
        return answer


def _answer(connection: socket.socket) -> dict[str, Any] | None:
    """Wait for the answer of the process, in slices that an interrupt ends; None where it ends without one."""
    connection.settimeout(SLICE)
    deadline, data = time.monotonic() + START_SECONDS, b""
    while b"\n" not in data and time.monotonic() < deadline:
        try:
            received = connection.recv(1 << 16)
        except TimeoutError:
            continue
        if not received:
            break
        data += received
    line, end, _ = data.partition(b"\n")  # an error may follow the folder, which the run has by itself
    found: dict[str, Any] | None = json.loads(line) if end else None
    return found


def attach(name: str | PathLike[str]) -> Run:
    """Attach to a detached run from any kernel of the user that launched it.

    Args:
        name: The run's name; where several had it, the last one is meant. Or its folder.

    Returns:
        The run, with everything that its ranks have logged and printed, also while no kernel was attached; it can be
        stopped, asked, diagnosed and debugged from here. One that has ended can be read. The same kernel gets the same
        object again.

    Raises:
        ValueError: There is no detached run with this name.
        LaunchError: Another user can change the records of detached runs, which are ignored.
        FileNotFoundError: There is no kept run in this folder.
        BrokenRunError: Its journal is damaged.
    """
    folder = _folder_of(name)
    with _lock:
        known = _attached.get(str(folder))
        if known is not None and known.status != "lost":
            return known
        run = _attached[str(folder)] = _open(folder)
        return run


def _folder_of(name: str | PathLike[str]) -> Path:
    found = [entry for entry in run_directory.entries() if entry.name == name]
    if found:
        return Path(max(found, key=lambda entry: (entry.lives, entry.created)).folder)
    if isinstance(name, str) and os.sep not in name:
        run_directory.check_records()
        known = ", ".join(dict.fromkeys(entry.name for entry in run_directory.entries())) or "none"
        raise ValueError(
            f"there is no detached run named {name!r}; there are: {known}. "
            "A kept run is opened by its folder: notebook_accelerate.open_run('runs/NAME')"
        )
    return given_folder(name)


def _open(folder: Path) -> Run:
    """Open a run that may have begun a moment ago."""
    deadline = time.monotonic() + OPEN_SECONDS
    while True:
        entry = next((entry for entry in run_directory.entries() if entry.folder == str(folder)), None)
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


def detached_runs() -> list[Run]:
    """Return the user's detached runs that can be read, the oldest first: all that live, and the last that ended."""
    found, entries = [], run_directory.entries()
    listed = [entry for entry in entries if not entry.lives][-LISTED_RUNS:]
    for entry in [entry for entry in entries if entry.lives or entry in listed]:
        with suppress(BrokenRunError, OSError, ValueError):
            found.append(attach(Path(entry.folder)))
    return found


def attached_runs() -> list[Run]:
    """Return the detached runs that this kernel has attached to."""
    with _lock:
        return list(_attached.values())


def disconnect_all() -> None:
    """Disconnect from all detached runs without stopping them."""
    with _lock:
        runs = list(_attached.values())
        _attached.clear()
    for run in runs:
        if isinstance(run.commands, ControlClient):
            run.commands.close()


def stop_detached(grace: float) -> None:
    """Stop the user's detached runs of this machine, all at the same time, and wait for their ends.

    If a supervisor does not answer, a warning names it, and it is killed a few seconds after ``grace``.
    """
    found = [run for run in detached_runs() if not run.commands.refusal]
    running = [run for run in found if run.ended is None or run.held or run.commands.connected]
    known = {str(run.folder) for run in running}
    tasks = [partial(_stop_read, run, grace) for run in running]
    tasks += [partial(_stop_unread, entry, grace) for entry in running_entries() if entry.folder not in known]
    threads = [threading.Thread(target=task, name="notebook-accelerate-stop", daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(SLICE)
    run_directory.entries()  # forgets the sockets of processes that were killed


def _stop_read(run: Run, grace: float) -> None:
    run.request_stop(grace)  # blocks for seconds if the supervisor does not read
    while not run.done or run.held or run.commands.connected:
        time.sleep(0.05)


def _stop_unread(entry: DetachedEntry, grace: float) -> None:
    """Stop a run that cannot be read, such as one whose folder was deleted."""
    process = parse_identity(entry.process)
    try:
        client = ControlClient(Path(entry.socket), process, entry.version)
    except BlockingIOError:  # it is suspended, and many connections wait
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
