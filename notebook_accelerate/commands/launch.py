"""``launch``: runs a script in several processes, with Accelerate's options."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from notebook_accelerate import launch
from notebook_accelerate.commands.launch_settings import (
    GENERAL,
    GROUPS,
    check_gpus,
    interpreter_options,
    launch_config,
    log_streams,
    option,
)
from notebook_accelerate.commands.parsers import Subparsers, command_parser
from notebook_accelerate.config.config_file import section_settings
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.errors import WorkerError
from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.state.run_events import AttemptStarted, RankStarted
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import LogEvent
from notebook_accelerate.telemetry.store import Record

INTERRUPTED = 130
"""The exit code that shells report for a program ended by SIGINT."""


def launch_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``launch``.

    Args:
        subparsers: The subparsers of the program. If None, a standalone parser is created.
    """
    parser = command_parser(
        subparsers,
        "launch",
        "Run a script in several processes.",
        "Run a script in several processes, on this machine or as one of several machines. Each line of "
        "output is labelled with its rank, and the first failure is shown with its source line. Options can be written "
        "with underscores or hyphens.",
    )
    for each in GENERAL:
        each.add_to(parser)
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for each in options:
            each.add_to(group)
    parser.add_argument("training_script", help="Path of the script; with -m, the name of a module.")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="Arguments of the script.", metavar="..."
    )
    names = {each.name: each.name for options in GROUPS.values() for each in options if each.supported}
    names |= {known.launch: str(known.option) for _, known in section_settings("") if known.launch}
    parser.set_defaults(func=launch_command, names=names)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run the script of a command line.

    Args:
        args: The arguments that ``launch_command_parser`` parsed.

    Raises:
        SystemExit: The script failed in a process. It has the exit code of the first process that failed.
        FileNotFoundError: The script or the configuration file does not exist.
        ValueError: An option is not supported, or a value is not allowed.
    """
    runner = _runner(args)
    if runner is run_script and not Path(args.training_script).is_file():
        raise FileNotFoundError(f"the script {args.training_script} does not exist; with -m, pass the name of a module")
    config = launch_config(args)
    check_gpus(args)
    folder = option(args, "log_dir")
    run_in_ranks(
        config,
        runner,
        args.training_script,
        list(option(args, "training_script_args", [])),
        quiet=bool(option(args, "quiet", False)),
        logs=None if folder is None else RankLogs(folder, log_streams(args)),
    )


def _runner(args: argparse.Namespace) -> Callable[..., None]:
    module, no_python = interpreter_options(args)
    if no_python:
        return run_program
    return run_module if module else run_script


def run_in_ranks(
    config: LaunchConfig,
    function: Callable[..., Any],
    *arguments: Any,
    quiet: bool = False,
    logs: RankLogs | None = None,
) -> None:
    """Run a function in ranks as the only task of a command. If it fails, print the failure and exit with its code.

    Args:
        config: The launch settings.
        function: The function that every rank runs.
        arguments: The positional arguments for the function.
        quiet: Whether to show only the error of the first failed rank.
        logs: Receives the output of the ranks.

    Raises:
        SystemExit: The function failed, or the run was interrupted.
    """
    if config.num_nodes == 1 and config.env:
        # The ranks inherit this process's environment. A single rank is this process itself, which has no other task.
        os.environ.update(config.env)
        # If output is logged, keep ``env``: a single rank is then a separate process, so its children are logged, too.
        if logs is None:
            config = config.changed(env=None)
    if logs is not None:
        run_registry.watch_launches(logs.follow)
    if config.num_processes != 1 and function is not run_program:
        importlib.import_module("torch")  # Import it once here, not once in each forked rank.
    try:
        launch.start(config, function, arguments)
    except WorkerError as error:
        lines = [str(error)] if error.run is None else error.run.report().error_lines(error)
        print(lines[-1] if quiet else "\n".join(lines), file=sys.stderr)
        raise SystemExit(_exit_code(error)) from None
    except KeyboardInterrupt:
        print("interrupted: every process has ended", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


class RankLogs:
    """Writes the output of this machine's ranks to the files that torchrun would write.

    Args:
        folder: The parent folder. Each launch creates a subfolder, with files such as
            ``none_*/attempt_0/0/stdout.log``.
        streams: The streams to write, for all ranks or by local rank: 1 (stdout), 2 (stderr), 3 (both) or 0 (none).

    Raises:
        ValueError: The folder cannot be used.
    """

    def __init__(self, folder: str, streams: dict[int, int] | int) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="none_", dir=folder))  # torchrun's name for an unnamed run.
        except OSError as error:
            raise ValueError(f"--log_dir {folder} cannot be used: {error}; pass a writable folder") from None
        self._streams, self._attempt = streams, 0

    def follow(self, run: launch.Run) -> None:
        """Write the output of a run until it ends."""
        internals(run).journal.subscribe(partial(self._write, run))

    def _write(self, run: launch.Run, records: Sequence[Record]) -> None:
        for rank, _, event in records:
            if isinstance(event, AttemptStarted):
                self._attempt = event.number
            elif isinstance(event, RankStarted):
                for stream in _STREAMS:
                    self._add(run, event.rank, stream, "")
            elif isinstance(event, LogEvent):
                self._add(run, rank, event.stream, event.text + "\n")

    def _add(self, run: launch.Run, rank: int, stream: str, text: str) -> None:
        local_rank = rank - (run.plan.first_rank if run.plan is not None else 0)
        chosen = self._streams if isinstance(self._streams, int) else self._streams.get(local_rank, 0)
        if run.plan is None or not 0 <= local_rank < run.plan.num_processes or not chosen & _STREAMS[stream]:
            return
        folder = self._folder / f"attempt_{self._attempt}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{stream}.log").open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


_STREAMS = {"stdout": 1, "stderr": 2}


def _exit_code(error: WorkerError) -> int:
    """Return the exit code of the first failed rank, as a shell would report it."""
    first = next(iter(error.failures), None)
    if first is not None and first.signal is not None:
        return 128 + first.signal
    code = getattr(first.exception, "code", 1) if first is not None else 1
    return code if isinstance(code, int) and code else 1


def main() -> None:
    """Run ``launch`` with this process's command line."""
    launch_command(launch_command_parser().parse_args())


# ---- in a rank: run a script as ``__main__``, with its own ``sys.argv`` and ``sys.path``


def run_script(script: str, arguments: list[str]) -> None:
    """Run a Python file.

    Args:
        script: The path of the file.
        arguments: The script's command line arguments.
    """
    with io.open_code(str(Path(script).resolve())) as file:
        code = compile(file.read(), script, "exec")
    main = ModuleType("__main__")
    main.__file__ = script
    main.__dict__["__builtins__"] = __builtins__
    with _as_program(script, arguments, str(Path(script).resolve().parent)):
        sys.modules["__main__"] = main
        exec(code, main.__dict__)  # noqa: S102 - the user's own script


def run_module(module: str, arguments: list[str]) -> None:
    """Run a module, as ``python -m`` does.

    Args:
        module: The dotted name of the module.
        arguments: The module's command line arguments.
    """
    with _as_program(module, arguments, str(Path.cwd())):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_program(program: str, arguments: list[str]) -> None:
    """Run a program that is not a Python script, with this rank's environment.

    Args:
        program: The path of the program, or its name on the PATH.
        arguments: The program's command line arguments.

    Raises:
        SystemExit: The program failed. The exit code is the program's.
    """
    code = subprocess.run([program, *arguments], check=False).returncode
    if code:
        sys.exit(code)


@contextmanager
def _as_program(name: str, arguments: list[str], folder: str) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path``. Restore them and ``__main__`` at the end, for a rank that is this process."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [name, *arguments]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if not sys.exc_info()[0]:  # After an error, frames and debuggers still need the script's module.
            sys.modules["__main__"] = main
        sys.argv, sys.path[:] = argv, path


if __name__ == "__main__":
    main()
