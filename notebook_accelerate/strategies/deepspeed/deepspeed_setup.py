"""Imports DeepSpeed, and starts its communication on this rank's device and process group, without user settings."""

from __future__ import annotations

import os
import sys
import weakref
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.config import environ
from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
from notebook_accelerate.hardware import device_table
from notebook_accelerate.hardware.feature_checks import is_deepspeed_available
from notebook_accelerate.state import AcceleratorState, process_group
from notebook_accelerate.strategies.deepspeed.op_compilation import compilation_context

_SAME_NAMES = frozenset({"cpu", "cuda", "hpu", "mlu", "mps", "npu", "sdaa", "xpu"})
"""Device types that have the same names in DeepSpeed."""
_communication_group: Any = None
"""The default process group on which DeepSpeed's communication was started."""
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def track_engine(engine: Any) -> None:
    """Destroy an engine together with the process group that it uses.

    Args:
        engine: The engine.
    """
    _engines.add(engine)


def destroy_engine(engine: Any) -> None:
    """Free an engine's memory, once; this must happen while the process group exists.

    Args:
        engine: A tracked engine.
    """
    if engine in _engines:
        _engines.discard(engine)
        engine.destroy()


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device type.

    Args:
        device: This rank's device.

    Returns:
        The package.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: DeepSpeed was imported for another device type.
    """
    if not is_deepspeed_available():
        raise ImportError(
            "training with a DeepSpeedPlugin needs DeepSpeed, which is not installed: pip install 'deepspeed>=0.16'"
        )
    chosen = "DS_ACCELERATOR" in os.environ or device.type not in _SAME_NAMES
    with environ.patch_environment(**({} if chosen else {"DS_ACCELERATOR": device.type})):
        deepspeed: Any = import_module("deepspeed")
        name = deepspeed.accelerator.get_accelerator().device_name()
    if name != device.type and device.type in _SAME_NAMES:
        raise ValueError(
            f"DeepSpeed uses {name}, and this rank trains on {device}: it was imported before the Accelerator was "
            f"created, or DS_ACCELERATOR={name} is set; set DS_ACCELERATOR={device.type} for this process"
        )
    return deepspeed


def check_support(plugin: DeepSpeedPlugin) -> None:
    """Check that DeepSpeed supports the plugin's settings on this machine; its own errors name no solution.

    Args:
        plugin: The plugin, with its precision set.

    Raises:
        ValueError: fp16 is not supported on this device, or offloading to files is set without libaio.
    """
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    if plugin.get_value("fp16.enabled") is True and not accelerator.is_fp16_supported():
        raise ValueError(
            f"DeepSpeed does not support fp16 on {accelerator.device_name()}; pass mixed_precision='bf16', or leave "
            "fp16 out of its configuration"
        )
    parts = ("offload_optimizer", "offload_param")
    asked = [part for part in parts if plugin.get_value(f"zero_optimization.{part}.device") == "nvme"]
    if asked and not import_module("deepspeed.ops.op_builder").AsyncIOBuilder().is_compatible(verbose=False):
        raise ValueError(
            f"{asked[0]}_device='nvme' needs DeepSpeed's async_io, which is compiled with libaio, and that is not "
            f"installed: apt-get install libaio-dev; or pass {asked[0]}_device='cpu'"
        )


def start_communication(state: AcceleratorState) -> Any:
    """Import DeepSpeed and start its communication on the process group; every rank must call this.

    Args:
        state: The world. In a world of one a process group of one is created: DeepSpeed requires one.

    Returns:
        The package.
    """
    global _communication_group  # noqa: PLW0603 - DeepSpeed's communication is one per process
    deepspeed = import_deepspeed(state.device)
    if not process_group.group_exists():
        process_group.start_group_of_one(device_table.row(state.device.type).backend, state.device)
    # DeepSpeed reads it during training too; in a world of one it may not be set.
    os.environ.setdefault("LOCAL_RANK", str(state.local_process_index))
    if _communication_group is dist.group.WORLD:
        return deepspeed
    if _communication_group is not None:
        _release_groups()  # of a group that was destroyed elsewhere
    if state.device.type == "cpu":
        # Half a minute of C++ compilation, for an all-reduce that training does not use (comm/torch.py of 0.19).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with compilation_context():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    _communication_group = dist.group.WORLD
    process_group.call_before_group_ends(_release_groups)
    return deepspeed


def _release_groups() -> None:
    """Release DeepSpeed's process groups, whose sockets stay open as long as anything refers to them.

    Engines refer to them, and the hooks of gradients, which the garbage collector does not see, refer to engines until
    those are destroyed.
    """
    global _communication_group  # noqa: PLW0603 - DeepSpeed's communication is one per process
    _communication_group = None
    for engine in list(_engines):
        destroy_engine(engine)
    _clear_stage3_caches()
    groups: Any = import_module("deepspeed.utils.groups")
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references(group=None)
    comm: Any = import_module("deepspeed.comm.comm")
    comm.cdb = None


def _clear_stage3_caches() -> None:
    """Remove models from the caches that stage 3 keeps for the life of the process; parameters refer to the rest."""
    getattr(sys.modules.get("deepspeed.runtime.zero.parameter_offload"), "FWD_MODULE_STACK", []).clear()
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    for method in vars(getattr(coordinator, "PartitionedParameterCoordinator", object)).values():
        for cell in getattr(method, "__closure__", None) or ():  # a decorator is around the cache
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
