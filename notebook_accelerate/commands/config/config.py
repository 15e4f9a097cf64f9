"""``config``: asks questions and writes the configuration file; ``config default`` writes it without questions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebook_accelerate import hardware
from notebook_accelerate.commands.config.default import write_basic_config
from notebook_accelerate.commands.parsers import HelpFormatter, Subparsers, add_config_file, command_parser
from notebook_accelerate.config import config_file
from notebook_accelerate.config.config_file import ClusterConfig, SageMakerConfig
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.config.environ import parse_flag
from notebook_accelerate.hardware import device_table

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


# ---- the questions, each with the answers that it allows

Answers = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        name: Key of the answer: "section.key" for a section of the configuration file.
        text: The question.
        default: The answer of an empty line; a function of the answers so far, or a value.
        type: Converts the answer.
        choices: The allowed answers; None: any.
        when: Whether to ask, from the answers so far.
    """

    name: str
    text: str
    default: Any = None
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    when: Callable[[Answers], bool] = lambda _: True

    def ask(self, answers: Answers, read: Callable[[str], str], show: Callable[[str], None]) -> Any:
        """Ask until the answer is allowed, and return it.

        Args:
            answers: The answers so far.
            read: Shows a prompt and returns a line.
            show: Shows a line.
        """
        default = self.default(answers) if callable(self.default) else self.default
        allowed = f" ({'/'.join(self.choices)})" if self.choices else ""
        shown = "yes" if default is True else "no" if default is False else default
        while True:
            line = read(f"{self.text}{allowed}{'' if shown in (None, '') else f' [{shown}]'}: ").strip()
            if not line:
                return default
            try:
                return self._convert(line)
            except ValueError as error:
                show(f"  {error}")

    def _convert(self, line: str) -> Any:
        if self.choices is None:
            return self.type(line)
        found = [choice for choice in self.choices if choice.lower() == line.lower()]
        if not found:
            raise ValueError(f"{line!r} is not allowed; type one of {', '.join(self.choices)}")
        return self.type(found[0])


def questions(devices: int) -> tuple[Question, ...]:
    """Return the questions in their order.

    Args:
        devices: Accelerators of this machine.
    """
    deepspeed, fsdp, megatron = _uses("deepspeed"), _uses("fsdp"), _uses("megatron_lm")
    return (
        Question("num_machines", "How many machines train together?", 1, int),
        Question("machine_rank", "Which is this one, counted from 0?", 0, int, when=_several),
        Question("main_process_ip", "What is the address of machine 0?", "127.0.0.1", when=_several),
        Question("main_process_port", "Which of its ports is free?", 29500, int, when=_several),
        Question("rdzv_backend", "How do they find each other?", "static", choices=("static", "c10d"), when=_several),
        _yes("use_cpu", "Train on the CPU only?", default=not devices),
        Question(
            "num_processes",
            "How many processes on all machines?",
            lambda answers: (1 if answers["use_cpu"] else max(devices, 1)) * answers["num_machines"],
            int,
        ),
        Question("mixed_precision", "Which precision?", "no", choices=("no", "fp16", "bf16", "fp8")),
        Question("strategy", "How is the model split?", "none", choices=("none", "fsdp", "deepspeed", "megatron_lm")),
        Question("fsdp_config.fsdp_version", "Which version of FSDP?", 2, int, ("1", "2"), fsdp),
        Question(
            "fsdp_config.fsdp_sharding_strategy", "What is sharded?", "FULL_SHARD",
            choices=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
            when=lambda answers: answers.get("fsdp_config.fsdp_version") == 1,
        ),
        _yes(
            "fsdp_config.fsdp_reshard_after_forward", "Shard parameters again after forward, which saves memory?", True,
            when=lambda answers: answers.get("fsdp_config.fsdp_version") == 2,
        ),
        Question(
            "fsdp_config.fsdp_auto_wrap_policy", "What are its units?", "TRANSFORMER_BASED_WRAP",
            choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), when=fsdp,
        ),
        Question(
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            "Classes of the layers, separated by commas (empty: as the model says)?", when=_wraps_layers,
        ),
        _yes("fsdp_config.fsdp_offload_params", "Keep parameters and gradients on the CPU?", when=fsdp),
        _yes("fsdp_config.fsdp_activation_checkpointing", "Recompute activations in backward?", when=fsdp),
        Question(
            "fsdp_config.fsdp_state_dict_type", "How are checkpoints saved?", "SHARDED_STATE_DICT",
            choices=("SHARDED_STATE_DICT", "FULL_STATE_DICT"), when=fsdp,
        ),
        Question("deepspeed_config.deepspeed_config_file", "JSON file of DeepSpeed (empty: none)?", when=deepspeed),
        *_deepspeed(),
        Question("megatron_lm_config.megatron_lm_tp_degree", "Ranks that split each layer?", 1, int, when=megatron),
        Question("megatron_lm_config.megatron_lm_pp_degree", "Stages of the pipeline?", 1, int, when=megatron),
        Question("megatron_lm_config.megatron_lm_num_micro_batches", "Micro-batches per step?", 1, int, when=megatron),
        Question("megatron_lm_config.megatron_lm_gradient_clipping", "Norm of gradients?", 1.0, float, when=megatron),
        _yes("dynamo", "Compile models with torch.compile?"),
        Question("dynamo_config.dynamo_backend", "Which back end?", "inductor", when=lambda answers: answers["dynamo"]),
    )  # fmt: skip


def _yes(name: str, text: str, default: bool = False, when: Callable[[Answers], bool] = lambda _: True) -> Question:
    return Question(name, text, default, parse_flag, when=when)


def _several(answers: Answers) -> bool:
    return bool(answers["num_machines"] > 1)


def _uses(strategy: str) -> Callable[[Answers], bool]:
    return lambda answers: bool(answers["strategy"] == strategy)


def _wraps_layers(answers: Answers) -> bool:
    return bool(answers.get("fsdp_config.fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP")


def _deepspeed() -> tuple[Question, ...]:
    def when(answers: Answers) -> bool:
        return bool(answers["strategy"] == "deepspeed" and not answers["deepspeed_config.deepspeed_config_file"])

    devices = ("none", "cpu", "nvme")
    return (
        Question("deepspeed_config.zero_stage", "Which stage of ZeRO?", 2, int, ("0", "1", "2", "3"), when),
        Question("deepspeed_config.offload_optimizer_device", "Optimizer offloaded to?", "none", str, devices, when),
        Question("deepspeed_config.offload_param_device", "Parameters offloaded to?", "none", str, devices, when),
        Question("deepspeed_config.gradient_accumulation_steps", "Batches per step?", 1, int, when=when),
        Question("deepspeed_config.gradient_clipping", "Norm of gradients?", 1.0, float, when=when),
    )
