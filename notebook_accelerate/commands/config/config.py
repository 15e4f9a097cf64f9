"""``config``: asks questions and writes the configuration file; ``config default`` writes it without questions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from notebook_accelerate import hardware
from notebook_accelerate.commands.config.default import write_basic_config
from notebook_accelerate.commands.parsers import HelpFormatter, Subparsers, add_config_file, command_parser
from notebook_accelerate.config import config_file
from notebook_accelerate.config.config_file import ClusterConfig, SageMakerConfig, section_settings
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.config.environ import parse_flag
from notebook_accelerate.config.settings import MIXED_PRECISIONS, Answers, Setting
from notebook_accelerate.hardware import device_table

_FILE = "Path of the file, .json for JSON, otherwise YAML (default: the default configuration file)."
_STRATEGIES = ("fsdp", "deepspeed", "megatron_lm")


def config_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``config``, standalone or as one of ``subparsers``."""
    parser = command_parser(
        subparsers,
        "config",
        "Ask questions and write a configuration file.",
        "Ask questions about the machines and the training, and write the answers to the file that `launch` and "
        "`LaunchConfig.from_file` read. Its format is Accelerate's.",
    )
    add_config_file(parser, _FILE)
    parser.set_defaults(func=config_command)
    modes = parser.add_subparsers(title="without questions", metavar="MODE")
    default = modes.add_parser(
        "default", help="Write a file for this machine's devices.", formatter_class=HelpFormatter, allow_abbrev=False,
        description="Write a configuration file for all devices of this machine. An existing file is not changed.",
    )  # fmt: skip
    add_config_file(default, _FILE, default=argparse.SUPPRESS)
    default.add_argument(
        "--mixed_precision", "--mixed-precision", choices=MIXED_PRECISIONS, default="no",
        help="Mixed precision (default: no).",
    )  # fmt: skip
    default.set_defaults(func=default_config_command)
    update = modes.add_parser(
        "update", help="Rewrite a file with the keys of this version.", formatter_class=HelpFormatter,
        description="Read a configuration file and write it again, with the keys of this version.", allow_abbrev=False,
    )  # fmt: skip
    add_config_file(update, _FILE, default=argparse.SUPPRESS)
    update.set_defaults(func=update_config_command)
    return parser


get_config_parser = config_command_parser


def config_command(args: argparse.Namespace) -> None:
    """Ask the questions and write the file.

    Raises:
        ValueError: The answers contradict each other.
    """
    print("Press Enter to accept the answer in brackets.\n")
    config = get_cluster_input(input)
    config.to_launch_arguments()  # Before the file is written, this raises the errors that a launch would raise.
    print(f"\nthe configuration is in {_write(config, args.config_file)}")


def get_cluster_input(read: Callable[[str], str]) -> ClusterConfig:
    """Ask the user for the contents of a configuration file.

    Args:
        read: A function like ``input``, which shows a prompt and returns the line that the user types.
    """
    machine = hardware.detect()
    answers: dict[str, Any] = {"devices": machine.count}
    contents: dict[str, Any] = {}

    def ask(section: str) -> None:
        for known in _asked(section):
            if known.when(answers):
                answer = _ask(known, answers, read)
                answers[str(known.option)] = answer
                if answer is not None and answer != "":
                    where = contents.setdefault(section, {}) if section else contents
                    where[str(known.option) if section else known.name] = answer

    ask("")
    how = Setting(ask="Which strategy distributes the model?", answer="none", choices=("none", *_STRATEGIES))
    strategy = _ask(how, answers, read)
    if strategy in _STRATEGIES:
        ask(f"{strategy}_config")
    if _ask(Setting(ask="Compile models with torch.compile?", answer=False), answers, read):
        ask("dynamo_config")
    chosen = DistributedType(strategy.upper()) if strategy in _STRATEGIES else _plain_type(answers, machine)
    contents["distributed_type"] = chosen
    found: ClusterConfig = ClusterConfig.from_dict(contents)
    return found


def _plain_type(answers: dict[str, Any], machine: hardware.HardwareInfo) -> DistributedType:
    if answers["num_processes"] == 1:
        return DistributedType.NO
    kind = device_table.row("cpu" if answers["cpu"] else machine.accelerator).distributed_type
    return DistributedType(kind)


def default_config_command(args: argparse.Namespace) -> None:
    """Write a configuration file for this machine."""
    path = write_basic_config(args.mixed_precision, args.config_file or config_file.default_config_file)
    if path:
        print(f"the configuration is in {path}")


def update_config_command(args: argparse.Namespace) -> None:
    """Read a configuration file and write it again, with the keys of this version.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file has unknown keys or values.
    """
    path = args.config_file or config_file.default_config_file
    config = config_file.load_config_from_file(path)
    print(f"the configuration is in {_write(config, path)}")


def _write(config: ClusterConfig | SageMakerConfig, path: str | None) -> Path:
    target = Path(path or config_file.default_config_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    (config.to_json_file if target.suffix == ".json" else config.to_yaml_file)(target)
    return target


# ---- the questions


def _asked(section: str) -> list[Setting]:
    """Return the settings of a section with questions, in the order of the questions."""
    return sorted((known for _, known in section_settings(section) if known.ask), key=attrgetter("place"))


def _ask(known: Setting, answers: Answers, read: Callable[[str], str]) -> Any:
    """Ask until the answer is allowed, and return it."""
    default = known.answer(answers) if callable(known.answer) else known.answer
    choices = tuple(known.choices) if known.answers is None else known.answers
    allowed = f" ({'/'.join(map(str, choices))})" if choices else ""
    shown = "yes" if default is True else "no" if default is False else default
    convert = parse_flag if isinstance(default, bool) else known.kind
    while True:
        line = read(f"{known.ask}{allowed}{'' if shown in (None, '') else f' [{shown}]'}: ").strip()
        if not line:
            return default
        try:
            return convert(_choice(line, choices))
        except ValueError as error:
            print(f"  {error}")


def _choice(line: str, choices: tuple[Any, ...]) -> str:
    found = [str(choice) for choice in choices if str(choice).lower() == line.lower()]
    if choices and not found:
        raise ValueError(f"{line!r} is not allowed; type one of {', '.join(map(str, choices))}")
    return found[0] if found else line
