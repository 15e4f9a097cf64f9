"""Run DeepSpeed in a rank: import it, start its communication, wrap its engine, and compile its operators."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module, util
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from notebook_accelerate.collectives import convert_to_fp32, recursively_apply
from notebook_accelerate.config import environ
from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
from notebook_accelerate.config.enums import FP8BackendType
from notebook_accelerate.hardware import device_table
from notebook_accelerate.hardware.versions import is_package
from notebook_accelerate.state import AcceleratorState, process_group
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.accelerator_arguments import Setup
from notebook_accelerate.strategies.engine_strategy import EngineOptimizer, EngineScheduler

_SAME_NAMES = frozenset({"cpu", "cuda", "hpu", "mlu", "mps", "npu", "sdaa", "xpu"})
"""The device types whose names are the same in torch and DeepSpeed."""
_communication_group: Any = None
"""The default process group that DeepSpeed's communication was started with."""
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def track_engine(engine: Any) -> None:
    """Arrange for an engine to be destroyed before the process group that it uses.

    Args:
        engine: The engine to destroy in time.
    """
    _engines.add(engine)


def destroy_engine(engine: Any) -> None:
    """Free an engine's memory, unless it has already been freed. The process group must still exist.

    Args:
        engine: The engine to destroy, which `track_engine` has been given.
    """
    if engine in _engines:
        _engines.discard(engine)
        engine.destroy()


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device type.

    Args:
        device: This rank's device.

    Returns:
        The package `deepspeed`.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: DeepSpeed was already imported for another device type.
    """
    if not is_package("deepspeed"):
        raise ImportError(
            "training with a DeepSpeedPlugin needs DeepSpeed, which is not installed: pip install 'deepspeed>=0.16'"
        )
    chosen = "DS_ACCELERATOR" in os.environ or device.type not in _SAME_NAMES
    with environ.patch_environment(**({} if chosen else {"DS_ACCELERATOR": device.type})):
        deepspeed: Any = import_module("deepspeed")
        name = deepspeed.accelerator.get_accelerator().device_name()
    if name != device.type and device.type in _SAME_NAMES:
        raise ValueError(
            f"DeepSpeed uses {name}, but this rank trains on {device}: DeepSpeed was imported before the Accelerator "
            f"was created, or DS_ACCELERATOR={name} is set; set DS_ACCELERATOR={device.type} for this process"
        )
    return deepspeed


def check_support(plugin: DeepSpeedPlugin) -> None:
    """Check that DeepSpeed supports the plugin's settings on this machine.

    DeepSpeed's own errors do not suggest solutions.

    Args:
        plugin: The plugin to check, with its precision set.

    Raises:
        ValueError: fp16 is not supported on this device, or offloading to NVMe is enabled without libaio.
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
            f"{asked[0]}_device='nvme' needs DeepSpeed's async_io, which is compiled with libaio, but libaio is not "
            f"installed: apt-get install libaio-dev; or pass {asked[0]}_device='cpu'"
        )


def start_communication(state: AcceleratorState) -> Any:
    """Import DeepSpeed and start its communication on the process group; every rank must call this.

    Args:
        state: The `AcceleratorState`. A single process gets a process group of one rank, because DeepSpeed requires a
            group.

    Returns:
        The package `deepspeed`.
    """
    global _communication_group  # noqa: PLW0603 - DeepSpeed has one communication backend per process
    deepspeed = import_deepspeed(state.device)
    if not process_group.group_exists():
        process_group.start_group_of_one(device_table.row(state.device.type).backend, state.device)
    # DeepSpeed reads LOCAL_RANK even during training, but the variable may not be set in a single process.
    os.environ.setdefault("LOCAL_RANK", str(state.local_process_index))
    if _communication_group is dist.group.WORLD:
        return deepspeed
    if _communication_group is not None:
        _release_groups()  # The old default group was destroyed by other code.
    if state.device.type == "cpu":
        # Otherwise, DeepSpeed would spend half a minute compiling an all-reduce that training does not use
        # (see comm/torch.py in DeepSpeed 0.19).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with compilation_context():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    _communication_group = dist.group.WORLD
    process_group.call_before_group_ends(_release_groups)
    return deepspeed


def _release_groups() -> None:
    """Release DeepSpeed's process groups, whose sockets stay open while any reference to them exists.

    Engines refer to the groups, and gradient hooks refer to the engines until the engines are destroyed. The garbage
    collector does not see the hooks' references.
    """
    global _communication_group  # noqa: PLW0603 - DeepSpeed has one communication backend per process
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
    """Remove models from the caches that stage 3 keeps until the process exits.

    A cached parameter would keep everything that it refers to alive.
    """
    getattr(sys.modules.get("deepspeed.runtime.zero.parameter_offload"), "FWD_MODULE_STACK", []).clear()
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    for method in vars(getattr(coordinator, "PartitionedParameterCoordinator", object)).values():
        for cell in getattr(method, "__closure__", None) or ():  # The cache is in the closure of a decorator.
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


# ---- precision: fp8 layers, casts of inputs and outputs, and the state of a new optimizer


def convert_to_fp8(model: nn.Module, setup: Setup, plugin: DeepSpeedPlugin) -> None:
    """Convert layers of a model to fp8 if mixed_precision="fp8". Around these layers, the engine computes in bf16.

    Args:
        model: The model before its engine is created. Its parameters stay the same objects.
        setup: The settings of the Accelerator.
        plugin: The active plugin, which says whether MS-AMP is enabled.

    Raises:
        ValueError: MS-AMP is selected in the recipe instead of in the DeepSpeed plugin.
    """
    if setup.state.mixed_precision != "fp8":
        return
    integrated = plugin.get_value("msamp.enabled") is True
    if getattr(setup.precision, "backend", None) == FP8BackendType.MSAMP and not integrated:
        raise ValueError(
            "with DeepSpeed, MS-AMP is a part of the engine: pass DeepSpeedPlugin(enable_msamp=True, "
            "msamp_opt_level='O2'); or pass kwargs_handlers=[AORecipeKwargs()] or [TERecipeKwargs()], or "
            "mixed_precision='bf16'"
        )
    if not integrated:
        setup.precision.convert_layers(model)


def initialize_module(deepspeed: Any, plugin: DeepSpeedPlugin) -> Any:
    """Return the module whose `initialize` creates the engine: DeepSpeed, or MS-AMP's version of it.

    Args:
        deepspeed: The package `deepspeed`.
        plugin: The active plugin, which says whether MS-AMP is enabled.

    Returns:
        The module, which has a function `initialize`.

    Raises:
        ImportError: The plugin selects MS-AMP, which is not installed.
    """
    if plugin.get_value("msamp.enabled") is not True:
        return deepspeed
    try:
        return import_module("msamp.deepspeed")
    except ImportError as error:
        raise ImportError(
            "DeepSpeedPlugin(enable_msamp=True) needs MS-AMP, which is not installed: it is built from source, "
            "https://azure.github.io/MS-AMP/docs/getting-started/installation; or leave enable_msamp out, and pass "
            "kwargs_handlers=[AORecipeKwargs()] (pip install torchao)"
        ) from error


def add_half_precision_casts(engine: Any) -> None:
    """Cast the inputs of an engine's model to half precision, and its outputs to float32, as autocast does.

    Args:
        engine: The engine whose model is changed. An engine that computes in float32 is left as it is.
    """
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16 if engine.bfloat16_enabled() else None
    if dtype is None:
        return

    def cast_inputs(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    engine.module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    engine.module.register_forward_hook(_outputs_to_float32)
    _undo_trial_step(engine.optimizer)


@torch.no_grad()
def _undo_trial_step(optimizer: Any) -> None:
    """Undo the trial step with zero gradients that stage 0 takes to allocate states.

    Otherwise, Adam's bias correction would count the trial step, and the first real step would be a fifth too small.
    The trial step also applies weight decay (see unfused_optimizer.py in DeepSpeed 0.19).
    """
    if not hasattr(optimizer, "initialize_optimizer_states"):
        return
    masters = getattr(optimizer, "fp32_groups_flat", None) or getattr(optimizer, "fp32_groups", None)
    halves = getattr(optimizer, "fp16_groups_flat", None) or getattr(optimizer, "fp16_groups", None)
    if not masters or not halves:
        return  # ZeRO's optimizers do not take a trial step.
    optimizer.optimizer.state.clear()
    for master, half in zip(_tensors(masters), _tensors(halves), strict=True):
        master.copy_(half)


def _tensors(groups: Any) -> list[torch.Tensor]:
    return [tensor for group in groups for tensor in ([group] if isinstance(group, torch.Tensor) else group)]


def _outputs_to_float32(_module: Any, _args: Any, outputs: Any) -> Any:
    return convert_to_fp32(outputs)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return recursively_apply(lambda tensor: tensor.to(dtype), values, test_type=_is_float32)


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


# ---- the engine, optimizer and scheduler for a training loop written for Accelerate


class DeepSpeedEngineWrapper:
    """Runs the backward pass, the clipping and the step of an engine.

    DeepSpeed clips gradients inside its step. If the training loop clips gradients, that call takes the step, and the
    optimizer's `step` does nothing.

    Args:
        engine: The engine to run.
        clipping: The maximum norm in the configuration, or None to use the argument of `clip`.
    """

    def __init__(self, engine: Any, clipping: float | None = None) -> None:
        self.engine = engine
        self.clipping = clipping
        self.pending = False

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients; every rank must call this.

        Args:
            loss: The loss of this rank's batch.
            sync_gradients: Whether this batch completes a window of accumulation.
            kwargs: The arguments of the engine's `backward`: `retain_graph`, and `scale_wrt_gas`, which says whether to
                divide the loss by the number of batches in a window.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        self.pending = sync_gradients

    def step(self) -> None:
        """Take the step if the window is complete and the step has not been taken yet."""
        if self.pending:
            self.pending = False
            self.engine.step()

    def clip(self, max_norm: float) -> None:
        """Take the step with gradients scaled so that their norm is at most `max_norm`.

        Args:
            max_norm: The maximum norm. A number in the configuration takes precedence.
        """
        if not self.pending:
            return
        if self.clipping is not None:
            self.step()
            return
        try:
            self._set_clipping(0.0 if math.isinf(max_norm) else float(max_norm))
            self.step()
        finally:
            self._set_clipping(0.0)

    def _set_clipping(self, max_norm: float) -> None:
        # The engine clips the gradients of plain optimizers, whereas DeepSpeed's optimizers clip their own.
        self.engine._config.gradient_clipping = max_norm
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def get_global_grad_norm(self) -> Any:
        """Return the gradient norm of the last step before clipping, or None if DeepSpeed has not computed a norm."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


class DeepSpeedOptimizerWrapper(EngineOptimizer):
    """DeepSpeed's optimizer. `step` takes the engine's step, which also clears gradients; `zero_grad` does nothing."""

    library = "DeepSpeed"

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were infinite."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(EngineScheduler):
    """DeepSpeed's schedule. `step` does nothing, because the engine steps and saves the schedule."""


# ---- compiling operators at their first use: finding ninja, and removing the locks of dead processes

_CONTAINER_FILE_SYSTEMS = frozenset({"overlay", "ramfs", "tmpfs"})
"""The types of file systems that a container never shares."""
_MACHINE_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"})
"""The types of file systems that machines never share, but containers on one machine may."""
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The machine's initial PID namespace (PROC_PID_INIT_INO in Linux), where all processes are visible."""
_RECHECK_SECONDS = 0.2
"""Seconds between two checks of a lock. One check is not enough: torch closes a lock just before removing it."""


def compilation_context() -> AbstractContextManager[None]:
    """Remove the locks of dead processes, and return a context that lets DeepSpeed find ninja.

    Returns:
        A context manager for the code that compiles.
    """
    remove_dead_locks(extensions_folder())
    return _tools_on_path()


def extensions_folder() -> Path:
    """Return the folder where torch compiles extensions.

    Returns:
        TORCH_EXTENSIONS_DIR if it is set. Otherwise, the same folder as
        torch.utils.cpp_extension.get_default_build_root on Linux, without importing that function, which takes a
        second.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or caches / "torch_extensions")


@contextmanager
def _tools_on_path() -> Iterator[None]:
    """Add ninja to PATH inside the block if it is installed in this Python's environment, but not on PATH."""
    folder = Path(sys.executable).parent
    if shutil.which("ninja") is None and util.find_spec("ninja") is not None and (folder / "ninja").exists():
        with environ.patch_environment(PATH=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"):
            yield
    else:
        yield


def remove_dead_locks(root: Path) -> list[Path]:
    """Remove the locks of dead processes from a folder of torch extensions, because ranks would wait for them forever.

    torch keeps a lock (torch.utils.file_baton) open while it compiles, and removes the lock even if compiling fails.
    Only a process that is killed leaves its lock behind.

    Args:
        root: A folder whose subfolders contain an extension, or the extensions for a version of Python.

    Returns:
        The removed locks. A lock that no visible process holds, but that a process on another machine or in another
        container may hold, is kept, and a warning is issued.
    """
    suspects = [lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern) if not _may_be_held(lock)]
    if not suspects:
        return []
    before = {lock: _identity(lock) for lock in suspects}
    time.sleep(_RECHECK_SECONDS)
    return [lock for lock in suspects if not _may_be_held(lock) and _remove(lock, before[lock])]


def _remove(lock: Path, seen: tuple[int, int] | None) -> bool:
    kind = _file_system_type(lock.resolve())
    if not _shows_all_processes(kind):
        warn_once(
            f"{lock} says that an extension is being compiled, but no visible process compiles it, and ranks "
            f"wait until the file is removed; if no process on another machine or in another container with this "
            f"{kind or 'file system'} compiles it either: rm {lock}"
        )
        return False
    if seen is None or seen != _identity(lock):
        return False  # Another rank has removed the lock, and may already be compiling.
    lock.unlink(missing_ok=True)
    warn_once(f"removed {lock}: the process that was compiling there was killed, and ranks would wait for it forever")
    return True


def _shows_all_processes(kind: str) -> bool:
    """Return whether /proc shows every process that can use a file system of this type."""
    return kind in _CONTAINER_FILE_SYSTEMS or (
        kind in _MACHINE_FILE_SYSTEMS and str(Path("/proc/self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
    )


def _identity(lock: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = lock.stat()
        return found.st_ino, found.st_ctime_ns
    return None


def _may_be_held(lock: Path) -> bool:
    """Return whether a process has the lock open, or a process that is not visible here may have it open."""
    processes = Path("/proc")
    if not (processes / "self" / "fd").exists():
        return True
    try:
        wanted = lock.stat()
        return any(_has_open(process, wanted) for process in processes.iterdir() if process.name.isdigit())
    except FileNotFoundError:
        return True  # The owner has just released the lock.


def _has_open(process: Path, wanted: os.stat_result) -> bool:
    try:
        if process.stat().st_uid != wanted.st_uid:
            return False  # Another user's process cannot have created the file.
        descriptors = list((process / "fd").iterdir())
    except PermissionError:
        return not _has_ended(process)
    except (FileNotFoundError, ProcessLookupError):
        return False  # The process has exited.
    for descriptor in descriptors:
        with suppress(OSError):
            found = descriptor.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _has_ended(process: Path) -> bool:
    """Return whether a process has exited.

    Zombies count as exited: all of their files are closed, even though /proc does not let other users list them.
    """
    try:
        return psutil.Process(int(process.resolve().name)).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _file_system_type(path: Path) -> str:
    """Return the kernel's name for the type of a path's file system, or "" if the type is unknown."""
    mounts = []
    with suppress(OSError):  # A sandbox may hide /proc/filesystems or the mounts.
        mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    # The sort is stable: if several file systems are mounted on the same folder, the last one, which is visible, stays
    # last.
    mounts.sort(key=lambda mount: len(mount.mountpoint))
    return mounts[-1].fstype if mounts else ""
