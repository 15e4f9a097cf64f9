"""Command lines and environments of launches from a shell, as ``accelerate launch`` takes its options.

A notebook does not need them; tools that build on Accelerate's launch options do. Options are read from a parsed
``argparse.Namespace``; one that is missing counts as not given.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.environ import as_text
from notebook_accelerate.errors import LaunchError

_PASSED_ON = ("fsdp_", "megatron_lm_", "parallelism_config_", "cp_", "tp_", "fp8_")
"""Options with these prefixes reach the workers as variables of the same name in capitals."""
_DEEPSPEED = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_DYNAMO = {
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "dynamo_mode": "ACCELERATE_DYNAMO_MODE",
    "dynamo_use_fullgraph": "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "dynamo_use_dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "dynamo_use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
}
_MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def _option(args: argparse.Namespace, name: str, default: Any = None) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


def _put(env: dict[str, str], args: argparse.Namespace, table: dict[str, str]) -> None:
    for name, variable in table.items():
        value = _option(args, name)
        if value is not None:
            env[variable] = as_text(value)


def _common_environment(args: argparse.Namespace) -> dict[str, str]:
    precision = str(_option(args, "mixed_precision", "no")).lower()
    if precision not in _MIXED_PRECISIONS:
        raise ValueError(f"mixed_precision={precision!r} is not allowed; pass one of {', '.join(_MIXED_PRECISIONS)}")
    env = {**os.environ, "ACCELERATE_MIXED_PRECISION": precision}
    if _option(args, "debug", False):
        env["ACCELERATE_DEBUG_MODE"] = "true"
    if _option(args, "enable_cpu_affinity", False):
        env["ACCELERATE_CPU_AFFINITY"] = "1"
    gpu_ids = _option(args, "gpu_ids", "all")
    if gpu_ids != "all":
        env[_visible_devices()] = str(gpu_ids)
    threads = _option(args, "num_cpu_threads_per_process")
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    _put(env, args, _DYNAMO)
    for name, value in vars(args).items():
        if name.startswith(_PASSED_ON) and value is not None:
            env[name.upper()] = as_text(value)
    return env


def _visible_devices() -> str:
    from notebook_accelerate import hardware

    by_type = {"xpu": "ZE_AFFINITY_MASK", "npu": "ASCEND_RT_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}
    return by_type.get(hardware.detect().accelerator, "CUDA_VISIBLE_DEVICES")


def _script(args: argparse.Namespace) -> list[str]:
    module, no_python = _option(args, "module", False), _option(args, "no_python", False)
    if module and no_python:
        raise ValueError("module and no_python exclude each other; pass one of them")
    command = [] if no_python else [sys.executable]
    return [*command, *(["-m"] if module else []), args.training_script, *_option(args, "training_script_args", [])]


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run a script in one process per machine.

    Args:
        args: Options of ``accelerate launch``.

    Raises:
        ValueError: Options exclude each other, or the mixed precision is not known.
    """
    env = _common_environment(args)
    env["ACCELERATE_USE_CPU"] = str(bool(_option(args, "cpu", False) or _option(args, "use_cpu", False)))
    if _option(args, "num_machines", 1) > 1:
        env["MASTER_ADDR"] = str(args.main_process_ip)
        env["MASTER_PORT"] = str(args.main_process_port)
    elif _option(args, "num_processes", 1) > 1:
        env["MASTER_ADDR"] = str(_option(args, "main_process_ip", "127.0.0.1"))
        env["MASTER_PORT"] = str(_option(args, "main_process_port", 29500))
    return _script(args), env


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment for torchrun, and write torchrun's own options into ``args``.

    Args:
        args: Options of ``accelerate launch``; nproc_per_node, nnodes, node_rank, master_addr and master_port, or
            rdzv_endpoint, are set.

    Raises:
        ValueError: The processes do not divide over the machines.
    """
    machines, processes = int(_option(args, "num_machines", 1)), int(_option(args, "num_processes", 1))
    if processes % machines:
        raise ValueError(f"num_processes={processes} does not divide over num_machines={machines}; pass a multiple")
    address, port = _option(args, "main_process_ip"), _option(args, "main_process_port")
    backend = _option(args, "rdzv_backend", "static")
    args.nnodes, args.nproc_per_node = str(machines), str(processes // machines)
    args.node_rank = int(_option(args, "machine_rank", 0))
    if machines > 1 and backend != "static":
        args.rdzv_endpoint = f"{address}:{port}"
    elif machines > 1:
        args.master_addr, args.master_port = str(address), str(port)
    else:
        args.master_port = str(_option(args, "main_process_port", 29500))
    env = _common_environment(args)
    for flag, variable in (
        ("use_fsdp", "ACCELERATE_USE_FSDP"),
        ("use_megatron_lm", "ACCELERATE_USE_MEGATRON_LM"),
        ("use_parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    ):
        if _option(args, flag, False):
            env[variable] = "true"
    return env


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command and the environment for DeepSpeed's launcher; no command when torchrun starts the ranks.

    Args:
        args: Options of ``accelerate launch`` and of its DeepSpeed section.
    """
    env = prepare_multi_gpu_env(args)
    env["ACCELERATE_USE_DEEPSPEED"] = "true"
    env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(_option(args, "zero_stage", 2))
    _put(env, args, _DEEPSPEED)
    launcher = _option(args, "deepspeed_multinode_launcher", "standard")
    if int(_option(args, "num_machines", 1)) < 2 or launcher == "standard":
        return None, env
    command = ["deepspeed", "--hostfile", str(_option(args, "deepspeed_hostfile")), "--no_local_rank"]
    command += ["--launcher", launcher]
    filters = {"--exclude": "deepspeed_exclusion_filter", "--include": "deepspeed_inclusion_filter"}
    chosen = [(flag, str(value)) for flag, name in filters.items() if (value := _option(args, name)) is not None]
    # DeepSpeed refuses a number of devices beside a choice of devices.
    command += chosen[0] if chosen else ("--num_gpus", args.nproc_per_node)
    if address := _option(args, "main_process_ip"):
        command += ["--master_addr", address]
    command += ["--master_port", str(_option(args, "main_process_port", 29500))]
    return [*command, args.training_script, *_option(args, "training_script_args", [])], env


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the options and the environment for a launch on TPUs.

    Args:
        args: Options of ``accelerate launch``.
        current_env: The environment to add to.
        pod: Whether the launch is for a pod of several hosts; ``args.vm`` and ``args.tpu`` are set then.
    """
    if str(_option(args, "mixed_precision", "no")) == "bf16":
        downcast = bool(_option(args, "downcast_bf16", False))
        current_env["XLA_DOWNCAST_BF16" if downcast else "XLA_USE_BF16"] = "1"
    if _option(args, "debug", False):
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm, args.tpu = _option(args, "tpu_vm"), _option(args, "tpu_name")
    return args, current_env


# ---- SageMaker


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: argparse.Namespace
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options and the arguments of a SageMaker estimator for a training script.

    Args:
        sagemaker_config: A ``SageMakerConfig``.
        args: Options of ``accelerate launch``.

    Raises:
        ValueError: The script is not a Python file, or a script argument is a bare flag.
    """
    script = Path(args.training_script)
    if script.suffix != ".py":
        raise ValueError(f"training_script={args.training_script!r} is not a Python file; SageMaker needs one")
    profile = getattr(sagemaker_config, "profile", None)
    os.environ["AWS_DEFAULT_REGION"] = str(sagemaker_config.region)
    if profile is not None:
        os.environ["AWS_PROFILE"] = profile
    environment = {name: value for name, value in _common_environment(args).items() if name.startswith("ACCELERATE_")}
    kind = str(getattr(sagemaker_config.distributed_type, "value", sagemaker_config.distributed_type))
    if kind == "DATA_PARALLEL":
        environment["ACCELERATE_USE_SAGEMAKER"] = "true"
    inputs = {
        "image_uri": sagemaker_config.image_uri,
        "entry_point": script.name,
        "source_dir": str(script.parent) if str(script.parent) != "." else ".",
        "role": sagemaker_config.iam_role_name,
        "transformers_version": sagemaker_config.transformers_version,
        "pytorch_version": sagemaker_config.pytorch_version,
        "py_version": sagemaker_config.py_version,
        "base_job_name": sagemaker_config.base_job_name,
        "instance_count": sagemaker_config.num_machines,
        "instance_type": sagemaker_config.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": _distribution(kind),
        "hyperparameters": _hyperparameters(list(_option(args, "training_script_args", []))),
        "environment": environment,
        "metric_definitions": _rows(sagemaker_config.sagemaker_metrics_file, _metric),
    }
    if sagemaker_config.additional_args is not None:
        inputs.update(sagemaker_config.additional_args)
    channels = _rows(sagemaker_config.sagemaker_inputs_file, _channel)
    if channels:
        args.inputs = {name: place for name, place in channels}  # noqa: C416 - typed
    return args, inputs


def _distribution(kind: str) -> dict[str, Any] | None:
    return {"smdistributed": {"dataparallel": {"enabled": True}}} if kind == "DATA_PARALLEL" else None


def _hyperparameters(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for position, word in enumerate(words):
        if not word.startswith("-"):
            continue
        following = words[position + 1] if position + 1 < len(words) else None
        if following is None or following.startswith("--"):
            raise ValueError(f"{word} has no value; SageMaker passes values only: write {word} True")
        found[word.lstrip("-").replace("-", "_")] = _number(following)
    return found


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _rows(path: str | None, make: Callable[[dict[str, str]], Any]) -> list[Any] | None:
    """Read a tab-separated file with a header line."""
    if path is None:
        return None
    with Path(path).open(newline="") as file:
        return [make(row) for row in csv.DictReader(file, delimiter="\t")]


def _metric(row: dict[str, str]) -> dict[str, str]:
    return {"Name": row["metric_name"], "Regex": row["metric_regex"]}


def _channel(row: dict[str, str]) -> tuple[str, str]:
    return row["channel_name"], row["data_location"]


# ---- in a process that something else has started


class PrepareForLaunch:
    """Makes a function callable as ``function(index, *args)`` by process starters such as torch.multiprocessing.

    Args:
        launcher: The function to run.
        distributed_type: The kind of distributed setting, or its name.
        debug: Whether the ranks meet through the file named by ACCELERATE_DEBUG_RDV_FILE, on gloo.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = str(getattr(distributed_type, "value", distributed_type))
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Take on rank ``index`` of this machine and run the function."""
        if self.debug:
            self._meet(index)
        elif self.distributed_type.startswith("MULTI_"):
            processes = int(os.environ.get("NPROC", "1"))
            os.environ["LOCAL_RANK"] = str(index)
            os.environ["RANK"] = str(processes * int(os.environ.get("NODE_RANK", "0")) + index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)

    @staticmethod
    def _meet(index: int) -> None:
        import torch.distributed as dist

        size, meeting_place = int(os.environ["WORLD_SIZE"]), environ.text("DEBUG_RDV_FILE")
        dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=index, world_size=size)


def install_xla(upgrade: bool = False, dry_run: bool = False) -> list[str]:
    """Install torch_xla and the torch it is built against, for this Python.

    Says what it will change, and what to do afterwards: torch itself is replaced, so this kernel, which may have the
    old one in memory, cannot go on with the new one.

    Args:
        upgrade: Whether an installed torch_xla is replaced by a newer one.
        dry_run: Only say it.

    Returns:
        The command, for pip.

    Raises:
        LaunchError: There is no torch_xla for this Python or this system, or pip failed.
    """
    python = sys.version_info[:2]
    found = [release for release in _XLA_RELEASES if release[1] <= python <= release[2]]
    if not found or sys.platform != "linux":
        raise LaunchError(
            f"there is no torch_xla for Python {python[0]}.{python[1]} on {sys.platform}: it is built for Linux and "
            f"Python {_dotted(_XLA_RELEASES[-1][1])} to {_dotted(_XLA_RELEASES[0][2])}; use such a notebook"
        )
    version = found[0][0]
    wanted = [f"torch=={version}.*", f"torch_xla[tpu]=={version}.*"]
    command = [sys.executable, "-m", "pip", "install", *(["--upgrade"] if upgrade else []), *wanted]
    kept = _installed("torch_xla").startswith(f"{version}.") and not upgrade
    _say(
        f"Here: Python {_dotted(python)}, torch {_installed('torch')}, torch_xla {_installed('torch_xla')}.",
        "torch_xla is there already: nothing to do." if kept else f"{shlex.join(command)}",
    )
    if kept or dry_run:
        return command
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"pip could not install torch_xla:\n{(done.stdout + done.stderr)[-2000:]}")
    _say(f"torch is now {_installed('torch')}; start the kernel again, because this one has the old torch in memory.")
    return command


# Versions of torch_xla that are also versions of torch, newest first, with the oldest and the newest Python they have
# files for: https://pypi.org/project/torch-xla/#files
_XLA_RELEASES: tuple[tuple[str, tuple[int, int], tuple[int, int]], ...] = (
    ("2.9", (3, 10), (3, 13)),
    ("2.8", (3, 10), (3, 13)),
)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _say(*lines: str) -> None:
    print(*lines, sep="\n")  # noqa: T201 - the answer to a command typed in a cell
