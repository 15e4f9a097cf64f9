"""`PartialState`: the rank, world size, device and process group of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import get_annotations
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from notebook_accelerate import hardware, telemetry
from notebook_accelerate.config import environ
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.hardware import device_table
from notebook_accelerate.state import process_group
from notebook_accelerate.state.process_group import World, wait_for_idle_at_exit, world_from_environ
from notebook_accelerate.state.rank_execution import RankExecution, split_share
from notebook_accelerate.state.warn_once import warn_once

Slots = dict[str, Any]


SharedDict: Callable[[], Slots] = dict
"""The type of the dictionary that all instances of a state class share within a process."""

find_precision: Callable[[], str] = partial(str, "no")
"""Returns the precision in use. The module of `AcceleratorState`, which imports this one, sets the function."""

_Inputs = TypeVar("_Inputs")


class PartialState(RankExecution):
    """The rank, the world size and the device. All instances share one dictionary per process.

    The first instance reads RANK, WORLD_SIZE and other environment variables, which torchrun and this package's
    launchers set. If there are several ranks, it starts the process group, so every rank must create an instance.

    Args:
        cpu: Whether to use the CPU.
        kwargs: Arguments for `torch.distributed.init_process_group`, for example from
            `InitProcessGroupKwargs(...).to_kwargs()`.

    Attributes:
        device: The `torch.device` of this rank.
        distributed_type: The type of distributed training (`DistributedType`).
        num_processes: The number of ranks.
        process_index: The index of this rank, counted from 0.
        local_process_index: The index of this rank on its machine.
        backend: The name of the process group's backend, or None if there is no group.
        communicator: The name of the implementation of collectives: none, torch or xla.
        debug: Whether ranks compare the arguments of each collective before it runs (ACCELERATE_DEBUG_MODE).
        fork_launched: Whether a notebook launch forked this process.
    """

    _shared_state: ClassVar[Slots] = SharedDict()

    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    communicator: str
    debug: bool
    fork_launched: bool
    _cpu: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            _initialize(self, cpu, kwargs)
        elif (cpu and not self._cpu) or kwargs:
            _apply_settings(self, cpu, kwargs)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type!s}"
            f"{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # An instance that is unpickled in another process becomes the state of that process.
        return type(self), ()

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if any(name in get_annotations(cls) for cls in type(self).__mro__):
            raise AttributeError(
                f"{kind} has no {name!r}: the state was reset after this object was created (a launch resets it in "
                f"every rank); create a new one where it is used: {kind}() or Accelerator()"
            )
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    @staticmethod
    def _reset_state() -> None:
        """Clear the shared dictionary, so that the next instance reads the environment, but keep the process group."""
        PartialState._shared_state.clear()

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """Return the backend that connects the ranks, and the type of distributed training. Nothing is started.

        Args:
            cpu: Whether to use the CPU.
            sagemaker_dp: Not used.
            backend: The backend to use instead of the default.
        """
        world = world_from_environ()
        row = device_row(cpu=cpu, world=world)
        if world.size == 1 and row.type != "xla":
            return backend, DistributedType.NO
        return choose_backend(row, backend), row.distributed_type

    @property
    def initialized(self) -> bool:
        """Whether the shared dictionary has been filled."""
        return bool(self._shared_state)

    @property
    def mixed_precision(self) -> str:
        """The precision: no, fp16, bf16 or fp8. Without an `Accelerator`, the value of ACCELERATE_MIXED_PRECISION."""
        return find_precision()

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def default_device(self) -> torch.device:
        """The default device of this machine: its accelerator, or the CPU."""
        return torch.device(device_row(cpu=False).type)

    def set_device(self) -> None:
        """Select this rank's device again, and make it the current device if its type has a current device."""
        world = World(
            rank=self.process_index, size=self.num_processes, local_rank=self.local_process_index, local_size=1
        )
        self.device = select_device(device_row(cpu=self._cpu, world=world), world)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have reached this call; every rank must call this."""
        process_group.BARRIERS[self.communicator](self.device)

    @contextmanager
    def split_between_processes(self, inputs: _Inputs, apply_padding: bool = False) -> Iterator[_Inputs]:
        """Give each rank its contiguous share of `inputs`.

        Args:
            inputs: A list, a tuple, a tensor, a dict of these with equal lengths, or a datasets.Dataset.
            apply_padding: Whether to repeat the last item of `inputs`, so that all shares have the same length and
                results can be gathered. The caller must then drop the repeated results. Without padding, a share may be
                empty.

        Yields:
            The share of this rank, which is `inputs` itself if there is only one rank.

        Raises:
            ValueError: The values of a dict differ in length, or `inputs` cannot be split.
        """
        if self.num_processes == 1:
            yield inputs
            return
        yield split_share(inputs, self.process_index, self.num_processes, padding=apply_padding, device=self.device)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on one rank of each machine.

        Args:
            args: Positional arguments for the built-in `print`.
            kwargs: Keyword arguments for the built-in `print`.
        """
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 - the purpose of this method

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group; every rank in the group must call this.

        Args:
            group: The group to destroy. If None, the default group is destroyed, unless a notebook launch has forked
                this process: that launch destroys the default group itself.
        """
        if self.fork_launched and group is None:
            return
        process_group.end_group(group)


def _initialize(state: PartialState, cpu: bool, kwargs: dict[str, Any]) -> None:
    cpu = cpu or environ.flag("ACCELERATE_USE_CPU")
    world = _world_of_group() or world_from_environ()
    row = device_row(cpu=cpu, world=world)
    device = select_device(row, world)
    if row.type == "cuda" and environ.flag(environ.AFFINITY):
        process_group.override_numa_affinity(world.local_rank)
    backend = _start_group(world, row, device, kwargs) if world.size > 1 else None
    state.__dict__.update(
        _cpu=cpu,
        device=device,
        # On XLA, even a single rank has a distributed type, because it must mark its steps.
        distributed_type=row.distributed_type if world.size > 1 or row.type == "xla" else DistributedType.NO,
        num_processes=world.size,
        process_index=world.rank,
        local_process_index=world.local_rank,
        backend=backend,
        communicator=row.communicator if world.size > 1 else "none",
        debug=environ.flag("ACCELERATE_DEBUG_MODE"),
        fork_launched=environ.flag("FORK_LAUNCHED"),
    )


def _world_of_group() -> World | None:
    """Return the rank and world size of an existing process group, which a script may have started."""
    if not process_group.group_exists():
        return None
    environment = world_from_environ()
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = environment.local_rank if (environment.rank, environment.size) == (rank, size) else rank
    return World(rank=rank, size=size, local_rank=local_rank, local_size=environment.local_size)


def _start_group(world: World, row: Row, device: torch.device, kwargs: dict[str, Any]) -> str | None:
    """Start the process group, unless one exists or the device does not use one. Return the name of the backend."""
    if row.communicator != "torch":
        return row.backend
    wait_for_idle_at_exit()
    settings = {key: value for key, value in kwargs.items() if value is not None}
    with_cpu = settings.pop("with_cpu", False)
    if process_group.group_exists():
        return _existing_backend(str(dist.get_backend()), row, with_cpu)
    backend = choose_backend(row, settings.pop("backend", None), with_cpu)
    process_group.forget_group()
    if row.type == "cpu":
        _share_cores(world)
    process_group.start_group(backend, world, device, **settings)
    return backend


def _share_cores(world: World) -> None:
    """Divide this machine's cores among its ranks, unless a launch or OMP_NUM_THREADS has set the number of threads."""
    if telemetry.current_sink() is not None or environ.text("OMP_NUM_THREADS"):
        return
    threads = max(hardware.detect().cpu_count // world.local_size, 1)
    torch.set_num_threads(threads)
    warn_once(f"OMP_NUM_THREADS is not set: each of the {world.local_size} ranks on this machine has {threads} threads")


def _existing_backend(backend: str, row: Row, with_cpu: bool) -> str:
    """Return the backend of the existing process group. Warn if the group lacks a backend for the CPU."""
    if with_cpu and "gloo" not in backend:
        wanted = choose_backend(row, None, with_cpu)
        warn_once(
            f"the process group was started with backend {backend!r} before the Accelerator, but FSDP 2 with "
            "cpu_offload=True clips gradients in CPU memory: create the Accelerator first, or write "
            f"torch.distributed.init_process_group({wanted!r})"
        )
    return backend


def _apply_settings(state: PartialState, cpu: bool, kwargs: dict[str, Any]) -> None:
    """Apply the settings that were passed to a later instance, if they differ from the current ones."""
    requested = kwargs.get("backend")
    row = device_row(cpu=cpu or state._cpu)
    usable = choose_backend(row, requested) if requested and state.backend else state.backend
    connected = {state.backend, *(part.rpartition(":")[2] for part in (state.backend or "").split(","))}
    moves = cpu and not state._cpu and state.device.type != "cpu"
    if not moves and (state.num_processes == 1 or usable in connected):
        if state.num_processes > 1 and row.communicator == "torch":
            _existing_backend(str(state.backend), row, bool(kwargs.get("with_cpu")))
        state._cpu = state._cpu or cpu
        return
    warn_once(
        f"PartialState changes its settings: it was created on {state.device} ({state.backend or 'no process group'}), "
        f"and {'the CPU' if moves else f'backend {usable!r}'} is requested now; objects that are already prepared do "
        "not change"
    )
    process_group.end_group()
    state.__dict__.clear()
    _initialize(state, cpu, kwargs)


# ---- device and backend

Row = device_table.DeviceRow


def device_row(*, cpu: bool, world: World | None = None) -> Row:
    """Return the entry of the device table for this process's device type.

    Args:
        cpu: Whether to use the CPU.
        world: The rank and world size, if known. If there are several ranks, but devices of this type cannot
            communicate, the CPU is used.

    Returns:
        The entry for the type in ACCELERATE_TORCH_DEVICE if it is set, otherwise for this machine's accelerator or the
        CPU.
    """
    requested = _requested_device()
    kind = hardware.detect().accelerator if requested is None else requested.type
    row = device_table.row("cpu" if cpu or kind == "meta" else kind)
    if world is not None and world.size > 1 and row.communicator == "none":
        warn_once(f"{row.type} devices cannot be connected: the {world.size} ranks train on the CPU")
        return device_table.row("cpu")
    return row


def select_device(row: Row, world: World) -> torch.device:
    """Select this rank's device, and make it the current device.

    Args:
        row: The entry of the device table for the type to use.
        world: The rank and world size.

    Returns:
        The device in ACCELERATE_TORCH_DEVICE if it fits the type, or the device whose index is the rank's local index.

    Raises:
        ValueError: The machine has no device with that index.
    """
    requested = _requested_device()
    if requested is not None and requested.type in {row.type, "meta"} and not row.is_accelerator:
        return requested
    if requested is not None and requested.type == row.type and requested.index is not None:
        return row.select(requested.index)
    count = hardware.detect().count if row.is_accelerator else 0
    if count and world.local_rank >= count:
        raise ValueError(
            f"rank {world.rank} needs {row.type} device {world.local_rank}, but this machine has {count} "
            f"(numbered from 0); pass num_processes={count}, or use the CPU: Accelerator(cpu=True)"
        )
    return row.select(world.local_rank)


def _requested_device() -> torch.device | None:
    """Return the device in ACCELERATE_TORCH_DEVICE, such as "cuda:1", or None if the variable is not set.

    Raises:
        ValueError: The value is not a device.
    """
    text = environ.text("ACCELERATE_TORCH_DEVICE")
    if not text:
        return None
    device_table.row(text.partition(":")[0]) if text != "meta" else None
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"ACCELERATE_TORCH_DEVICE={text!r} is not a device; set it to cuda:0 or cpu") from error


def choose_backend(row: Row, requested: str | None, with_cpu: bool = False) -> str:
    """Return the backend that connects the ranks.

    Args:
        row: The entry of the device table for the device type.
        requested: The backend that the user has chosen. "nccl", which is the default in `InitProcessGroupKwargs`, means
            the default for the device type.
        with_cpu: Whether ranks on accelerators also exchange tensors in CPU memory, which NCCL does not support.

    Returns:
        The name of the backend for `torch.distributed.init_process_group`, such as "nccl" or "cuda:nccl,cpu:gloo".

    Raises:
        ValueError: torch does not know the requested backend.
    """
    if requested not in {None, "nccl"}:
        names = {part.rpartition(":")[2].lower() for part in str(requested).split(",")}
        if unknown := sorted(names - {*dist.Backend.backend_list}):
            known = ", ".join(dist.Backend.backend_list)
            raise ValueError(f"backend={requested!r} is not known here: {unknown[0]!r} is not one of {known}")
        return str(requested)
    return f"{row.type}:{row.backend},cpu:gloo" if with_cpu and row.is_accelerator else row.backend


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any arguments, and do nothing. This function replaces others on ranks that must not run them."""


class ThreadLocalSharedDict(threading.local):
    """A descriptor with one dictionary per thread, because XLA runs one rank per thread.

    Args:
        thread_local: Accepted for compatibility, but not used. Each thread always has its own dictionary.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: Slots = {}

    def __get__(self, instance: object, owner: type | None = None) -> Slots:
        return self._storage

    def __set__(self, instance: object, value: Slots) -> None:
        self._storage = value
