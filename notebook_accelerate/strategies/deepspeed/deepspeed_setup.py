"""DeepSpeed's own start: its import, its device, its communication, without variables that a user would have to set."""

from __future__ import annotations

import os
import sys
import weakref
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.config import environ
from notebook_accelerate.hardware import devices
from notebook_accelerate.hardware.feature_checks import is_deepspeed_available
from notebook_accelerate.state import AcceleratorState, process_group
from notebook_accelerate.strategies.deepspeed.op_compilation import compiling

_NAMED_AS_HERE = frozenset({"cpu", "cuda", "hpu", "mlu", "mps", "npu", "sdaa", "xpu"})
"""Types of devices that DeepSpeed calls by the same names."""
_served: Any = None
"""The default process group that DeepSpeed's communication was started on."""
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def note_engine(engine: Any) -> None:
    """Have an engine end with the process group that it exchanges through.

    Args:
        engine: The engine.
    """
    _engines.add(engine)


def end_engine(engine: Any) -> None:
    """Have an engine give its memory back, unless it has: it cannot without the process group.

    Args:
        engine: An engine, noted before.
    """
    if engine in _engines:
        _engines.discard(engine)
        engine.destroy()


def load(device: torch.device) -> Any:
    """Import DeepSpeed for a type of device.

    Args:
        device: This rank's device.

    Returns:
        The package.

    Raises:
        ImportError: It is not installed.
        ValueError: It was imported for another type of device.
    """
    if not is_deepspeed_available():
        raise ImportError(
            "training with a DeepSpeedPlugin needs DeepSpeed, which is not installed: pip install 'deepspeed>=0.16'"
        )
    chosen = "DS_ACCELERATOR" in os.environ or device.type not in _NAMED_AS_HERE
    with environ.patch_environment(**({} if chosen else {"DS_ACCELERATOR": device.type})):
        deepspeed: Any = import_module("deepspeed")
        name = deepspeed.accelerator.get_accelerator().device_name()
    if name != device.type and device.type in _NAMED_AS_HERE:
        raise ValueError(
            f"DeepSpeed has chosen {name}, and this rank trains on {device}: it was imported before the Accelerator "
            f"was made, or DS_ACCELERATOR says so; set DS_ACCELERATOR={device.type} for this process"
        )
    return deepspeed


def check_abilities(plugin: Any) -> None:
    """Refuse what DeepSpeed cannot do on this machine, and would refuse without saying what to do instead.

    Args:
        plugin: The plugin, its precision settled.

    Raises:
        ValueError: It asks for fp16 where DeepSpeed computes none, or for offloading to files without libaio.
    """
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    if plugin.get_value("fp16.enabled") is True and not accelerator.is_fp16_supported():
        raise ValueError(
            f"DeepSpeed computes no fp16 on {accelerator.device_name()}; write mixed_precision='bf16', or leave fp16 "
            "out of its configuration"
        )
    parts = ("offload_optimizer", "offload_param")
    asked = [part for part in parts if plugin.get_value(f"zero_optimization.{part}.device") == "nvme"]
    if asked and not import_module("deepspeed.ops.op_builder").AsyncIOBuilder().is_compatible(verbose=False):
        raise ValueError(
            f"{asked[0]}_device='nvme' needs DeepSpeed's async_io, which is compiled with libaio, and that is not "
            f"installed: apt-get install libaio-dev; or write {asked[0]}_device='cpu'"
        )


def start(state: AcceleratorState) -> Any:
    """Import DeepSpeed and have it communicate through the process group of this world; every rank must call this.

    Args:
        state: The world. In a world of one a process group of one is made: DeepSpeed does not go without.

    Returns:
        The package.
    """
    global _served  # noqa: PLW0603 - DeepSpeed's communication is one per process
    deepspeed = load(state.device)
    if not process_group.group_exists():
        process_group.start_group_of_one(devices.row(state.device.type).backend)
    # DeepSpeed reads it again while it trains; in a world of one nobody may have set it.
    os.environ.setdefault("LOCAL_RANK", str(state.local_process_index))
    if _served is dist.group.WORLD:
        return deepspeed
    if _served is not None:
        _let_go()  # of a group that somebody else has ended
    if state.device.type == "cpu":
        # Half a minute of C++ compilation, for an all-reduce that training does not use (comm/torch.py of 0.19).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with compiling():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    _served = dist.group.WORLD
    process_group.before_the_end(_let_go)
    return deepspeed


def _let_go() -> None:
    """Have DeepSpeed forget its groups, whose sockets live as long as anything refers to them.

    Engines do, and gradients' hooks, which no garbage collector sees, refer to engines until those are destroyed.
    """
    global _served  # noqa: PLW0603 - DeepSpeed's communication is one per process
    _served = None
    for engine in list(_engines):
        end_engine(engine)
    _empty_caches()
    groups: Any = import_module("deepspeed.utils.groups")
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references(group=None)
    comm: Any = import_module("deepspeed.comm.comm")
    comm.cdb = None


def _empty_caches() -> None:
    """Take models out of what stage 3 keeps as long as the process lives; their parameters know all the rest."""
    getattr(sys.modules.get("deepspeed.runtime.zero.parameter_offload"), "FWD_MODULE_STACK", []).clear()
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    for method in vars(getattr(coordinator, "PartitionedParameterCoordinator", object)).values():
        for cell in getattr(method, "__closure__", None) or ():  # a decorator is around the cache
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


__all__ = ["check_abilities", "end_engine", "load", "note_engine", "start"]
