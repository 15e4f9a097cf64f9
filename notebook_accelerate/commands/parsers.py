"""Creates the parsers of commands, standalone or as subparsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from notebook_accelerate.errors import NotebookAccelerateError

PROGRAM = "notebook-accelerate"
REPORTED_ERRORS = (ValueError, OSError, NotebookAccelerateError, ImportError)
"""The errors that commands report in one line, without a traceback."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows each option once, with underscores, even though hyphens are accepted, too."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 36, "width": 110, **options})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return the names of an option, each once."""
        names = list(action.option_strings)
        underscored = {name for name in names if "_" in name}
        shown = [name for name in names if f"--{name[2:].replace('-', '_')}" not in underscored - {name}]
        if not names:
            return super()._format_action_invocation(action)
        value = f" {self._format_args(action, action.dest.upper())}" if action.nargs != 0 else ""
        return ", ".join(shown) + value

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """Add the usage, without the options if there are many."""
        if usage is None and len(list(actions)) > 20:
            positional = [action.metavar or action.dest for action in actions if not action.option_strings]
            usage = " ".join(["%(prog)s [options]", *(str(name) for name in positional)])
        super().add_usage(usage, actions, groups, prefix)


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The type of the object that ``add_subparsers`` returns."""


def command_parser(
    subparsers: Subparsers | None, name: str, help: str, description: str = ""
) -> argparse.ArgumentParser:
    """Create the parser of a command.

    Args:
        subparsers: The subparsers of the program. If None, a standalone parser is created.
        name: The name of the command.
        help: A sentence about the command.
        description: Longer text for ``--help``. If "", the sentence is used.
    """
    options: dict[str, Any] = {
        "description": description or help,
        "formatter_class": HelpFormatter,
        "allow_abbrev": False,
    }
    if subparsers is None:
        return argparse.ArgumentParser(f"{PROGRAM} {name}", **options)
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=help, **options)
    return parser


def add_config_file(parser: argparse.ArgumentParser, help: str, **options: Any) -> None:
    """Add the option ``--config_file``."""
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help=help, **options)


def exit_code(error: BaseException) -> int:
    """Return 2 for a mistake in the arguments or a file, and 1 for other `REPORTED_ERRORS`."""
    return 2 if isinstance(error, (ValueError, OSError)) else 1


def in_options(message: str, options: Mapping[str, str]) -> str:
    """Return an error message with a command's options in place of parameters, such as "--queue" for "queue=True".

    Args:
        message: The error message.
        options: The names of the options, by parameter. Parameters that have no option are left as they are.
    """

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        return f"--{options[name]}{'' if value else ' '}" if name in options else found[0]

    return re.sub(r"(?<![\w.$'\"-])([a-z]\w*)=(True\b|(?!False\b)(?=[^=\s]))", option, message)
