"""Settings of an Accelerator that are not plugins.

They are the keyword arguments for torch's autocast, gradient scaler, process group, DDP and profiler, and the settings
of gradient accumulation, data loaders and project folders.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DDPCommunicationHookType
from notebook_accelerate.config.plain_values import check_one_of, check_whole_number

if TYPE_CHECKING:
    import torch

_NCCL_TIMEOUT = timedelta(minutes=10)
_TIMEOUT = timedelta(minutes=30)


class KwargsHandler:
    """Base of the dataclasses that hold keyword arguments of torch's classes and functions."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields by name."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose values differ from the defaults, regardless of environment variables."""
        with environ.ignored():
            defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``, for mixed precision and for ``Accelerator.autocast``."""

    enabled: bool = True
    """Whether autocast is on."""
    cache_enabled: bool | None = None
    """Whether cast weights are cached until the block ends. If None, torch's default."""


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, the gradient scaler of fp16.

    Raises:
        ValueError: A value is out of its range.
    """

    init_scale: float = 65536.0
    """Scale of the loss in the first step."""
    growth_factor: float = 2.0
    """The scale is multiplied by this after ``growth_interval`` steps without an overflow."""
    backoff_factor: float = 0.5
    """The scale is multiplied by this after an overflow."""
    growth_interval: int = 2000
    """Number of steps without an overflow before the scale grows."""
    enabled: bool = True
    """Whether the scaler scales losses. If False, it has no effect."""

    def __post_init__(self) -> None:
        if not self.init_scale > 0:
            raise ValueError(f"init_scale={self.init_scale!r} is not allowed; pass a number above 0, such as 65536.0")
        if not self.growth_factor > 1:
            raise ValueError(f"growth_factor={self.growth_factor!r} is not allowed; pass a number above 1, such as 2.0")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor={self.backoff_factor!r} is not allowed; pass a number between 0 and 1")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    Raises:
        ValueError: ``timeout`` is not a ``datetime.timedelta``.
    """

    backend: str | None = "nccl"
    """Backend of the process group. The default means the device's backend, which is nccl on NVIDIA GPUs."""
    init_method: str | None = None
    """URL of the rendezvous. If None, the variables MASTER_ADDR and MASTER_PORT are used."""
    timeout: timedelta | None = None
    """Time limit of a collective. If None, 10 minutes for nccl and 30 minutes for other backends (torch's defaults)."""

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = _NCCL_TIMEOUT if self.backend == "nccl" else _TIMEOUT
        if not isinstance(self.timeout, timedelta):
            raise ValueError(f"timeout={self.timeout!r} is not allowed; pass datetime.timedelta(seconds=...)")


# The next class holds the arguments of DistributedDataParallel and the settings of its gradient compression.

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
# The module and the function of each hook. Hooks in _WITH_STATE get a state that is created from comm_state_option.
_HOOK_OF_TYPE = {
    DDPCommunicationHookType.FP16: ("default_hooks", "fp16_compress_hook"),
    DDPCommunicationHookType.BF16: ("default_hooks", "bf16_compress_hook"),
    DDPCommunicationHookType.POWER_SGD: ("powerSGD_hook", "powerSGD_hook"),
    DDPCommunicationHookType.BATCHED_POWER_SGD: ("powerSGD_hook", "batched_powerSGD_hook"),
}
_WITH_STATE = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
_WRAPPER_OF_TYPE = {
    DDPCommunicationHookType.FP16: ("default_hooks", "fp16_compress_wrapper"),
    DDPCommunicationHookType.BF16: ("default_hooks", "bf16_compress_wrapper"),
}


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``, and a communication hook for its gradients.

    Raises:
        ValueError: The hook or the wrapper is unknown.
    """

    dim: int = 0
    """Dimension along which inputs are divided. It has no effect if each rank has one device."""
    broadcast_buffers: bool = True
    """Whether buffers are copied from rank 0 before each forward pass."""
    bucket_cap_mb: int = 25
    """Size of a bucket of gradients that are reduced together, in MiB."""
    find_unused_parameters: bool = False
    """Whether some parameters may receive no gradient in a step."""
    check_reduction: bool = False
    """Accepted for compatibility; torch ignores it."""
    gradient_as_bucket_view: bool = False
    """Whether gradients are views of the buckets, which avoids a copy."""
    static_graph: bool = False
    """Whether every step uses the same parameters in the same order."""
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """Compression of gradients: no, fp16, bf16, power_sgd or batched_power_sgd (the last two: arXiv:1905.13727)."""
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    """Dtype that the hook's messages are converted to: no (not converted), fp16 or bf16."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``PowerSGDState`` for the power_sgd hooks, such as ``matrix_approximation_rank``."""

    def __post_init__(self) -> None:
        self.comm_hook = _member("comm_hook", self.comm_hook, list(DDPCommunicationHookType))
        wrappers = [DDPCommunicationHookType.NO, *_WRAPPER_OF_TYPE]
        self.comm_wrapper = _member("comm_wrapper", self.comm_wrapper, wrappers)  # type: ignore[assignment]

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the fields by name.

        Args:
            ignore_keys: Fields to leave out. By default, those that are not arguments of DistributedDataParallel.

        Returns:
            The values of the other fields, by name.
        """
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the hook on a wrapped model; every rank must call this, once per model.

        Args:
            model: A ``DistributedDataParallel``.

        Raises:
            ValueError: torch has no such hook for this model's device and backend.
        """
        if self.comm_hook == DDPCommunicationHookType.NO:
            return
        hook = _function(*_HOOK_OF_TYPE[self.comm_hook])
        if self.comm_hook == DDPCommunicationHookType.BATCHED_POWER_SGD:
            hook = _with_flat_matrices(hook)
        if self.comm_wrapper != DDPCommunicationHookType.NO:
            hook = _function(*_WRAPPER_OF_TYPE[self.comm_wrapper])(hook)
        state = None
        try:
            if self.comm_hook in _WITH_STATE:
                state = _function("powerSGD_hook", "PowerSGDState")(None, **self.comm_state_option)
            model.register_comm_hook(state=state, hook=hook)
        except TypeError as error:
            raise ValueError(
                f"comm_hook={self.comm_hook.value!r} with comm_wrapper={self.comm_wrapper.value!r} does not work here: "
                f"{error}; on CPU pass comm_hook='fp16' or 'power_sgd'"
            ) from error


def _function(module: str, name: str) -> Any:
    return getattr(import_module(f"{_HOOKS}.{module}"), name)


def _with_flat_matrices(hook: Any) -> Any:
    """Return torch's batched PowerSGD hook with an orthogonalization that accepts its matrices.

    The hook passes two-dimensional matrices, but torch's function (in 2.0 to 2.13 at least) accepts only
    three-dimensional batches, and raises an AssertionError without a message as soon as compression starts.
    """
    batched = hook.__globals__["_orthogonalize"]

    def orthogonalize(matrices: Any, epsilon: float = 0) -> None:
        batched(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    namespace = {**hook.__globals__, "_orthogonalize": orthogonalize}
    repaired = FunctionType(hook.__code__, namespace, hook.__name__, hook.__defaults__, hook.__closure__)
    return functools.update_wrapper(repaired, hook)


def _member(
    name: str, value: DDPCommunicationHookType | str, allowed: list[DDPCommunicationHookType]
) -> DDPCommunicationHookType:
    check_one_of(name, value, [member.value for member in allowed])
    return DDPCommunicationHookType(value)


# Settings of ``Accelerator.profile``.

ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``, and the folder of its traces."""

    activities: list[ProfilerActivity] | None = None
    """Activities to record: cpu, xpu, mtia, cuda or hpu. If None, all that torch supports here are recorded."""
    schedule_option: dict[str, int] | None = None
    """Arguments of ``torch.profiler.schedule``: wait, warmup, active, repeat, skip_first.

    If None, all steps are recorded.
    """
    on_trace_ready: Callable[..., Any] | None = None
    """Called with the profiler at the end of each cycle of the schedule."""
    record_shapes: bool = False
    """Whether the shapes of inputs are recorded."""
    profile_memory: bool = False
    """Whether allocations are tracked."""
    with_stack: bool = False
    """Whether the file and line of each operation are recorded."""
    with_flops: bool = False
    """Whether the floating point operations of matrix products and convolutions are estimated."""
    with_modules: bool = False
    """Whether the hierarchy of modules is recorded (TorchScript only)."""
    output_trace_dir: str | None = None
    """Folder that each rank writes a Chrome trace to when profiling ends. If None, no trace is written."""

    def build(self) -> Any:
        """Return a ``torch.profiler.profile`` with these arguments, without starting it.

        Raises:
            ValueError: torch does not support one of the activities on this machine.
        """
        from torch import profiler

        schedule = profiler.schedule(**self.schedule_option) if self.schedule_option is not None else None
        return profiler.profile(
            activities=self._activities(),
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _activities(self) -> list[Any] | None:
        from torch.profiler import ProfilerActivity as Activity

        if self.activities is None:
            return None
        known = {name.lower(): member for name, member in Activity.__members__.items()}
        for name in self.activities:
            if name not in known:
                raise ValueError(f"profiler activity {name!r} is not supported here; supported: {', '.join(known)}")
        return [known[name] for name in self.activities]


# ---- gradient accumulation, data loaders and project folders


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation.

    Raises:
        ValueError: ``num_steps`` is not a whole number above 0.
    """

    num_steps: int | None = None
    """Number of batches per optimizer step. If None, the Accelerator's ``gradient_accumulation_steps``."""
    adjust_scheduler: bool = True
    """Has no effect, as in Accelerate 1.15: schedulers step once per accumulation window, not once per batch."""
    sync_with_dataloader: bool = True
    """Whether the last batch of an epoch ends the accumulation window, even if it is not full."""
    sync_each_batch: bool = False
    """Whether gradients are reduced after every batch, which takes more communication, but less memory under FSDP."""

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_whole_number("num_steps", self.num_steps)


@dataclass
class DataLoaderConfiguration:
    """Settings of prepared data loaders, such as how they divide their data among ranks.

    Raises:
        ImportError: ``use_stateful_dataloader=True``, and torchdata is not installed.
        ValueError: ``data_seed`` is not a whole number.
    """

    split_batches: bool = False
    """Whether the loader's batch size is the total of all ranks (True) or the size on each rank (False)."""
    dispatch_batches: bool | None = None
    """Whether rank 0 reads every batch and sends each rank its share. If None, it does so for iterable datasets."""
    even_batches: bool = True
    """Whether the last batches are padded with samples from the start, so that all ranks get the same number."""
    use_seedable_sampler: bool = False
    """Whether a random sampler is replaced with one whose order depends only on seed and epoch, so all ranks agree."""
    data_seed: int | None = None
    """Seed of the seedable sampler. If None, torch's current seed is used."""
    non_blocking: bool = False
    """Whether batches are copied to the device asynchronously (needs pinned memory)."""
    use_stateful_dataloader: bool = False
    """Whether torchdata's StatefulDataLoader is used, which resumes in the middle of an epoch."""

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader and importlib.util.find_spec("torchdata") is None:
            raise ImportError("use_stateful_dataloader=True needs torchdata: pip install 'torchdata>=0.8'")
        if self.data_seed is not None and (isinstance(self.data_seed, bool) or not isinstance(self.data_seed, int)):
            raise ValueError(f"data_seed={self.data_seed!r} is not allowed; pass a whole number")


@dataclass
class ProjectConfiguration:
    """Folders of a project, and the names of its checkpoints.

    Raises:
        ValueError: ``total_limit`` is not a whole number above 0.
    """

    project_dir: str | None = None
    """Folder for checkpoints."""
    logging_dir: str | None = None
    """Folder for the trackers' files. If None, ``project_dir``."""
    automatic_checkpoint_naming: bool = False
    """Whether ``save_state`` numbers its folders: checkpoints/checkpoint_0, checkpoint_1, ..."""
    total_limit: int | None = None
    """Number of numbered checkpoints to keep (the oldest are deleted first). If None, all are kept."""
    iteration: int = 0
    """Number of the next checkpoint."""
    save_on_each_node: bool = False
    """Whether the first rank of every machine saves (True), or only rank 0 (False)."""

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            check_whole_number("total_limit", self.total_limit)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the folder of checkpoints, and the folder of logs if it is not set yet.

        Args:
            project_dir: The folder of checkpoints.
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor, without its values."""

    shape: torch.Size
    """The size of each dimension."""
    dtype: torch.dtype
    """The data type of the elements."""
