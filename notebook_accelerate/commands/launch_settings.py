"""Turns the options of ``launch`` and a configuration file into one configuration."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from notebook_accelerate.commands.launch_options import DYNAMO, FP8, GROUPS, SECTIONS, Option
from notebook_accelerate.config import config_file
from notebook_accelerate.config.config_file import ClusterConfig
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.integrations import accelerate_alias

_FIELDS = {
    "cpu": "use_cpu",
    **{
        name: name
        for name in (
            "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
            "mixed_precision", "debug", "enable_cpu_affinity", "gpu_ids", "same_network", "downcast_bf16",
            "main_training_function",
        )
    },
}  # fmt: skip
"""Fields of the configuration file by option."""
_FP8_SECTION = "fp8_config"
_EXCLUSIVE = (
    ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp"),
    ("use_deepspeed", "use_fsdp", "use_megatron_lm"),
)
"""Groups of mutually exclusive options."""


def option(args: argparse.Namespace, name: str, default: Any = None) -> Any:
    """Return the value of an option; ``default`` where it is missing or not given."""
    value = getattr(args, name, None)
    return default if value is None else value


def cluster_config(args: argparse.Namespace) -> ClusterConfig:
    """Return the configuration file of a launch with the options over it.

    Args:
        args: Options of ``launch``; missing ones count as not given.

    Raises:
        FileNotFoundError: The configuration file does not exist.
        ValueError: The file has unknown keys or values.
    """
    path = option(args, "config_file")
    if path is None and (option(args, "cpu", False) or not Path(config_file.default_config_file).is_file()):
        found: ClusterConfig = ClusterConfig.from_dict({})
    else:
        found = config_file.load_cluster_config(path)
    for name, field in _FIELDS.items():
        if (value := option(args, name)) is not None:
            setattr(found, field, value)
    for section in SECTIONS:
        contents = getattr(found, section) if section in _sections_in_use(args, found) else None
        setattr(found, section, {} if contents is None else _section(args, SECTIONS[section], contents))
    found.dynamo_config = dynamo_section(args, found.dynamo_config or {})
    found.fp8_config = _fp8(args, found.fp8_config or {}) if found.mixed_precision == "fp8" else {}
    return found


def _sections_in_use(args: argparse.Namespace, found: ClusterConfig) -> set[str]:
    """Return the sections that the options select; if they select none, those of the file."""
    asked = {section for section in SECTIONS if option(args, f"use_{section.removesuffix('_config')}", False)}
    if option(args, "use_parallelism_config", False):
        asked.add("parallelism_config")
    if asked:
        return asked
    kind = getattr(found.distributed_type, "value", found.distributed_type)
    in_file = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}
    sections = {in_file[kind]} if kind in in_file else set()
    return sections | ({"parallelism_config"} if found.parallelism_config else set())


def _section(args: argparse.Namespace, options: Iterable[Option], contents: dict[str, Any]) -> dict[str, Any]:
    defaults = {each.name: each.default for each in options if each.default is not None}
    return {**defaults, **contents, **given_options(args, options)}


def given_options(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """Return the values of those options that are given, by name."""
    return {each.name: value for each in options if (value := option(args, each.name)) is not None}


def dynamo_section(args: argparse.Namespace, contents: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of ``torch.compile`` by option: the defaults, under ``contents``, under given options."""
    named = {f"dynamo_{name.removeprefix('dynamo_')}": value for name, value in contents.items()}
    return _section(args, DYNAMO, named)


def _fp8(args: argparse.Namespace, contents: dict[str, Any]) -> dict[str, Any]:
    """Return the section, whose keys have no prefix."""
    named = {f"fp8_{name.removeprefix('fp8_')}": value for name, value in contents.items()}
    return {name.removeprefix("fp8_"): value for name, value in _section(args, FP8, named).items()}


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
    found = cluster_config(args)
    arguments = found.to_launch_arguments()
    arguments["env"] = {**arguments["env"], **_launcher_variables(args, found)}
    for name in ("max_restarts", "monitor_interval"):
        if (value := option(args, name)) is not None:
            arguments[name] = value
    if conf := option(args, "rdzv_conf"):
        arguments["rdzv_conf"] = dict(part.split("=", 1) for part in conf.split(",") if "=" in part)
    if arguments.get("num_processes") == 1 and arguments["num_nodes"] == 1:
        arguments["log_line_prefix_template"] = ""  # one process needs no label
    return LaunchConfig(**arguments, as_accelerate=_as_accelerate(args), panel=False)


def _launcher_variables(args: argparse.Namespace, found: ClusterConfig) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets whatever the options are."""
    variables = {"OMP_NUM_THREADS": _threads(args, found)}
    by_torchrun = option(args, "multi_gpu", False) or any(getattr(found, section) for section in SECTIONS)
    if by_torchrun or found.num_processes > 1 or found.num_machines > 1:
        # Not KMP_AFFINITY: Intel's OpenMP would bind the threads of all ranks to the same cores.
        return {**variables, "ROLE_NAME": str(option(args, "role", "default"))}
    if found.use_cpu:
        return {**variables, "KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    return {**variables, "ACCELERATE_USE_CPU": "False"}


def _threads(args: argparse.Namespace, found: ClusterConfig) -> str:
    """Return the number of CPU threads of each rank.

    The option wins over OMP_NUM_THREADS. By default, ranks on the CPU share its cores, and other ranks have one thread
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
    if not option(args, "multi_gpu", False):
        return
    if (processes := option(args, "num_processes", 2)) < 2:
        raise ValueError(f"--multi_gpu needs at least 2 processes; got --num_processes {processes}")
    gpus = str(option(args, "gpu_ids", "all"))
    if gpus != "all" and "," not in gpus and option(args, "num_machines", 1) < 2:
        raise ValueError(f"--multi_gpu needs at least 2 GPUs; got --gpu_ids {gpus}")


def _check_supported(args: argparse.Namespace) -> None:
    refused = [each for group in GROUPS.values() for each in group if not each.supported]
    if given := [each.name for each in refused if option(args, each.name) not in (None, each.default)]:
        raise ValueError(f"--{given[0]} is not supported; leave it out, or use Accelerate's own launcher")
    launcher = option(args, "deepspeed_multinode_launcher", "standard")
    if launcher != "standard":
        raise ValueError(
            f"--deepspeed_multinode_launcher {launcher} is not supported; start this command on each machine, with "
            "--machine_rank and --main_process_ip"
        )
