"""Combines the options of ``launch`` and a configuration file into one configuration."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from notebook_accelerate import hardware
from notebook_accelerate.config import config_file, environ
from notebook_accelerate.config.config_file import ClusterConfig, section_settings
from notebook_accelerate.config.environ import parse_flag, str_to_bool
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.settings import (
    HARDWARE,
    LIMITS,
    MACHINES,
    OTHER,
    OUTPUT,
    Setting,
    settings_of,
    short_help,
)
from notebook_accelerate.integrations import accelerate_alias

_EXCLUSIVE = (
    ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp"),
    ("use_deepspeed", "use_fsdp", "use_megatron_lm"),
)
"""Groups of mutually exclusive options."""
_OTHER_LAUNCHER = (
    "{launcher} is not supported; start this command on each machine, with --machine_rank and --main_process_ip, and "
    "pass --deepspeed_multinode_launcher standard"
)


def option(args: argparse.Namespace, name: str, default: Any = None) -> Any:
    """Return the value of an option, or ``default`` if it is missing or not given."""
    value = getattr(args, name, None)
    return default if value is None else value


def interpreter_options(args: argparse.Namespace) -> tuple[bool, bool]:
    """Return whether the script is a module, and whether it runs without Python.

    Args:
        args: Options of ``launch``.

    Raises:
        ValueError: Both ``--module`` and ``--no_python`` are given.
    """
    module, no_python = bool(option(args, "module", False)), bool(option(args, "no_python", False))
    if module and no_python:
        raise ValueError("--module and --no_python are mutually exclusive; pass one of them")
    return module, no_python


def cluster_config(args: argparse.Namespace) -> ClusterConfig:
    """Return the configuration of a launch: its file, overridden by its options.

    Args:
        args: Options of ``launch``. Missing options count as not given.

    Raises:
        FileNotFoundError: The configuration file does not exist.
        ValueError: The file has unknown keys or values.
    """
    if _file_in_use(args):
        found = config_file.load_cluster_config(option(args, "config_file"))
    else:
        found = ClusterConfig.from_dict({})
    for _, each in section_settings(""):
        if (value := option(args, str(each.option))) is not None:
            setattr(found, each.name, value)
    in_use = _sections_in_use(args, found)
    for key in STRATEGIES:
        setattr(found, key, _section(args, key, getattr(found, key)) if key in in_use else {})
    found.dynamo_config = dynamo_section(args, found.dynamo_config or {})
    found.fp8_config = _fp8(args, found.fp8_config or {}) if found.mixed_precision == "fp8" else {}
    return found


def _file_in_use(args: argparse.Namespace) -> bool:
    """Return whether the settings come from a file: the given one, or the default one unless --cpu is given."""
    default = Path(config_file.default_config_file)
    return option(args, "config_file") is not None or (not option(args, "cpu", False) and default.is_file())


def _sections_in_use(args: argparse.Namespace, found: ClusterConfig) -> set[str]:
    """Return the sections that the options select or, if there are no such options, the sections that the file uses."""
    if asked := {key for key, section in STRATEGIES.items() if option(args, f"use_{section.strategy}", False)}:
        return asked
    kind = str(getattr(found.distributed_type, "value", found.distributed_type))
    sections = {key for key, section in STRATEGIES.items() if section.strategy.upper() == kind}
    return sections | ({"parallelism_config"} if found.parallelism_config else set())


def _section(args: argparse.Namespace, key: str, contents: dict[str, Any] | None) -> dict[str, Any]:
    defaults = {each.name: each.default for each in OPTIONS[key] if each.default is not None}
    return {**defaults, **(contents or {}), **given_options(args, key)}


def given_options(args: argparse.Namespace, key: str) -> dict[str, Any]:
    """Return the values of the options that are given for a section of the configuration file, by name."""
    return {each.name: value for each in OPTIONS[key] if (value := option(args, each.name)) is not None}


def dynamo_section(args: argparse.Namespace, contents: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``torch.compile``: given options override ``contents``, which overrides the defaults."""
    named = {f"dynamo_{name.removeprefix('dynamo_')}": value for name, value in contents.items()}
    return _section(args, "dynamo_config", named)


def _fp8(args: argparse.Namespace, contents: dict[str, Any]) -> dict[str, Any]:
    """Return the section fp8_config, whose keys have no prefix."""
    named = {f"fp8_{name.removeprefix('fp8_')}": value for name, value in contents.items()}
    return {name.removeprefix("fp8_"): value for name, value in _section(args, "fp8_config", named).items()}


def launch_config(args: argparse.Namespace) -> LaunchConfig:
    """Return the launch that the options and the configuration file describe.

    Args:
        args: Options of ``launch``.

    Raises:
        FileNotFoundError: The configuration file does not exist.
        ValueError: An option is not supported, or a value is not allowed.
    """
    _check_supported(args)
    _check_conflicts(args)
    log_streams(args)
    found = cluster_config(args)
    _check_machines(args, found)
    _check_devices(args, found)
    arguments = found.to_launch_arguments()
    arguments["env"] = {**arguments["env"], **_launcher_variables(args, found)}
    for each in settings_of(LaunchConfig).values():
        if each.option and (value := option(args, each.option)) is not None:
            arguments[each.name] = value
    if arguments.get("num_processes") == 1 and arguments["num_nodes"] == 1:
        arguments["log_line_prefix_template"] = ""  # The lines of a single process need no label.
    return LaunchConfig(**arguments, as_accelerate=_as_accelerate(args), panel=False)


def _launcher_variables(args: argparse.Namespace, found: ClusterConfig) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets even if no option asks for them."""
    variables = {"OMP_NUM_THREADS": _threads(args, found)}
    by_torchrun = option(args, "multi_gpu", False) or any(getattr(found, key) for key in STRATEGIES)
    if by_torchrun or found.num_processes > 1 or found.num_machines > 1:
        # Leave out KMP_AFFINITY: with it, Intel's OpenMP would bind the threads of all ranks to the same cores.
        return {**variables, "ROLE_NAME": str(option(args, "role", "default"))}
    if found.use_cpu:
        return {**variables, "KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    return {**variables, "ACCELERATE_USE_CPU": "False"}


def _threads(args: argparse.Namespace, found: ClusterConfig) -> str:
    """Return the number of CPU threads for each rank.

    The option overrides OMP_NUM_THREADS. By default, ranks on the CPU share its cores, and other ranks have one thread
    each, as under torchrun.
    """
    if (given := option(args, "num_cpu_threads_per_process")) is not None:
        return str(given)
    inherited = os.environ.get("OMP_NUM_THREADS", "").strip()
    if inherited not in {"", "0"}:
        return inherited
    if not found.use_cpu or found.num_processes < 1:
        return "1"
    import psutil

    ranks = max(found.num_processes // max(found.num_machines, 1), 1)
    return str(max((psutil.cpu_count(logical=False) or 1) // ranks, 1))


def _as_accelerate(args: argparse.Namespace) -> bool:
    asked = option(args, "as_accelerate")
    if asked is None:
        return accelerate_alias.is_installed() or importlib.util.find_spec("accelerate") is None
    return bool(asked)


def _check_conflicts(args: argparse.Namespace) -> None:
    for names in _EXCLUSIVE:
        given = [f"--{name}" for name in names if option(args, name, False)]
        if len(given) > 1:
            raise ValueError(f"{', '.join(given[:-1])} and {given[-1]} are mutually exclusive; pass one of them")
    if (processes := option(args, "num_processes", 1)) < 1:
        raise ValueError(f"--num_processes {processes} is not allowed; pass the number of processes on all machines")
    if option(args, "multi_gpu", False) and option(args, "num_processes", 2) < 2:
        raise ValueError(f"--multi_gpu needs at least 2 processes; got --num_processes {processes}")
    if not option(args, "use_parallelism_config", False):
        return
    if not option(args, "use_fsdp", False) or option(args, "fsdp_version") == 1:
        raise ValueError("--use_parallelism_config needs FSDP 2; add --use_fsdp --fsdp_version 2")


def _check_machines(args: argparse.Namespace, found: ClusterConfig) -> None:
    """Check that machines can find each other."""
    if found.num_machines < 2:
        return
    machines = f"num_machines={found.num_machines}"
    if not found.main_process_ip:
        raise ValueError(f"{machines} needs the address of the first machine; pass --main_process_ip 10.0.0.1")
    in_order = (found.rdzv_backend or "static") == "static"
    if in_order and option(args, "machine_rank") is None and not _file_in_use(args):
        raise ValueError(
            f"{machines} needs the index of this machine; pass --machine_rank 0 on the first machine, 1 on the next "
            "one, or --rdzv_backend c10d on all machines"
        )
    launcher = (found.deepspeed_config or {}).get("deepspeed_multinode_launcher") or "standard"
    if launcher != "standard":
        raise ValueError(_OTHER_LAUNCHER.format(launcher=f"deepspeed_multinode_launcher: {launcher}"))


def _check_devices(args: argparse.Namespace, found: ClusterConfig) -> None:
    """Check the settings for GPUs and TPUs, in the options and in the configuration file."""
    kind = str(getattr(found.distributed_type, "value", found.distributed_type))
    if any(option(args, name, False) for name in _EXCLUSIVE[0]) or option(args, "use_megatron_lm", False):
        kind = "XLA" if option(args, "tpu", False) else "MULTI_GPU" if option(args, "multi_gpu", False) else "NO"
    gpus = str(found.gpu_ids or "all")
    several = kind.startswith("MULTI_") and kind != "MULTI_CPU" and found.num_machines < 2
    if several and gpus != "all" and "," not in gpus:
        raise ValueError(f"several GPUs are needed, but gpu_ids={gpus} selects one; pass --gpu_ids all")
    if kind == "XLA" and option(args, "no_python", False):
        raise ValueError("--no_python is not supported on a TPU; pass a Python script or, with --module, a module")


def check_gpus(args: argparse.Namespace) -> None:
    """Check that the machine has the GPUs that the options ask for. Otherwise, the script would train on the CPU.

    Raises:
        ValueError: The options need GPUs, but the machine has no accelerator.
    """
    asked = {"--multi_gpu": option(args, "multi_gpu", False), "--gpu_ids": option(args, "gpu_ids") not in (None, "all")}
    given = [name for name, is_given in asked.items() if is_given]
    if given and not option(args, "cpu", False) and hardware.detect().accelerator == "cpu":
        raise ValueError(f"{given[0]} needs GPUs, but this machine has none that torch can use; pass --cpu instead")


def log_streams(args: argparse.Namespace) -> dict[int, int] | int:
    """Return the streams that ``--tee`` selects, as in torchrun: 0 to 3 (by default 3), or one of these by local rank.

    Raises:
        ValueError: The text is not in this format.
    """
    text = option(args, "tee", "3")
    if not re.fullmatch(r"[0-3]|(\d+:[0-3],)*\d+:[0-3]", text):
        raise ValueError(
            f"--tee {text} is not allowed; pass 1 (stdout), 2 (stderr), 3 (both), or one for each process: 0:1,1:3"
        )
    if ":" not in text:
        return int(text)
    return {int(rank): int(streams) for rank, streams in (part.split(":") for part in text.split(","))}


def _check_supported(args: argparse.Namespace) -> None:
    refused = [each for group in GROUPS.values() for each in group if not each.supported]
    if given := [each.name for each in refused if option(args, each.name) not in (None, each.default)]:
        raise ValueError(f"--{given[0]} is not supported; leave it out, or use Accelerate's own launcher")
    launcher = option(args, "deepspeed_multinode_launcher", "standard")
    if launcher != "standard":
        raise ValueError(_OTHER_LAUNCHER.format(launcher=f"--deepspeed_multinode_launcher {launcher}"))


# ---- the options of ``launch``


@dataclass(frozen=True)
class Option:
    """One option of ``launch``.

    Attributes:
        name: The option's name on the command line, with underscores. Hyphens are accepted, too.
        help: A sentence, or a function that returns it.
        type: Converts the option's text. If None, the option is a flag.
        choices: The allowed values.
        default: The value if neither the command line nor the configuration file sets one.
        short: A second name, such as "-m".
        supported: Whether this package supports the option. Other options are rejected.
    """

    name: str
    help: str | Callable[[], str] = ""
    type: Callable[[str], Any] | None = str
    choices: tuple[Any, ...] | None = None
    default: Any = None
    short: str = ""
    supported: bool = True

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add the option to a parser. Its value is None if it is not given."""
        flags = list(dict.fromkeys([f"--{self.name}", f"--{self.name.replace('_', '-')}"]))
        flags = [self.short, *flags] if self.short else flags
        own = self.help if isinstance(self.help, str) else self.help()
        text = own if self.supported else "Not supported; rejected with an error."
        text += f" (default: {self.default})" if self.default not in (None, "") else ""
        if self.type is None:
            parser.add_argument(*flags, dest=self.name, action="store_true", default=None, help=text)
        else:
            metavar = None if self.choices and len(self.choices) < 5 else _METAVARS.get(self.type, "VALUE")
            parser.add_argument(
                *flags, dest=self.name, type=self.type, choices=self.choices, metavar=metavar, help=text
            )


def _option_of(owner: type[Any], known: Setting) -> Option:
    choices = tuple(each.value.lower() if isinstance(each, Enum) else each for each in known.choices)
    return Option(
        str(known.option),
        lambda: short_help(owner, known.name).replace("``", ""),
        None if known.switch else known.parse or _CONVERTERS[known.kind],
        choices if known.closed else None,
        known.preset,
    )


_PROCESSES = "Processes"
"""The group of the settings that do not name one."""
_CONVERTERS: dict[type[Any], Callable[[str], Any]] = {bool: parse_flag, int: int, float: float, str: str}
_FLAGS = (parse_flag, environ.flag_text, str_to_bool)
_METAVARS: dict[Any, str] = {
    int: "N", float: "X", str: "TEXT", environ.flags_text: "BOOL,BOOL,BOOL",
    environ.assignments: "NAME=VALUE,...", **dict.fromkeys(_FLAGS, "BOOL"),
}  # fmt: skip

GENERAL = (
    Option("config_file", "YAML or JSON file with settings (default: the default configuration file, if it exists)."),
    Option("module", "Interpret the script as the name of a module, as python -m does.", None, short="-m"),
    Option("no_python", "Interpret the script as a program instead of a Python file.", None),
    Option("quiet", "Print only the error of the first failed rank.", None, short="-q"),
)
OPTIONS = {key: tuple(_option_of(*entry) for entry in section_settings(key)) for key in config_file.SECTIONS if key}
"""Options by section of the configuration file."""
OPTIONS["deepspeed_config"] += (
    Option("deepspeed_multinode_launcher", "DeepSpeed's launcher. Only standard is supported.", default="standard"),
    Option("deepspeed_hostfile", supported=False),
    Option("deepspeed_exclusion_filter", supported=False),
    Option("deepspeed_inclusion_filter", supported=False),
)
_BACKEND = "Library that computes in fp8, with --mixed_precision fp8."
OPTIONS["fp8_config"] += (Option("fp8_backend", _BACKEND, choices=("ao", "te", "msamp")),)
STRATEGIES = {key: config_file.section_of(key) for key in OPTIONS if config_file.section_of(key).strategy}
"""The sections that configure strategies."""
_NOT_IN_FILE = {
    HARDWARE: (
        Option("multi_gpu", "Train on several GPUs, which is the default if there are several.", None),
        Option("tpu", "Train on a TPU, which is the default if there is one.", None),
    ),
    _PROCESSES: (
        Option(
            "num_cpu_threads_per_process",
            "CPU threads of each process (default: OMP_NUM_THREADS or, with --cpu, a share of the cores; otherwise 1).",
            int,
        ),
    ),
    OUTPUT: (
        Option(
            "as_accelerate",
            "Let the script import this package as accelerate (default: if Accelerate is not installed).", parse_flag,
        ),
        Option("log_dir", "Folder for files with the output of each process, in addition to printing it."),
        Option("tee", "Streams in the files: 1 (stdout), 2 (stderr), 3 (both), or by process: 0:1,1:3.", short="-t"),
        Option("role", "Role of the processes, which they find in the variable ROLE_NAME.", default="default"),
    ),
    OTHER: (
        *(
            Option(name, supported=False)
            for name in ("vm", "env", "aws_access_key_id", "aws_secret_access_key", "mpirun_hostfile")
        ),
        Option("tpu_use_sudo", type=None, supported=False),
        Option("tpu_cluster", type=None, supported=False),
        Option("no_tpu_cluster", "Train on one machine with a TPU, which is the default.", None),
    ),
}  # fmt: skip
"""Options that are not settings of the configuration file, by group."""


def _groups() -> dict[str, list[Option]]:
    """Return the options by the title of their group."""
    groups: dict[str, list[Option]] = {title: [] for title in (HARDWARE, _PROCESSES, MACHINES, LIMITS, OUTPUT)}
    groups["Strategy"] = [
        Option(f"use_{section.strategy}", f"Train with {section.title}.", None) for section in STRATEGIES.values()
    ]
    for key, options in OPTIONS.items():
        selected = f" (with --use_{STRATEGIES[key].strategy})" if key in STRATEGIES else ""
        groups[f"{config_file.section_of(key).title}{selected}"] = list(options)
    settings = section_settings("")
    settings += [(LaunchConfig, each) for each in settings_of(LaunchConfig).values() if each.option]
    for owner, each in settings:
        groups.setdefault(each.group or _PROCESSES, []).append(_option_of(owner, each))
    for title, options in _NOT_IN_FILE.items():
        groups[title] += options
    return groups


GROUPS = _groups()
_BY_NAME = {each.name: each for options in GROUPS.values() for each in options}


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options of ``launch`` to the parser of another command.

    Args:
        parser: The parser that the options are added to.
        names: The names of the options, with underscores.
    """
    for name in names:
        _BY_NAME[name].add_to(parser)
