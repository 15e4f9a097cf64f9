"""The folder of a kept run: its name, its files, and the journal's header, which describes the launch."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.plain_values import HIDDEN, given_folder, hide_credentials, shown_value
from notebook_accelerate.errors import BrokenRunError, LaunchError
from notebook_accelerate.files.guarded_files import check_depth, parse_json, read_limited
from notebook_accelerate.hardware.process_liveness import this_process
from notebook_accelerate.launch.kept import journal_format
from notebook_accelerate.launch.kept.journal_reader import read_journal
from notebook_accelerate.launch.report.run_report import environment
from notebook_accelerate.launch.state.call_arguments import Plain, call_arguments
from notebook_accelerate.telemetry import tracebacks
from notebook_accelerate.telemetry.channel import escape_surrogates
from notebook_accelerate.telemetry.tracebacks import cell_sources

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run

_TEXT_CHARS = 1000
_GIT_SECONDS = 10.0


def create_folder(parent: str | os.PathLike[str], name: str, created: float) -> Path:
    """Create the folder of a run, named after the date, the time and the run, with a number if the name is taken.

    Args:
        parent: The folder where runs are kept. It is created if it does not exist.
        name: The run's name.
        created: When the run was launched, in seconds since the epoch.

    Raises:
        LaunchError: The folder cannot be created.
    """
    stem = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(created))}-{_name_in_path(name)}"
    base = given_folder(parent)
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            folder = base / (stem if number == 1 else f"{stem}-{number}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise LaunchError(
            f"the run cannot be kept in {base}: {error.strerror or error}; pass another folder: save='runs'"
        ) from error
    raise LaunchError(f"the run cannot be kept in {base}: it has too many folders named {stem}")


def _name_in_path(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100]


def _is_made_for(folder: Path, name: str) -> bool:
    """Return whether `create_folder` may have chosen the name of this folder for the run, in any time zone."""
    return re.fullmatch(rf"[0-9]{{8}}-[0-9]{{6}}-{re.escape(_name_in_path(name))}(-[0-9]+)?", folder.name) is not None


def new_header(
    name: str, number: int, function: Callable[..., Any], arguments: tuple[Any, ...], config: LaunchConfig, at: float
) -> dict[str, Any]:
    """Return the first section of a journal, which describes the launch.

    Args:
        name: The run's name.
        number: The run's number in its kernel.
        function: The launched function.
        arguments: The function's positional arguments.
        config: The launch configuration.
        at: When the run was launched, in seconds since the epoch.
    """
    function_name = getattr(function, "__name__", type(function).__name__)
    return _header(name, number, function_name, call_arguments(function, arguments), config, at)


def header_of(run: Run) -> dict[str, Any]:
    """Return the header of the journal of a run that this process supervises."""
    return _header(run.name, run.id, run.function_name, run.arguments, run.config, run.started)


def _header(
    name: str, number: int, function_name: str, arguments: Mapping[str, Plain], config: LaunchConfig, at: float
) -> dict[str, Any]:
    return {
        "kind": "header",
        "format": journal_format.FORMAT,
        "name": name,
        "number": number,
        "function": function_name,
        "created": at,
        "config": stored_config(config),
        "arguments": dict(arguments),
        "process": asdict(this_process()),
        "environment": environment(),
        "folder": _working_folder(),
        "cells": {filename: tracebacks.cell_name(filename) for filename in cell_sources()},
    }


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # The folder has been deleted.
        return ""


def stored_config(config: LaunchConfig) -> dict[str, Any]:
    """Return the settings that differ from the defaults, as JSON can represent them. Secrets are hidden."""
    stored = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if value != each.default:
            stored[each.name] = _plain(shown_value(each.name, os.fspath(value) if each.name == "save" else value))
    return stored


def _plain(value: object, depth: int = 4) -> Any:
    """Convert a value to one that JSON can represent. Objects of other types become the names of their types."""
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is str:
        return hide_credentials(value)[:_TEXT_CHARS]
    if depth and isinstance(value, Mapping) and len(value) <= _TEXT_CHARS:
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple)) and len(value) <= _TEXT_CHARS:
        return [_plain(item, depth - 1) for item in value]
    return repr(value) if repr(value) == HIDDEN else f"<{type(value).__module__}.{type(value).__qualname__}>"


def config_from(stored: Mapping[str, Any]) -> LaunchConfig:
    """Return the configuration in a header. Settings that cannot be read back get their default values."""
    known = {each.name for each in fields(LaunchConfig)} - {"env", "rdzv_conf", "accelerator", "notify", "on"}
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items() if name in known
    }
    config = LaunchConfig()
    with suppress(TypeError, ValueError, AttributeError):
        return config.changed(**values)
    for name, value in values.items():
        with suppress(TypeError, ValueError, AttributeError):  # Another version may have allowed other values.
            config = config.changed(**{name: value})
    return config


def environment_of(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions and the machine recorded in a header, in the form that the report shows."""
    found = header.get("environment")
    texts = found.items() if isinstance(found, dict) else ()
    return {name: text[:_TEXT_CHARS] for name, text in texts if isinstance(text, str)} or {"python": "not recorded"}


def code_version(folder: Path) -> dict[str, Any]:
    """Return the section about the version of the code: the git commit, and whether files differ from the commit.

    Args:
        folder: A folder in the git repository.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    section: dict[str, Any] = {"kind": "code", "commit": (commit or "").strip(), "dirty": None}
    if commit:
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        section["dirty"] = None if changed is None else bool(changed.strip())
    return section


def _git(folder: Path, *command: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


SUMMARY_NAME = "summary.json"
MAX_SUMMARY_BYTES = 4 << 20
SUMMARY_SECONDS = 2.0
"""How many seconds the process of a detached run may take to write the summary after the end of the journal."""


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run, for the table of runs, or None if there is no usable one."""
    try:
        content = parse_json(read_limited(folder / SUMMARY_NAME, MAX_SUMMARY_BYTES))
        check_depth(content)
        content = escape_surrogates(content)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def result_name(rank: int) -> str:
    """Return the name of the file that holds a rank's pickled result."""
    return f"result-{rank}.pickle"


def delete_run(journal: Path, name: str, started: float, *, lost: bool) -> None:
    """Delete the files of an ended run. Also delete the folder if it was created for the run and is empty after that.

    Args:
        journal: The path of the run's journal.
        name: The run's name.
        started: When the run was launched, in seconds since the epoch.
        lost: Whether the run's process ended without writing the summary, which is its last file.

    Raises:
        FileNotFoundError: The journal does not exist.
        OSError: A file cannot be deleted.
    """
    folder = journal.parent
    journal.lstat()
    deadline = time.monotonic() + (0.0 if lost else SUMMARY_SECONDS)
    while not (is_last := _is_summary_of(folder, name, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    files = [*_results(journal), *([folder / SUMMARY_NAME] if is_last else [])]
    # Delete the journal last, because without it, the remaining files could not be found again.
    for file in [*files, journal]:
        file.with_name(f"{file.name}.new").unlink(missing_ok=True)  # An interrupted write leaves this file behind.
        file.unlink(missing_ok=True)
    folder = folder.resolve()
    if _is_made_for(folder, name):  # Otherwise, the user has created or renamed the folder.
        with suppress(OSError):  # The folder may contain other files.
            folder.rmdir()


def _is_summary_of(folder: Path, name: str, started: float) -> bool:
    summary = read_summary(folder) or {}
    return (summary.get("name"), summary.get("started")) == (name, started)


def _results(journal: Path) -> list[Path]:
    """Return the paths of the result files that a journal describes and whose sizes match the description."""
    try:
        stored = read_journal(journal).stored
    except (BrokenRunError, OSError):
        return []
    sizes = {rank: values.get("bytes") for rank, values in stored.items() if isinstance(values, dict)}
    files = {journal.with_name(result_name(rank)): size for rank, size in sizes.items()}
    return [file for file, size in files.items() if file.is_file() and file.stat().st_size == size]
