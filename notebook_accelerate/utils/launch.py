"""Accelerate's functions that convert the options of ``accelerate launch`` to command lines and environments.

They are for tools that build on Accelerate's launch options. ``launch`` itself does not run these command lines. The
functions read options from a parsed ``argparse.Namespace``, in which a missing option counts as not given.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from notebook_accelerate.commands.launch_settings import (
    STRATEGIES,
    dynamo_section,
    given_options,
    interpreter_options,
    option,
)
from notebook_accelerate.config import environ
from notebook_accelerate.config.config_file import ClusterConfig, processes_per_machine
from notebook_accelerate.config.plain_values import merge_dicts


def _training_variables(args: argparse.Namespace, *flags: str) -> dict[str, str]:
    """Return the variables of mixed precision, compilation and the given flags.

    Raises:
        ValueError: The mixed precision is unknown.
    """
    contents: dict[str, Any] = {name: option(args, name, False) for name in flags}
    contents["mixed_precision"] = str(option(args, "mixed_precision", "no")).lower()
    contents["dynamo_config"] = dynamo_section(args, {})
    if contents["mixed_precision"] == "fp8":
        given = given_options(args, "fp8_config")
        contents["fp8_config"] = {name.removeprefix("fp8_"): value for name, value in given.items()}
    environment: dict[str, str] = ClusterConfig.from_dict(contents).to_environment()
    return environment


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """Return this process's environment with the variables of a launch added."""
    env = {**os.environ, **_training_variables(args, "debug", "enable_cpu_affinity")}
    if (gpu_ids := option(args, "gpu_ids", "all")) != "all":
        env[_visible_devices()] = str(gpu_ids)
    if (threads := option(args, "num_cpu_threads_per_process")) is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    for key, section in STRATEGIES.items():
        if key != "deepspeed_config" and option(args, f"use_{section.strategy}", False):
            env |= _strategy_variables(args, key)
    return env


def _strategy_variables(args: argparse.Namespace, key: str) -> dict[str, str]:
    """Return the variables that select a strategy and pass its options on."""
    variables: dict[str, str] = ClusterConfig.from_dict({key: given_options(args, key)}).rank_variables()
    return {STRATEGIES[key].switch: "true", **variables}


def _visible_devices() -> str:
    from notebook_accelerate import hardware
    from notebook_accelerate.hardware import device_table

    return (*device_table.row(hardware.detect().accelerator).visible_variables, "CUDA_VISIBLE_DEVICES")[0]


def _script(args: argparse.Namespace) -> list[str]:
    return [args.training_script, *option(args, "training_script_args", [])]


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run a script in one process per machine.

    Args:
        args: Options of ``accelerate launch``.

    Raises:
        ValueError: Some options are mutually exclusive, or the mixed precision is unknown.
    """
    module, no_python = interpreter_options(args)
    env = _environment(args)
    on_cpu = bool(option(args, "cpu", False) or option(args, "use_cpu", False))
    env["ACCELERATE_USE_CPU"] = str(on_cpu)
    if on_cpu:
        env |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    if option(args, "num_machines", 1) > 1 or option(args, "num_processes", 1) > 1:
        env["MASTER_ADDR"] = str(option(args, "main_process_ip", "127.0.0.1"))
        env["MASTER_PORT"] = str(option(args, "main_process_port", 29500))
    interpreter = [] if no_python else [sys.executable, *(["-m"] if module else [])]
    return [*interpreter, *_script(args)], env


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment for torchrun, and write torchrun's own options into ``args``.

    Args:
        args: Options of ``accelerate launch``. This sets nproc_per_node, nnodes and node_rank, and either master_addr
            and master_port or rdzv_endpoint.

    Raises:
        ValueError: The number of processes is not a multiple of the number of machines, or options contradict each
            other.
    """
    interpreter_options(args)
    loads_on_rank_0 = option(args, "use_fsdp", False) and _is_on(args, "fsdp_cpu_ram_efficient_loading")
    if loads_on_rank_0 and not _is_on(args, "fsdp_sync_module_states", default=True):
        raise ValueError("--fsdp_cpu_ram_efficient_loading true needs --fsdp_sync_module_states true")
    machines = int(option(args, "num_machines", 1))
    processes = processes_per_machine(int(option(args, "num_processes", 1)), machines)
    address, port = option(args, "main_process_ip"), option(args, "main_process_port", 29500)
    args.nnodes, args.nproc_per_node = str(machines), str(processes)
    args.node_rank = int(option(args, "machine_rank", 0))
    if machines > 1 and option(args, "rdzv_backend", "static") != "static":
        args.rdzv_endpoint = f"{address}:{port}"
    else:
        args.master_port = str(port)
        if machines > 1:
            args.master_addr = str(address)
    return _environment(args)


def _is_on(args: argparse.Namespace, name: str, *, default: bool = False) -> bool:
    return str(option(args, name, default)).lower() == "true"


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command and the environment for DeepSpeed's launcher.

    The command is None if torchrun starts the ranks.

    Args:
        args: Options of ``accelerate launch`` and of its DeepSpeed section.
    """
    env = prepare_multi_gpu_env(args)
    env |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", **_strategy_variables(args, "deepspeed_config")}
    launcher = option(args, "deepspeed_multinode_launcher", "standard")
    if int(option(args, "num_machines", 1)) < 2 or launcher == "standard":
        return None, env
    command = ["deepspeed", "--hostfile", str(option(args, "deepspeed_hostfile"))]
    if launcher == "nossh":
        command += ["--node_rank", str(args.node_rank), "--no_ssh"]
    else:
        command += ["--no_local_rank", "--launcher", launcher]
    filters = {"--exclude": "deepspeed_exclusion_filter", "--include": "deepspeed_inclusion_filter"}
    chosen = [(flag, str(value)) for flag, name in filters.items() if (value := option(args, name)) is not None]
    # DeepSpeed does not accept both a number and a selection of devices.
    command += chosen[0] if chosen else ("--num_gpus", args.nproc_per_node)
    if address := option(args, "main_process_ip"):
        command += ["--master_addr", address]
    command += ["--master_port", str(option(args, "main_process_port", 29500))]
    module, no_python = interpreter_options(args)
    command += ["--module"] * module + ["--no_python"] * no_python
    return [*command, *_script(args)], env


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the options and the environment for a launch on TPUs.

    Args:
        args: Options of ``accelerate launch``.
        current_env: The environment to extend.
        pod: Whether the launch is for a pod of several hosts. This sets ``args.vm`` and ``args.tpu``.
    """
    if str(option(args, "mixed_precision", "no")) == "bf16":
        downcast = bool(option(args, "downcast_bf16", False))
        current_env["XLA_DOWNCAST_BF16" if downcast else "XLA_USE_BF16"] = "1"
    if option(args, "debug", False):
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm, args.tpu = option(args, "tpu_vm"), option(args, "tpu_name")
    return args, current_env


# ---- SageMaker

_SAME_IN_SAGEMAKER = ("image_uri", "transformers_version", "pytorch_version", "py_version", "base_job_name")


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the arguments of a SageMaker estimator for a training script, and the inputs for its ``fit``.

    Args:
        sagemaker_config: A ``SageMakerConfig``.
        args: Options of ``accelerate launch``.

    Raises:
        OSError: There are no credentials for AWS.
        ValueError: The script is not a Python file, or a script argument has no value.
    """
    _set_credentials(getattr(sagemaker_config, "profile", None), args)
    script = Path(args.training_script)
    if script.suffix != ".py":
        raise ValueError(f"training_script={args.training_script!r} is not a Python file; SageMaker needs one")
    os.environ["AWS_DEFAULT_REGION"] = str(sagemaker_config.region)
    kind = str(getattr(sagemaker_config.distributed_type, "value", sagemaker_config.distributed_type))
    parallel = {"smdistributed": {"dataparallel": {"enabled": True}}} if kind == "DATA_PARALLEL" else None
    metrics = _rows(sagemaker_config.sagemaker_metrics_file)
    inputs = _rows(sagemaker_config.sagemaker_inputs_file)
    estimator: dict[str, Any] = {
        **{name: getattr(sagemaker_config, name) for name in _SAME_IN_SAGEMAKER},
        "entry_point": script.name,
        "source_dir": str(script.parent),
        "role": sagemaker_config.iam_role_name,
        "instance_count": sagemaker_config.num_machines,
        "instance_type": sagemaker_config.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": parallel,
        "hyperparameters": _hyperparameters(list(option(args, "training_script_args", []))),
        "environment": {
            "ACCELERATE_USE_SAGEMAKER": "true",
            **_training_variables(args),
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind,
        },
        "metric_definitions": None if metrics is None else [{"Name": name, "Regex": regex} for name, regex in metrics],
    }
    merge_dicts(sagemaker_config.additional_args or {}, estimator)
    return estimator, None if inputs is None else dict(inputs)


def _set_credentials(profile: str | None, args: argparse.Namespace) -> None:
    """Set the profile or the keys of AWS in the environment."""
    keys = {name.upper(): option(args, name) for name in ("aws_access_key_id", "aws_secret_access_key")}
    if profile is not None:
        os.environ["AWS_PROFILE"] = profile
    elif all(keys.values()):
        os.environ.update(keys)
    else:
        raise OSError("SageMaker needs a profile of AWS, or both --aws_access_key_id and --aws_secret_access_key")


def _hyperparameters(arguments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for position, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        following = arguments[position + 1] if position + 1 < len(arguments) else None
        if following is None or following.startswith("--"):
            raise ValueError(f"{argument} has no value, but SageMaker needs one: write {argument} True")
        found[argument.lstrip("-").replace("-", "_")] = _number(following)
    return found


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _rows(path: str | None) -> list[tuple[str, str]] | None:
    """Return the first two columns of a tab-separated file, without its header line."""
    if path is None:
        return None
    with Path(path).open(newline="") as file:
        return [(row[0], row[1]) for row in list(csv.reader(file, delimiter="\t"))[1:] if row]


# ---- processes started by another library


class PrepareForLaunch:
    """Makes a function callable as ``function(index, *args)`` by process starters such as torch.multiprocessing.

    Args:
        launcher: The function to run.
        distributed_type: The `DistributedType` of the launch, or its name.
        debug: Whether the ranks connect with gloo, through the file named by ACCELERATE_DEBUG_RDV_FILE.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = str(getattr(distributed_type, "value", distributed_type))
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function as rank ``index`` of this machine."""
        if self.debug:
            import torch.distributed as dist

            size, file = int(os.environ["WORLD_SIZE"]), environ.text("DEBUG_RDV_FILE")
            dist.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=size)
        elif self.distributed_type.startswith("MULTI_"):
            processes = int(os.environ.get("NPROC", "1"))
            os.environ["LOCAL_RANK"] = str(index)
            os.environ["RANK"] = str(processes * int(os.environ.get("NODE_RANK", "0")) + index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)
