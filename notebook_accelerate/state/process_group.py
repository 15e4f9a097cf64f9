"""Start and destroy the process group, wait for its ranks, and read the rank and world size from the environment."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate import telemetry
from notebook_accelerate.config import environ
from notebook_accelerate.hardware import device_counts, nvml
from notebook_accelerate.hardware.process_liveness import read_stat
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.torch_internals import drop_process_groups
from notebook_accelerate.worker import collective_timeouts

# Whether this process has inherited the default group in a fork. If so, it must never use the group's handles, because
# their sockets and threads belong to the parent.
_inherited = False


def _note_fork() -> None:
    global _inherited  # noqa: PLW0603 - there is one default group per process
    _inherited = dist.is_available() and dist.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


def group_exists() -> bool:
    """Return whether this process has a usable default process group."""
    return dist.is_available() and dist.is_initialized() and not _inherited


def start_group(backend: str, world: World, device: torch.device, **kwargs: Any) -> None:
    """Start the default process group; every rank must call this.

    Args:
        backend: The name of the backend: gloo, nccl, xccl, ...
        world: The rank and world size. If a single launch has started all ranks on one machine, they find each other in
            the launch's private folder. Otherwise, they find each other at MASTER_ADDR and MASTER_PORT.
        device: The rank's device. If it is an accelerator, the group is bound to it.
        kwargs: Further arguments for `torch.distributed.init_process_group`.
    """
    timeout = kwargs.get("timeout") or DEFAULT_TIMEOUT
    if device.type == "cuda":
        kwargs.setdefault("device_id", device)
        _avoid_peer_to_peer()
    number = next(_numbers)
    folder = environ.text(environ.STORE) if telemetry.current_sink() is not None else None
    if folder and not {"store", "init_method"} & set(kwargs):
        kwargs["store"] = _file_store(folder, number, world, timeout)
    dist.init_process_group(backend=backend, rank=world.rank, world_size=world.size, **kwargs)
    if _is_launched() and backend != "mpi":  # mpi does not use a store.
        _wait_for_all(number, world)
    if telemetry.current_sink() is not None:
        _let_kernel_time_out()


def _avoid_peer_to_peer() -> None:
    """Keep NCCL from hanging on GPUs whose driver wrongly reports peer-to-peer access."""
    missing = nvml.without_peer_to_peer(os.environ)
    if missing and not nvml.check_cuda_p2p_ib_support():
        os.environ.update(missing)
        warn_once(
            f"These GPUs cannot access each other's memory, but the driver {nvml.driver_version()} reports "
            f"that they can, so {' and '.join(f'{name}={value}' for name, value in missing.items())} was set for NCCL. "
            "Drivers from version 550.40.07 on do not need this setting."
        )


_numbers = itertools.count()
"""The numbers of groups, each of which needs its own keys or store. All ranks create groups in the same order."""


def _is_launched() -> bool:
    """Return whether a single launch has started all ranks, without torchrun and without other notebooks."""
    return telemetry.current_sink() is not None and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


def _file_store(folder: str, number: int, world: World, timeout: timedelta) -> Any:
    """Return a store in the private folder of the run.

    torch's own store would listen on MASTER_PORT on all interfaces, regardless of MASTER_ADDR, and serve any client.
    Another user of the machine could then join the group, and send pickled objects to its ranks.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.FileStore(str(Path(folder, f"{attempt}-{number}")), world.size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    return store


def _wait_for_all(number: int, world: World) -> None:
    """Wait until every rank has connected to the group.

    With gloo, the group is created as soon as the rank's own connections exist. If the rank's function ended at this
    point, ranks that are still connecting could no longer connect to this rank. Rank 0, which may serve the store, also
    waits until no other rank needs the store.
    """
    from notebook_accelerate.torch_internals import default_store

    store = default_store()
    for phase in ("connected", "acknowledged"):
        key = f"notebook_accelerate/{number}/{phase}"
        if store.add(key, 1) == world.size:
            store.set(f"{key}/all", "1")
        if phase == "connected" or world.rank == 0:
            _wait_for_key(store, f"{key}/all")


def _wait_for_key(store: Any, key: str) -> None:
    """Wait until a key is set. Check often at first, because `wait` of a FileStore sleeps for 10 ms at a time."""
    for delay in _FIRST_DELAYS:
        if store.check([key]):
            return
        time.sleep(delay)
    store.wait([key])


_FIRST_DELAYS = tuple(0.0005 * 1.5**n for n in range(10))
"""Seconds between the first checks, about 60 ms in total."""


def start_group_of_one(backend: str, device: torch.device) -> None:
    """Start a default process group with a single rank, for libraries that require a group.

    Args:
        backend: The name of the backend: gloo, nccl, xccl, ...
        device: The rank's device. If it is an accelerator, the group is bound to it.
    """
    global _group_of_one  # noqa: PLW0603 - there is one default group per process
    # Import this before the group exists. Otherwise, the imported functions would have the group as a default argument,
    # and keep it open.
    from notebook_accelerate.torch_internals import HashStore

    store = HashStore()
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend=backend, store=store, rank=0, world_size=1, device_id=bound)
    _group_of_one = weakref.ref(dist.group.WORLD)


_group_of_one: Any = None


def end_group_of_one() -> None:
    """Destroy the default group, if `start_group_of_one` has started it."""
    if _group_of_one is not None and group_exists() and dist.group.WORLD is _group_of_one():
        end_group()


DEFAULT_TIMEOUT = timedelta(minutes=30)


def _let_kernel_time_out() -> None:
    """Let the kernel enforce the time limit for collectives, because the kernel can pause the limit at a breakpoint.

    torch cannot extend the limit of an operation that is already waiting, so torch's own limit is raised before the
    first operation. The rendezvous has already used the requested limit.
    """
    if (requested := collective_timeouts.lengthen(dist.group.WORLD)) is not None:
        telemetry.emit(telemetry.GroupTimeoutEvent(requested))


def end_group(group: Any = None) -> None:
    """Destroy a process group if this process has one; every rank must call this.

    Args:
        group: The group to destroy. If None, the default group is destroyed.
    """
    if not group_exists():
        return
    wait_for_idle()
    has_callbacks = group is None and bool(_end_callbacks)
    while group is None and _end_callbacks:
        _end_callbacks.pop()()
    dist.destroy_process_group(group)
    if has_callbacks:
        gc.collect()  # Otherwise, groups in cycles would keep their sockets open.


_end_callbacks: list[Callable[[], None]] = []


def call_before_group_ends(release: Callable[[], None]) -> None:
    """Register a function that makes a library release the default group.

    The function is called once, before the group is destroyed.

    Args:
        release: The function to call, without arguments.
    """
    _end_callbacks.append(release)


def keep_group_for(group: Any, *owners: Any) -> None:
    """Keep torch's Python object of a process group alive while C++ objects own the group.

    The Python object releases the GIL before it destroys the group, but an owner in C++ does not. gloo's destructor
    joins a thread that, right after a collective, may still need the GIL to free the collective's tensors. If the last
    owner is DDP's reducer, which is freed after `destroy_process_group`, the two threads wait for each other forever
    (torch 2.13 and earlier).

    Args:
        group: The process group to keep.
        owners: The objects that own the group and may outlive all other references to it.
    """
    for owner in owners:
        weakref.finalize(owner, _drop_reference, group).atexit = False


def _drop_reference(group: Any) -> None:
    """Do nothing. The reference in the argument is dropped when the function returns."""


def forget_group() -> None:
    """Destroy this process's own default group, or drop an inherited one.

    Destroying an inherited group would wait for threads that the fork has not copied, and shut down sockets that the
    parent still uses.
    """
    global _inherited  # noqa: PLW0603 - there is one default group per process
    if _inherited and dist.is_initialized():
        _keep_alive.extend(drop_process_groups())
    _inherited = False
    end_group()


_keep_alive: list[Any] = []


def _torch_barrier(device: torch.device) -> None:
    if device.type == "cuda":
        dist.barrier(device_ids=[device.index or 0])
    else:
        dist.barrier()


def _xla_barrier(_: torch.device) -> None:
    import torch_xla.core.xla_model as xm

    xm.rendezvous("notebook_accelerate.wait_for_everyone")


def _no_barrier(device: torch.device) -> None:
    """Return immediately, because there is only one rank."""


BARRIERS: dict[str, Callable[[torch.device], None]] = {
    "none": _no_barrier,
    "torch": _torch_barrier,
    "xla": _xla_barrier,
}
"""The barrier of each communicator."""


# ---- gloo's threads, which must be idle before the interpreter exits, and before their process group is destroyed

_NAME = "pt_gloo_runloop"
"""The name of gloo's threads in torch 2.13 and later. In torch 2.9, the threads have no name."""
_TASKS = Path("/proc/self/task")
_CHECK_PERIOD = 0.001
"""Seconds between two checks of the threads, during which a thread can acquire the GIL."""
_IDLE_CHECKS = 2
"""The number of consecutive checks that must find all threads asleep."""
LIMIT = 5.0
"""The maximum number of seconds to wait for busy threads."""
_GRACE = 0.02
"""Seconds to wait if no thread has this name: on other systems, with older versions of torch, or without gloo."""


@functools.cache  # The cache ensures that the function is registered only once per process.
def wait_for_idle_at_exit() -> None:
    """Make this process wait until gloo's threads are idle before it exits."""
    atexit.register(wait_for_idle)


def wait_for_idle(limit: float = LIMIT) -> None:
    """Wait until gloo's threads are idle. If they already are, this takes one or two milliseconds.

    A thread that has run a collective frees the collective's tensors after `wait` has returned, and needs the GIL to do
    so. If the interpreter is exiting, Python terminates the thread, which kills the process ("terminate called without
    an active exception"). If the group's destructor holds the GIL and joins the thread, the two wait for each other
    forever. See https://github.com/pytorch/pytorch/issues/190489 (torch 2.13 and earlier).

    Args:
        limit: The maximum number of seconds to wait.
    """
    end = time.monotonic() + limit
    threads = _threads()
    asleep = 0
    while threads and asleep < _IDLE_CHECKS and time.monotonic() < end:
        time.sleep(_CHECK_PERIOD)  # Sleeping releases the GIL, so threads waiting for it can run.
        asleep = asleep + 1 if all(_is_asleep(thread) for thread in threads) else 0
    if not threads:
        time.sleep(_GRACE)


def _threads() -> list[Path]:
    tasks = _TASKS.iterdir() if _TASKS.exists() else ()
    return [task for task in tasks if _read(task / "comm").strip() == _NAME]


def _is_asleep(thread: Path) -> bool:
    return read_stat(thread)[:1] in ([], ["S"])  # The list is empty if the thread has exited.


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # A thread's name can contain any bytes.
    except OSError:
        return ""


# ---- rank and world size, from the variables of torchrun, MPI or this package's launchers


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank and world size of a process."""

    rank: int = 0
    """The index of this process among the processes on all machines, counted from 0."""
    size: int = 1
    """The number of processes in the run."""
    local_rank: int = 0
    """The index of this process among those on its machine."""
    local_size: int = 1
    """The number of processes of the run on this machine."""


def world_from_environ() -> World:
    """Read the rank and world size from the environment.

    Returns:
        The rank and world size. If no variable is set, these are 0 and 1.

    Raises:
        ValueError: A variable is not a number, or the rank is not below the world size.
    """
    size = _first("world_size", 1)
    rank = _first("rank", 0)
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} is outside WORLD_SIZE={size}; ranks count from 0: RANK must be below WORLD_SIZE")
    if size == 1:
        return World(local_rank=_first("local_rank", 0))
    return World(
        rank=rank, size=size, local_rank=_first("local_rank", rank), local_size=_first("local_world_size", size)
    )


def _first(value_name: str, default: int) -> int:
    return environ.get_int_from_env(RANK_VARIABLES[value_name], default)


# torchrun's variables come first, followed by those of Intel MPI and MPICH, Open MPI, and MVAPICH2.
RANK_VARIABLES = {
    "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "local_rank": ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "local_world_size": (
        "LOCAL_WORLD_SIZE",
        "MPI_LOCALNRANKS",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
}


# ---- the cores near a GPU


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its GPU.

    Args:
        local_process_index: The index of this rank on its machine.
        verbose: Whether to print the cores. If None, they are printed only if ACCELERATE_DEBUG_MODE is set.
    """
    cores = _near_cores(local_process_index)
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    os.sched_setaffinity(0, cores)
    if environ.flag("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        sys.stdout.write(f"process {local_process_index} runs on cores {sorted(cores)}\n")


def _near_cores(local_process_index: int) -> set[int]:
    """Return the allowed cores near a GPU, as listed by Linux for its PCI slot, or an empty set without such a list."""
    if not device_counts.count("cuda"):
        return set()
    gpu = nvml.visible_gpu(local_process_index)
    if gpu is None:
        return set()
    # NVML writes the PCI domain with eight digits, but Linux with four.
    file = Path("/sys/bus/pci/devices") / gpu.pci_bus_id[-12:] / "local_cpulist"
    if not file.is_file():
        return set()
    return parse_cpu_list(file.read_text(encoding="ascii")) & os.sched_getaffinity(0)


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list of cores such as ``0-3,8,10-11``.

    Args:
        text: The list, in the format that Linux uses.
    """
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
