"""The program ``notebook-accelerate``: one parser for all commands."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress

from notebook_accelerate.commands.parsers import PROGRAM, REPORTED_ERRORS, HelpFormatter, exit_code, in_options
from notebook_accelerate.config.plain_values import did_you_mean

_RUN_COMMANDS = (
    "runs", "show", "logs", "metrics", "diagnose", "stacks", "memory", "profile", "wait", "ask", "pause", "unpause",
    "checkpoint", "stop",
)  # fmt: skip
_COMMANDS = {
    "launch": "launch:launch_command_parser",
    "config": "config.config:config_command_parser",
    "join": "join:join_command_parser",
    "env": "env:env_command_parser",
    "test": "test:test_command_parser",
    "estimate-memory": "estimate:estimate_command_parser",
    "merge-weights": "merge:merge_command_parser",
    "to-fsdp2": "to_fsdp2:to_fsdp2_command_parser",
    **dict.fromkeys(_RUN_COMMANDS, "live_runs:PARSERS"),
    "mcp": "mcp_server:mcp_command_parser",
}
"""The functions that create the parsers, or dicts of them. Only the module of the given command is imported."""


def parser_for(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Create the parser of a command line, with only the command that it names, or with all commands if it names none.

    Args:
        arguments: The arguments of the command line, without the program's name.
    """
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Launch training runs, read and control live runs, and inspect models and checkpoints.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    named = [name for name in arguments[:1] if name in _COMMANDS]
    for name in named or _COMMANDS:
        module, _, function = _COMMANDS[name].partition(":")
        create = getattr(importlib.import_module(f"notebook_accelerate.commands.{module}"), function)
        (create[name] if isinstance(create, dict) else create)(commands)
    return parser


def _version() -> str:
    return str(sys.modules["notebook_accelerate"].__version__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: The command line without the program's name. If None, this process's command line is used.

    Returns:
        The exit code: 0, 1 if the command failed, 2 if its options are wrong, or 130 if it was interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_for(given)
    _complete(parser)
    if given and not given[0].startswith("-") and given[0] not in _COMMANDS:
        parser.error(
            f"there is no command {given[0]!r}{did_you_mean(given[0], _COMMANDS)}; known: {', '.join(_COMMANDS)}"
        )
    options = _parse(parser, given)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        options.func(options)
    except REPORTED_ERRORS as error:
        print(f"{PROGRAM} {options.command}: {in_options(str(error), vars(options).get('names', {}))}", file=sys.stderr)
        return exit_code(error)
    except (KeyboardInterrupt, EOFError):
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parse(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    """Parse a command line. With --json, also print an error as JSON on stdout."""
    text = io.StringIO()
    try:
        with redirect_stderr(text):
            options, unknown = parser.parse_known_args(given)
            if unknown:
                known = _options_in_help(parser, given[0])
                hints = [f"{name}{did_you_mean(name.partition('=')[0], known)}" for name in unknown]
                parser.error(f"unrecognized arguments: {' '.join(hints)}")
    except SystemExit as problem:
        if problem.code and "--json" in given:
            message = text.getvalue().strip().rpartition("error: ")[2]
            print(json.dumps({"command": given[0], "schema": 1, "error": {"kind": "UsageError", "message": message}}))
        raise
    finally:
        sys.stderr.write(text.getvalue())
    return options


def _options_in_help(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Return the options that ``--help`` of a command lists."""
    text = io.StringIO()
    with suppress(SystemExit), redirect_stdout(text):
        parser.parse_args([command, "--help"])
    return sorted(set(re.findall(r"--[a-z]\w+", text.getvalue())))


def _complete(parser: argparse.ArgumentParser) -> None:
    """Complete a command line for the shell, if argcomplete is installed."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        return
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    sys.exit(main())
