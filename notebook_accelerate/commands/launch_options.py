"""The options of ``launch``, as a table: Accelerate's, and one of this package."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.config.constants import TORCH_DYNAMO_MODES
from notebook_accelerate.config.enums import DynamoBackend
from notebook_accelerate.config.environ import parse_flag, str_to_bool


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

__all__ = ["DYNAMO", "FP8", "GENERAL", "GROUPS", "SECTIONS", "Option"]
