"""The Accelerate training API, launched, watched and debugged from a notebook cell.

Public names are imported on first use (PEP 562), so that `import notebook_accelerate` takes milliseconds and does not
import torch. Kernels, planners and panels import this package long before anything is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    # The submodules that scripts use as attributes after `import notebook_accelerate`.
    from notebook_accelerate import (
        accelerator as accelerator,
        big_modeling as big_modeling,
        data_loader as data_loader,
        hooks as hooks,
        inference as inference,
        launchers as launchers,
        local_sgd as local_sgd,
        logging as logging,
        optimizer as optimizer,
        parallelism_config as parallelism_config,
        scheduler as scheduler,
        state as state,
        tracking as tracking,
        utils as utils,
        widgets as widgets,
    )
    from notebook_accelerate.accelerator import Accelerator as Accelerator
    from notebook_accelerate.big_modeling.checkpoint_loading import load_checkpoint_in_model as load_checkpoint_in_model
    from notebook_accelerate.big_modeling.device_map import infer_auto_device_map as infer_auto_device_map
    from notebook_accelerate.big_modeling import (
        cpu_offload as cpu_offload,
        cpu_offload_with_hook as cpu_offload_with_hook,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from notebook_accelerate.checkpointing.state_loading import resumed_checkpoint as resumed_checkpoint
    from notebook_accelerate.config.cluster import RayCluster as RayCluster
    from notebook_accelerate.config.launch_config import LaunchConfig as LaunchConfig
    from notebook_accelerate.config.parallelism_config import ParallelismConfig as ParallelismConfig
    from notebook_accelerate.data_loader import skip_first_batches as skip_first_batches
    from notebook_accelerate.data_loader.shard_loader import synchronize_rng_states as synchronize_rng_states
    from notebook_accelerate.errors import (
        BrokenRunError as BrokenRunError,
        ChannelClosedError as ChannelClosedError,
        DeviceBusyError as DeviceBusyError,
        LaunchError as LaunchError,
        NotebookAccelerateError as NotebookAccelerateError,
        PortInUseError as PortInUseError,
        ResultsFreedError as ResultsFreedError,
        RunLostError as RunLostError,
        RunNotFinishedError as RunNotFinishedError,
        RunStoppedError as RunStoppedError,
        RunTimeoutError as RunTimeoutError,
        SerializationError as SerializationError,
        WorkerDiedError as WorkerDiedError,
        WorkerError as WorkerError,
    )
    from notebook_accelerate.batch_size_search import find_executable_batch_size as find_executable_batch_size
    from notebook_accelerate.inference import prepare_pippy as prepare_pippy
    from notebook_accelerate.integrations.accelerate_alias import as_accelerate as as_accelerate
    from notebook_accelerate.launch import (
        Profile as Profile,
        Run as Run,
        RunMemory as RunMemory,
        attach as attach,
        debug as debug,
        open_run as open_run,
        runs as runs,
        shutdown as shutdown,
    )
    from notebook_accelerate.launch.sweeps import Sweep as Sweep, sweep as sweep
    from notebook_accelerate.launchers import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
    from notebook_accelerate.state import PartialState as PartialState
    from notebook_accelerate.utils.dataclasses import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DDPCommunicationHookType as DDPCommunicationHookType,
        DeepSpeedPlugin as DeepSpeedPlugin,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        ProfileKwargs as ProfileKwargs,
    )
    from notebook_accelerate.utils.imports import is_rich_available as is_rich_available
    from notebook_accelerate.widgets.config_panel import configure as configure

__version__ = "0.1.0"


def load_ipython_extension(shell: Any) -> None:
    """Register ``%%ranks`` and the other magics, when a user runs ``%load_ext notebook_accelerate``."""
    from notebook_accelerate.magics import load

    load(shell)


# `from notebook_accelerate import *` in a notebook must not hide the user's own variables with these common names.
reexport(__name__, without={"attach", "configure", "debug", "runs", "shutdown", "sweep"})
