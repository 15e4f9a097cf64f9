"""Re-exports: launch command lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.commands.launch_environments import (
        PrepareForLaunch as PrepareForLaunch,
        prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env as prepare_multi_gpu_env,
        prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
        prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env,
        prepare_tpu as prepare_tpu,
    )

reexport(__name__)
