"""The order of the fields in the config panel: the first group is open, the others are folded under titles."""

from __future__ import annotations

from notebook_accelerate.config.launch_config import MIXED_PRECISIONS, OUTPUTS, RDZV_BACKENDS, START_METHODS

LAUNCH_CHOICES = {
    "start_method": START_METHODS,
    "mixed_precision": MIXED_PRECISIONS,
    "rdzv_backend": RDZV_BACKENDS,
    "on": ("ray",),
    "panel": ("auto", True, False),
    "output": OUTPUTS,
}
LAUNCH_GROUPS = (
    ("", ("num_processes", "mixed_precision", "start_method", "on", "cpu", "block", "detach")),
    ("Limits and restarts", ("timeout", "hang_timeout", "max_restarts", "monitor_interval")),
    (
        "Environment and output",
        (
            "env", "log_line_prefix_template", "panel", "output", "tags", "debug", "as_accelerate", "report_from",
            "automatic_metrics", "name", "save",
        ),
    ),
    (
        "Several machines, ports",
        (
            "num_nodes", "node_rank", "master_addr", "use_port", "rdzv_backend", "rdzv_endpoint", "rdzv_conf",
            "rdzv_id", "min_nodes",
        ),
    ),
)  # fmt: skip
TRAINING_GROUPS = (
    ("", ("batch_size", "gradient_accumulation_steps")),
    (
        "Data, projects, compilation",
        (
            "dataloader_config", "gradient_accumulation_plugin", "project_config", "dynamo_plugin", "log_with",
            "step_scheduler_with_optimizer",
        ),
    ),
    (
        "Arguments of torch and fp8 recipes",
        (
            "ddp_kwargs", "autocast_kwargs", "scaler_kwargs", "process_group_kwargs", "profile_kwargs",
            "torchao_recipe", "transformer_engine_recipe", "msamp_recipe",
        ),
    ),
    (
        "Sharded and parallel training",
        ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config", "torch_tp_plugin"),
    ),
)  # fmt: skip
