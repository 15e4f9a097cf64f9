"""``config``: asks questions and writes the configuration file; ``config default`` writes it without questions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from notebook_accelerate import hardware
from notebook_accelerate.commands.config.questions import questions
from notebook_accelerate.commands.parsers import HelpFormatter, Subparsers, add_config_file, command_parser
from notebook_accelerate.config import config_file
from notebook_accelerate.config.config_file import ClusterConfig, SageMakerConfig
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.hardware import device_table
from notebook_accelerate.commands.config.default import write_basic_config

_FILE = "Path of the file, YAML or .json; without it, the default one."
_STRATEGIES = {
    "fsdp": DistributedType.FSDP, "deepspeed": DistributedType.DEEPSPEED, "megatron_lm": DistributedType.MEGATRON_LM,
}  # fmt: skip


def config_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``config``; see ``launch_command_parser``."""
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
        description="Write a configuration file for all devices of this machine. A file that exists is kept.",
    )  # fmt: skip
    add_config_file(default, _FILE, default=argparse.SUPPRESS)
    default.add_argument(
        "--mixed_precision", "--mixed-precision", choices=("no", "fp16", "bf16", "fp8"), default="no",
        help="Precision of the computation (default: no).",
    )  # fmt: skip
    default.set_defaults(func=default_config_command)
    update = modes.add_parser(
        "update", help="Write a file again with the keys of this version.", formatter_class=HelpFormatter,
        description="Read a configuration file, and write it with the keys of this version.", allow_abbrev=False,
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
    print("An empty line takes the answer in brackets.\n")
    config = get_cluster_input(input)
    config.to_launch_arguments()  # checks what the launch would refuse
    print(f"\nthe configuration is in {_write(config, args.config_file)}")


def get_cluster_input(read: Callable[[str], str]) -> ClusterConfig:
    """Ask for a configuration.

    Args:
        read: Shows a prompt and returns a line.
    """
    answers: dict[str, Any] = {}
    machine = hardware.detect()
    for question in questions(machine.count):
        answers[question.name] = question.ask(answers, read, print) if question.when(answers) else None
    strategy = answers.pop("strategy")
    answers.pop("dynamo")
    contents: dict[str, Any] = {"distributed_type": _STRATEGIES.get(strategy) or _plain_type(answers, machine)}
    for name, value in answers.items():
        if value is not None and value != "":
            section, dot, key = name.partition(".")
            if dot:
                contents.setdefault(section, {})[key] = value
            else:
                contents[name] = value
    found: ClusterConfig = ClusterConfig.from_dict(contents)
    return found


def _plain_type(answers: dict[str, Any], machine: hardware.HardwareInfo) -> DistributedType:
    if answers["num_processes"] == 1:
        return DistributedType.NO
    kind = device_table.row("cpu" if answers["use_cpu"] else machine.accelerator).distributed_type
    return DistributedType(kind)


def default_config_command(args: argparse.Namespace) -> None:
    """Write a file for this machine; see ``write_basic_config``."""
    path = write_basic_config(args.mixed_precision, args.config_file or config_file.default_config_file)
    if path:
        print(f"the configuration is in {path}")


def update_config_command(args: argparse.Namespace) -> None:
    """Read a file and write it again.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It has unknown keys or values.
    """
    path = args.config_file or config_file.default_config_file
    config = config_file.load_config_from_file(path)
    print(f"the configuration is in {_write(config, path)}")


def _write(config: ClusterConfig | SageMakerConfig, path: str | None) -> Path:
    target = Path(path or config_file.default_config_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    (config.to_json_file if target.suffix == ".json" else config.to_yaml_file)(target)
    return target
