"""Launch detached runs, each in a separate process, and attach to them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from notebook_accelerate import errors
from notebook_accelerate.config import environ
from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch.attaching import OPEN_SECONDS, attach, running_entries
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.processes.interpreters import log_tail, start_interpreter, uninterrupted
from notebook_accelerate.launch.processes.pickled import to_file
from notebook_accelerate.launch.processes.shared_imports import trains
from notebook_accelerate.launch.resumption import changed_arguments
from notebook_accelerate.launch.run import Run, default_name, next_number
from notebook_accelerate.launch.state.call_arguments import call_arguments
from notebook_accelerate.launch.state.interrupts import SLICE
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state
from notebook_accelerate.telemetry.notebook_settings import capture_notebook_settings
from notebook_accelerate.telemetry.pickling import dump
from notebook_accelerate.telemetry.tracebacks import cell_name, cell_sources

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.state.call_arguments import Plain
    from notebook_accelerate.telemetry.inherited_state import InheritedState


START_SECONDS = 120.0
"""How many seconds the process of a detached run may take to start. On a slow disk, imports take a long time."""
FORK_SECONDS = 20.0
"""How many seconds a process that did not start the run in time has to exit before it is killed."""
CLAIM_SECONDS = 10.0
"""How many seconds to wait for a name that another process still holds while it starts a run or exits after one."""


@dataclass(frozen=True, kw_only=True)
class DetachedOrder:
    """Everything that the process of a detached run needs for the launch, except the function and its arguments."""

    name: str
    """The run's name, which the launching kernel has claimed."""
    config: LaunchConfig
    function_name: str
    arguments: dict[str, Plain]
    """The function's arguments by name, as plain values."""
    resume: str | None
    """The folder of the run to resume, or None."""
    sources: dict[str, str]
    """The sources of the kernel's cells, by file name."""
    cell_names: dict[str, str]
    """The names of these cells in tracebacks, by file name."""
    trains: bool
    """Whether the function probably trains a model."""
    settings: bytes
    """The kernel's settings, from ``capture_notebook_settings``."""
    inherited: InheritedState
    """The state that ranks inherit from the kernel."""
    origin: dict[str, Any]
    """Where the run was launched: the process, its folder and its notebook."""


def launch_detached(
    config: LaunchConfig, function: Callable[..., Any], arguments: tuple[Any, ...], resume: Run | None
) -> Run:
    """Launch ``function(*arguments)`` in a separate process that outlives this kernel, and attach to it.

    Args:
        config: The launch configuration.
        function: The function to launch.
        arguments: The function's positional arguments.
        resume: An ended kept run whose training the new run continues, or None.

    Raises:
        ValueError: A detached run with the configured name is still running.
        LaunchError: The process did not start, or it could not launch the run.
        SerializationError: The function or its arguments cannot be sent to the ranks.
        KeyboardInterrupt: The launch was interrupted, and has been stopped.
    """
    function_name = getattr(function, "__name__", type(function).__name__)
    if resume is not None and resume.folder is None:
        raise LaunchError(
            f"run {resume.name} is not kept in a folder, so a detached run cannot continue it; "
            f"pass detach=False, or keep runs that you may want to continue: notebook_launcher(..., save='runs')"
        )
    with ExitStack() as undo:
        payload = to_file(function, arguments)
        undo.callback(os.close, payload)
        given = call_arguments(function, arguments)
        branches = resume is not None and bool(changed_arguments(resume, given))
        name, claimed = _claimed_name(config, function_name, None if branches else resume)
        undo.callback(os.close, claimed)  # The run's process has its own copy of the descriptor.
        order = DetachedOrder(
            name=name,
            config=config.changed(
                name=name,
                save=config.save or environ.text("NOTEBOOK_ACCELERATE_RUNS") or run_directory.runs_folder(),
            ),
            function_name=function_name,
            arguments=given,
            resume=None if resume is None else str(resume.folder),
            sources=(cells := cell_sources()),
            cell_names={filename: cell_name(filename) for filename in cells},
            trains=trains(function, arguments),
            settings=capture_notebook_settings(),
            inherited=capture_inherited_state(),
            origin=origin(),
        )
        answer = _start(dump(order, "the configuration of the launch").to_file(), payload, claimed)
    if "error" in answer:
        kind = getattr(errors, answer["error"], None) or {"ValueError": ValueError, "TypeError": TypeError}.get(
            answer["error"], LaunchError
        )
        raise kind(answer["message"])
    run = attach(Path(answer["folder"]))
    run.config = config
    deadline = time.monotonic() + OPEN_SECONDS
    while run.status == "starting" and run.plan is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return run


def _claimed_name(config: LaunchConfig, function_name: str, resume: Run | None) -> tuple[str, int]:
    """Claim a name that no running detached run has. Return the name and the descriptor of the claim.

    Raises:
        ValueError: The name that the user chose belongs to a run that is still running, or is invalid.
        LaunchError: The folder for the claims cannot be written to.
    """
    given = config.name or ("" if resume is None else resume.name)
    try:
        if given:
            # Check the name, because it may come from the files of the run to resume.
            config.changed(name=given)
            return given, _claim(given)
        while True:
            name = default_name(function_name, next_number())
            if name not in _running_names() and (claimed := run_directory.claim_name(name)) is not None:
                return name, claimed
    except OSError as error:
        raise LaunchError(f"the detached run cannot be recorded for other kernels: {error}") from error


def _claim(name: str) -> int:
    deadline = time.monotonic() + CLAIM_SECONDS
    while name not in _running_names() and time.monotonic() < deadline:
        if (claimed := run_directory.claim_name(name)) is not None:
            return claimed
        time.sleep(0.05)
    raise ValueError(
        f"name={name!r} is the name of a detached run that is still running: pass another name, "
        f"or use that run: notebook_accelerate.attach({name!r})"
    )


def _running_names() -> set[str]:
    return {entry.name for entry in running_entries()}


def origin() -> dict[str, Any]:
    """Return where a run is launched: the process id, the working directory and the notebook."""
    found: dict[str, Any] = {"pid": os.getpid()}
    with suppress(OSError):
        found["folder"] = str(Path.cwd())
    if notebook := os.environ.get("JPY_SESSION_NAME"):
        found["notebook"] = notebook
    return found


def _start(order: int, payload: int, claimed: int) -> dict[str, Any]:
    """Start the process of a run. Return its answer, which holds either the run's folder or an error."""
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
            if answer is None:  # The launch was interrupted, or took too long.
                with suppress(OSError):
                    ours.send(b"cancel")
            try:
                # This process exits as soon as it has forked the one that supervises the ranks.
                process.wait(FORK_SECONDS if answer is None else None)
            except subprocess.TimeoutExpired:  # The process is probably suspended.
                process.kill()
                process.wait()
        if answer is None:
            raise LaunchError(f"the process of the detached run did not start{log_tail(log)}")
        return answer


def _answer(connection: socket.socket) -> dict[str, Any] | None:
    """Wait for the process's answer, in short slices so that an interrupt can end the wait.

    Return None if the process exits without an answer, or takes too long.
    """
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
    line, end, _ = data.partition(b"\n")  # Ignore an error that follows the folder; the run records it.
    found: dict[str, Any] | None = json.loads(line) if end else None
    return found
