"""The Accelerate training API, launched, watched and debugged from a notebook cell.

The public names are loaded on first use (PEP 562), so that `import notebook_accelerate` costs milliseconds and
loads no torch: kernels, planners and panels import this package long before anything is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.accelerator import Accelerator
    from notebook_accelerate.big_modeling import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
    )
    from notebook_accelerate.config.cluster import RayCluster
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.config.parallelism_config import ParallelismConfig
    from notebook_accelerate.data_loader import skip_first_batches
    from notebook_accelerate.errors import (
        ChannelClosedError,
        DeviceBusyError,
        LaunchError,
        NotebookAccelerateError,
        PortInUseError,
        RunNotFinishedError,
        RunStoppedError,
        RunTimeoutError,
        SerializationError,
        WorkerDiedError,
        WorkerError,
    )
    from notebook_accelerate.inference import prepare_pippy
    from notebook_accelerate.launch import Run, runs, shutdown
    from notebook_accelerate.launchers import debug_launcher, notebook_launcher
    from notebook_accelerate.state import PartialState
    from notebook_accelerate.utils.dataclasses import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        DistributedType,
        FullyShardedDataParallelPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from notebook_accelerate.utils.imports import is_rich_available
    from notebook_accelerate.utils.memory import find_executable_batch_size
    from notebook_accelerate.utils.modeling import infer_auto_device_map, load_checkpoint_in_model
    from notebook_accelerate.utils.random import synchronize_rng_states
    from notebook_accelerate.widgets.config_panel import configure

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "ChannelClosedError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeviceBusyError",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "LaunchConfig",
    "LaunchError",
    "NotebookAccelerateError",
    "ParallelismConfig",
    "PartialState",
    "PortInUseError",
    "ProfileKwargs",
    "RayCluster",
    "Run",
    "RunNotFinishedError",
    "RunStoppedError",
    "RunTimeoutError",
    "SerializationError",
    "WorkerDiedError",
    "WorkerError",
    "configure",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_pippy",
    "runs",
    "shutdown",
    "skip_first_batches",
    "synchronize_rng_states",
]

# Where each public name lives, by module below this package.
_NAMES_OF_MODULE = {
    "accelerator": ("Accelerator",),
    "big_modeling": (
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
    ),
    "config.cluster": ("RayCluster",),
    "config.launch_config": ("LaunchConfig",),
    "config.parallelism_config": ("ParallelismConfig",),
    "data_loader": ("skip_first_batches",),
    "errors": (
        "ChannelClosedError",
        "DeviceBusyError",
        "LaunchError",
        "NotebookAccelerateError",
        "PortInUseError",
        "RunNotFinishedError",
        "RunStoppedError",
        "RunTimeoutError",
        "SerializationError",
        "WorkerDiedError",
        "WorkerError",
    ),
    "inference": ("prepare_pippy",),
    "launch": ("Run", "runs", "shutdown"),
    "launchers": ("debug_launcher", "notebook_launcher"),
    "state": ("PartialState",),
    "utils.dataclasses": (
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DeepSpeedPlugin",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "FullyShardedDataParallelPlugin",
        "GradScalerKwargs",
        "InitProcessGroupKwargs",
        "ProfileKwargs",
    ),
    "utils.imports": ("is_rich_available",),
    "utils.memory": ("find_executable_batch_size",),
    "utils.modeling": ("infer_auto_device_map", "load_checkpoint_in_model"),
    "utils.random": ("synchronize_rng_states",),
    "widgets.config_panel": ("configure",),
}

# Submodules that scripts reach as attributes after a plain `import notebook_accelerate`.
_SUBMODULES = (
    "accelerator",
    "big_modeling",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "local_sgd",
    "logging",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "tracking",
    "utils",
    "widgets",
)

__getattr__, __dir__, _ = attach(__name__, _NAMES_OF_MODULE, _SUBMODULES)


def load_ipython_extension(shell: Any) -> None:
    """Register ``%%ranks`` and its kin: ``%load_ext notebook_accelerate``."""
    from notebook_accelerate.magics import load

    load(shell)
