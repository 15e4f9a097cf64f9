"""Turns the options of ``launch`` and a configuration file into one configuration."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notebook_accelerate.config import config_file
from notebook_accelerate.config.config_file import ClusterConfig
from notebook_accelerate.config.constants import TORCH_DYNAMO_MODES
from notebook_accelerate.config.enums import DynamoBackend
from notebook_accelerate.config.environ import parse_flag, str_to_bool
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
    if _file_in_use(args):
        found = config_file.load_cluster_config(option(args, "config_file"))
    else:
        found = ClusterConfig.from_dict({})
    for name, field in _FIELDS.items():
        if (value := option(args, name)) is not None:
            setattr(found, field, value)
    for section, fields in SECTIONS.items():
        contents = getattr(found, section) if section in _sections_in_use(args, found) else None
        setattr(found, section, {} if contents is None else _section(args, fields, contents))
    found.dynamo_config = dynamo_section(args, found.dynamo_config or {})
    found.fp8_config = _fp8(args, found.fp8_config or {}) if found.mixed_precision == "fp8" else {}
    return found


def _file_in_use(args: argparse.Namespace) -> bool:
    """Return whether the settings come from a file: the given one, or the default one unless --cpu is given."""
    default = Path(config_file.default_config_file)
    return option(args, "config_file") is not None or (not option(args, "cpu", False) and default.is_file())


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
    """Return the settings of ``torch.compile``: given options override ``contents``, which overrides the defaults."""
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
    log_streams(args)
    found = cluster_config(args)
    _check_machines(args, found)
    _check_devices(args, found)
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
    if (processes := option(args, "num_processes", 0)) < 0:
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
    """Check what the options and the file say of GPUs and TPUs."""
    kind = str(getattr(found.distributed_type, "value", found.distributed_type))
    if any(option(args, name, False) for name in _EXCLUSIVE[0]) or option(args, "use_megatron_lm", False):
        kind = "XLA" if option(args, "tpu", False) else "MULTI_GPU" if option(args, "multi_gpu", False) else "NO"
    gpus = str(found.gpu_ids or "all")
    several = kind.startswith("MULTI_") and kind != "MULTI_CPU" and found.num_machines < 2
    if several and gpus != "all" and "," not in gpus:
        raise ValueError(f"several GPUs are needed, and gpu_ids={gpus} selects one; pass --gpu_ids all")
    if kind == "XLA" and option(args, "no_python", False):
        raise ValueError("--no_python is not possible on a TPU; pass a Python script or, with --module, a module")


def log_streams(args: argparse.Namespace) -> dict[int, int] | int:
    """Return the streams that ``--tee`` selects, as in torchrun: 0 to 3 (default: 3), or one of these by local rank.

    Raises:
        ValueError: The text has another form.
    """
    text = option(args, "tee", "3")
    if not re.fullmatch(r"[0-3]|(\d+:[0-3],)*\d+:[0-3]", text):
        raise ValueError(f"--tee {text} is not allowed; pass 1 (stdout), 2 (stderr), 3 (both), or as in 0:1,1:3")
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
    """One option.

    Attributes:
        name: Its name on the command line, with underscores; hyphens are accepted, too.
        help: One sentence.
        type: Converts its text; None: a switch.
        choices: Allowed values.
        default: The value where neither the command line nor the configuration file gives one.
        short: A second name, as "-m".
        supported: Whether this package acts on it; the others are refused.
    """

    name: str
    help: str = ""
    type: Callable[[str], Any] | None = str
    choices: tuple[Any, ...] | None = None
    default: Any = None
    short: str = ""
    supported: bool = True

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add the option to a parser; its value is None where it is not given."""
        flags = list(dict.fromkeys([f"--{self.name}", f"--{self.name.replace('_', '-')}"]))
        flags = [self.short, *flags] if self.short else flags
        text = self.help if self.supported else "Not supported: refused with a message."
        text += f" (default: {self.default})" if self.default not in (None, "") else ""
        if self.type is None:
            parser.add_argument(*flags, dest=self.name, action="store_true", default=None, help=text)
        else:
            metavar = None if self.choices and len(self.choices) < 5 else _METAVARS.get(self.type, "VALUE")
            parser.add_argument(
                *flags, dest=self.name, type=self.type, choices=self.choices, metavar=metavar, help=text
            )


def flags_text(text: str) -> tuple[int, ...]:
    """Convert "true,false,true" to integers, because Accelerate passes on 1 and 0."""
    return tuple(map(str_to_bool, text.split(",")))


def flag_text(text: str) -> str:
    """Check a truth value and return its text, because Accelerate passes it on unchanged."""
    parse_flag(text)
    return text


_FLAGS = (parse_flag, flag_text, str_to_bool)
_METAVARS: dict[Any, str] = {
    int: "N", float: "X", str: "TEXT", flags_text: "BOOL,BOOL,BOOL", **dict.fromkeys(_FLAGS, "BOOL"),
}  # fmt: skip

GENERAL = (
    Option("config_file", "YAML or JSON file with the settings; without it, the default file where there is one."),
    Option("module", "The script is the name of a module, as after python -m.", None, short="-m"),
    Option("no_python", "The script is a program, not a Python file.", None),
    Option("quiet", "Print the error of the first failed rank only.", None, short="-q"),
    Option("debug", "Ranks compare the tensors that they pass to collectives.", None),
)
HARDWARE = (
    Option("cpu", "Train on the CPU, without the default configuration file.", None),
    Option("multi_gpu", "Train on several GPUs, as is done where there are several.", None),
    Option("tpu", "Train on a TPU, as is done where there is one.", None),
    Option("gpu_ids", "Numbers of the GPUs to use, separated by commas, or all."),
)
RESOURCES = (
    Option("mixed_precision", "Precision of the computation.", choices=("no", "fp16", "bf16", "fp8")),
    Option("num_processes", "Number of processes on all machines; without it, one per device.", int),
    Option("num_machines", "Number of machines.", int),
    Option(
        "num_cpu_threads_per_process",
        "CPU threads of each process; without it OMP_NUM_THREADS, with --cpu a share of the cores, else 1.", int,
    ),
    Option("enable_cpu_affinity", "Bind each process to the CPU cores near its GPU.", None),
    Option("max_restarts", "How often all processes are restarted after a failure.", int, default=0),
    Option("monitor_interval", "Seconds between two checks of the processes where the system reports no end.", float),
)  # fmt: skip
MACHINES = (
    Option("machine_rank", "Index of this machine, from 0.", int),
    Option("main_process_ip", "Address of the machine with index 0."),
    Option("main_process_port", "Port of the process group on that machine.", int),
    Option("rdzv_backend", "How machines find each other: static, by their index, or c10d, in the order they join."),
    Option("rdzv_conf", "Settings of the rendezvous: name=value,name=value."),
    Option("same_network", "Machines share a network. No effect: they connect to main_process_ip.", None),
)
STRATEGIES = (
    Option("use_deepspeed", "Train with DeepSpeed.", None),
    Option("use_fsdp", "Train with FSDP.", None),
    Option("use_megatron_lm", "Train with Megatron-LM.", None),
    Option("use_parallelism_config", "Train with several kinds of parallelism.", None),
)
DYNAMO = (
    Option(
        "dynamo_backend", "Back end of torch.compile.",
        choices=tuple(each.value.lower() for each in DynamoBackend), default="no",
    ),
    Option("dynamo_mode", "Mode of torch.compile.", choices=tuple(TORCH_DYNAMO_MODES), default="default"),
    Option("dynamo_use_fullgraph", "Fail if a model does not compile to one graph.", None, default=False),
    Option("dynamo_use_dynamic", "Compile for dynamic shapes.", None, default=False),
    Option("dynamo_use_regional_compilation", "Compile repeated blocks once.", None, default=False),
)  # fmt: skip
DEEPSPEED = (
    Option("deepspeed_config_file", "JSON file of DeepSpeed; without it, the options below."),
    Option("zero_stage", "Stage of ZeRO, 0 to 3.", int),
    Option("offload_optimizer_device", "Where the optimizer's state is kept: none, cpu or nvme."),
    Option("offload_param_device", "Where parameters are kept: none, cpu or nvme."),
    Option("offload_optimizer_nvme_path", "Folder for the optimizer's state."),
    Option("offload_param_nvme_path", "Folder for parameters."),
    Option("gradient_accumulation_steps", "Batches per optimizer step.", int),
    Option("gradient_clipping", "Largest norm of gradients.", float),
    Option("zero3_init_flag", "Shard models while they are built (true or false).", parse_flag),
    Option("zero3_save_16bit_model", "Save whole models in 16 bits under stage 3 (true or false).", parse_flag),
    Option("deepspeed_moe_layer_cls_names", "Classes of mixture-of-experts layers, separated by commas."),
    Option("deepspeed_multinode_launcher", "DeepSpeed's launcher; standard only.", default="standard"),
    Option("deepspeed_hostfile", supported=False),
    Option("deepspeed_exclusion_filter", supported=False),
    Option("deepspeed_inclusion_filter", supported=False),
)
FSDP = (
    Option("fsdp_version", "1 or 2.", int, (1, 2), 1),
    Option("fsdp_offload_params", "Keep parameters and gradients on the CPU.", parse_flag, default=False),
    Option("fsdp_min_num_params", "Parameters of a unit under SIZE_BASED_WRAP.", int, default=100_000_000),
    Option("fsdp_sharding_strategy", "What FSDP 1 shards.", default="FULL_SHARD"),
    Option("fsdp_reshard_after_forward", "Shard parameters again after forward (FSDP 2).", default="true"),
    Option("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP."),
    Option("fsdp_transformer_layer_cls_to_wrap", "Classes of layers that are units, separated by commas."),
    Option("fsdp_backward_prefetch", "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH (FSDP 1)."),
    Option("fsdp_state_dict_type", "FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT."),
    Option("fsdp_forward_prefetch", "Gather the next unit during forward (FSDP 1).", parse_flag, default=False),
    Option("fsdp_use_orig_params", "Keep the model's own parameters (FSDP 1).", parse_flag, default=True),
    Option("fsdp_cpu_ram_efficient_loading", "Load weights on the first rank only.", parse_flag, default=True),
    Option("fsdp_sync_module_states", "Send the first rank's weights to all (FSDP 1).", parse_flag, default=True),
    Option("fsdp_activation_checkpointing", "Recompute activations in backward.", parse_flag, default=False),
    Option("fsdp_activation_checkpointing_offload", "Keep inputs on the CPU meanwhile.", parse_flag, default=False),
)
MEGATRON = (
    Option("megatron_lm_tp_degree", "Ranks that split each layer.", int, default=1),
    Option("megatron_lm_pp_degree", "Ranks that split the layers into stages.", int, default=1),
    Option("megatron_lm_num_micro_batches", "Micro-batches of a step.", int),
    Option("megatron_lm_gradient_clipping", "Largest norm of gradients.", float, default=1.0),
    *(
        Option(name, type=parse_flag, default=False)
        for name in (
            "megatron_lm_use_custom_fsdp", "megatron_lm_no_load_optim", "megatron_lm_eod_mask_loss",
            "megatron_lm_overlap_cpu_optimizer_d2h_h2d", "megatron_lm_no_save_optim",
            "megatron_lm_optimizer_cpu_offload", "megatron_lm_use_precision_aware_optimizer",
        )
    ),
    *(
        Option(name, type=flag_text)
        for name in (
            "megatron_lm_sequence_parallelism", "megatron_lm_recompute_activations",
            "megatron_lm_use_distributed_optimizer", "megatron_lm_attention_softmax_in_fp32",
            "megatron_lm_calculate_per_token_loss", "megatron_lm_use_rotary_position_embeddings",
        )
    ),
    Option("megatron_lm_decoder_last_pipeline_num_layers", type=int),
    Option("megatron_lm_recompute_granularity"),
    Option("megatron_lm_recompute_method"),
    Option("megatron_lm_recompute_num_layers", type=int),
    Option("megatron_lm_attention_backend"),
    Option("megatron_lm_expert_model_parallel_size", type=int),
    Option("megatron_lm_context_parallel_size", type=int),
    Option("megatron_lm_attention_dropout", type=float),
    Option("megatron_lm_hidden_dropout", type=float),
    Option("megatron_lm_expert_tensor_parallel_size", type=int),
)  # fmt: skip
FP8 = (
    Option("fp8_backend", "Library that computes in fp8.", choices=("ao", "te", "msamp")),
    Option("fp8_use_autocast_during_eval", "Compute in fp8 in evaluation, too (te).", None, default=False),
    Option("fp8_margin", "Margin of the scaling (te).", int, default=0),
    Option("fp8_interval", "Steps between two computations of the scaling (te).", int, default=1),
    Option("fp8_format", "Format (te).", choices=("HYBRID", "E4M3", "E5M2"), default="HYBRID"),
    Option("fp8_amax_history_len", "Steps that the scaling looks back (te).", int, default=1024),
    Option("fp8_amax_compute_algo", "How it does (te).", choices=("max", "most_recent"), default="most_recent"),
    Option(
        "fp8_override_linear_precision", "true,false,false: products in higher precision (te).", flags_text,
        default=(False, False, False),
    ),
    Option("fp8_opt_level", "Level of MS-AMP.", choices=("O1", "O2"), default="O2"),
    Option("fp8_enable_fsdp_float8_all_gather", "FSDP 2 gathers in fp8 (ao).", str_to_bool, default=1),
    Option("fp8_pad_inner_dim", "Pad dimensions to multiples of 16 (ao).", str_to_bool, default=1),
)  # fmt: skip
PARALLELISM = (
    Option("parallelism_config_dp_replicate_size", "Replicas.", int, default=1),
    Option("parallelism_config_dp_shard_size", "Ranks that shard a replica.", int, default=1),
    Option("parallelism_config_tp_size", "Ranks that split layers.", int, default=1),
    Option("parallelism_config_ep_size", "Ranks that split experts; without it, 1.", int),
    Option("parallelism_config_cp_size", "Ranks that split sequences, with ring attention.", int, default=1),
    Option("parallelism_config_cp_backend", "torch.", choices=("torch",), default="torch"),
    Option("parallelism_config_cp_comm_strategy", "allgather or alltoall.", default="allgather"),
    Option("parallelism_config_sp_size", "Ranks that split sequences, with DeepSpeed's Ulysses.", int, default=1),
    Option("parallelism_config_sp_backend", "deepspeed.", choices=("deepspeed",), default="deepspeed"),
    Option("parallelism_config_sp_seq_length", "Length of sequences.", int),
    Option("parallelism_config_sp_seq_length_is_variable", "Lengths differ.", parse_flag, default=True),
    Option("parallelism_config_sp_attn_implementation", "Attention of transformers.", default="sdpa"),
)
OTHER = (
    Option("downcast_bf16", "On a TPU, bfloat16 for float and double.", None),
    Option("main_training_function", "No effect: the whole script runs."),
    *(
        Option(name, supported=False)
        for name in (
            "vm", "env", "aws_access_key_id", "aws_secret_access_key", "mpirun_hostfile",
        )
    ),
    Option("log_dir", "Folder of files with the output of each process, which is still printed."),
    Option("tee", "Streams in the files: 1 (stdout), 2 (stderr), 3 (both), or by process, as 0:1,1:3.", short="-t"),
    Option("role", "Name of the processes' role, which they find in ROLE_NAME.", default="default"),
    Option("tpu_use_sudo", type=None, supported=False),
    Option("tpu_cluster", type=None, supported=False),
    Option("no_tpu_cluster", "One machine with a TPU, as is usual.", None),
)  # fmt: skip

GROUPS = {
    "hardware": HARDWARE,
    "processes": RESOURCES,
    "several machines": MACHINES,
    "strategy": STRATEGIES,
    "torch.compile": DYNAMO,
    "DeepSpeed (with --use_deepspeed)": DEEPSPEED,
    "FSDP (with --use_fsdp)": FSDP,
    "parallelism (with --use_parallelism_config)": PARALLELISM,
    "Megatron-LM (with --use_megatron_lm)": MEGATRON,
    "fp8 (with --mixed_precision fp8)": FP8,
    "other options of Accelerate": OTHER,
}
SECTIONS = {
    "deepspeed_config": DEEPSPEED,
    "fsdp_config": FSDP,
    "megatron_lm_config": MEGATRON,
    "parallelism_config": PARALLELISM,
}
"""Options by section of the configuration file."""
