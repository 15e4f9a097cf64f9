"""Describe NVIDIA GPUs through NVML (the package nvidia-ml-py), which does not create a CUDA context."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import parse


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A physical GPU, or a MIG slice of one."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    """Total memory, or 0 if the GPU shares the CPU's memory and NVML does not report a size."""
    capability: tuple[int, int]
    pci_bus_id: str


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Use of one physical GPU by all its processes.

    Attributes:
        uuid: The UUID of the GPU, as `bare_uuid` returns it.
        percent: Share of the last sample period during which a kernel ran, or None if NVML does not report it (MIG).
        used_bytes: Memory in use.
        total_bytes: Total memory, or 0 if NVML does not report a size.
    """

    uuid: str
    percent: float | None
    used_bytes: int
    total_bytes: int


def bare_uuid(uuid: object) -> str:
    """Return an identity without NVML's prefix ("GPU-" or "MIG-"), which torch's device properties lack.

    Args:
        uuid: The identity: a string from NVML, or torch's object.
    """
    return str(uuid).lower().removeprefix("gpu-").removeprefix("mig-")


class GpuReader:
    """Reads the use of all GPUs through NVML, which stays initialised until `close`. Without a driver, it finds none.

    Memory per process is not read, because NVML identifies processes by the host's pids, which are meaningless in a
    container. https://github.com/NVIDIA/nvidia-docker/issues/1483
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(_session())
        indices = range(_query("nvmlDeviceGetCount", default=0))
        handles = [_query("nvmlDeviceGetHandleByIndex", index) for index in indices]
        named = [(bare_uuid(_query("nvmlDeviceGetUUID", handle, default="")), handle) for handle in handles if handle]
        self._handles = [(uuid, handle) for uuid, handle in named if uuid]

    def read(self) -> list[GpuUse]:
        """Return the use of each GPU."""
        return [_use(uuid, handle) for uuid, handle in self._handles]

    def close(self) -> None:
        """Shut down NVML."""
        self._handles = []
        self._stack.close()


def _use(uuid: str, handle: Any) -> GpuUse:
    rates, memory = _query("nvmlDeviceGetUtilizationRates", handle), _query("nvmlDeviceGetMemoryInfo", handle)
    return GpuUse(
        uuid=uuid,
        percent=None if rates is None else float(rates.gpu),
        used_bytes=0 if memory is None else int(memory.used),
        total_bytes=0 if memory is None else int(memory.total),
    )


LOCK_SECONDS = 2.0
"""Seconds for which a fork or another call waits for a running NVML call. A longer call may never return."""


class _Calls:
    """Prevents forks during NVML calls, because the child would inherit NVML's locks in a locked state.

    Attributes:
        usable: Whether this process can call NVML. False in a child that was forked while a call hung.
    """

    def __init__(self) -> None:
        self.usable = True
        self._lock = threading.RLock()
        self._forking = threading.local()

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Hold the lock during a call. Yield False if NVML cannot be called."""
        if not self.usable or not self._lock.acquire(timeout=LOCK_SECONDS):
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()

    def before_fork(self) -> None:
        """Wait up to `LOCK_SECONDS` for the running call to end, if there is one."""
        self._forking.owns = self._lock.acquire(timeout=LOCK_SECONDS)

    def after_fork(self) -> None:
        """Let other threads call NVML again. The thread that forked owns the lock in both the parent and the child."""
        if self._forking.owns:
            self._lock.release()

    def in_child(self) -> None:
        """Release the lock in the child, or mark NVML as unusable if the fork did not wait for a running call."""
        self.usable = self.usable and self._forking.owns
        if not self._forking.owns:  # The thread that holds the old lock does not exist in the child.
            self._lock = threading.RLock()
        self.after_fork()


_calls = _Calls()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_calls.before_fork, after_in_parent=_calls.after_fork, after_in_child=_calls.in_child)


@contextmanager
def _session() -> Iterator[None]:
    """Initialise NVML for a with block. Without a driver, every `_query` in the block returns its default."""
    # Import it only here, because the import takes 40 ms, which machines without a GPU should not spend.
    pynvml: Any = importlib.import_module("pynvml")
    with ExitStack() as stack:
        with _calls.one() as can_call, suppress(pynvml.NVMLError):
            if can_call:
                pynvml.nvmlInit()
                stack.callback(_query, "nvmlShutdown")
        yield


def _query(name: str, *args: Any, default: Any = None) -> Any:
    """Call a function of pynvml. Return `default` if NVML cannot answer."""
    pynvml: Any = importlib.import_module("pynvml")
    with _calls.one() as can_call, suppress(pynvml.NVMLError):
        return getattr(pynvml, name)(*args) if can_call else default
    return default


def count() -> int | None:
    """Return the number of physical GPUs, or None without a driver."""
    with _session():
        number: int | None = _query("nvmlDeviceGetCount")
        return number


def driver_version() -> str | None:
    """Return the driver's version, or None without a driver."""
    with _session():
        version: str | None = _query("nvmlSystemGetDriverVersion")
        return version


def gpus() -> list[Gpu]:
    """Return all physical GPUs in PCI bus order, or an empty list without a driver."""
    with _session():
        handles = [
            _query("nvmlDeviceGetHandleByIndex", index) for index in range(_query("nvmlDeviceGetCount", default=0))
        ]
        return [_describe(index, handle) for index, handle in enumerate(handles) if handle is not None]


def visible_gpu(local_index: int, environment: Mapping[str, str] | None = None) -> Gpu | None:
    """Return the physical GPU or MIG slice that is ``cuda:local_index``, or None if it is unknown.

    Args:
        local_index: Index among the GPUs of CUDA_VISIBLE_DEVICES.
        environment: Environment variables of the process that uses the GPU. Defaults to ``os.environ``.
    """
    environment = os.environ if environment is None else environment
    physical = gpus()
    entries = [str(gpu.index) for gpu in physical]
    if (variable := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        entries = [entry.strip() for entry in variable.split(",")]
    if local_index >= len(entries) or not (entry := entries[local_index]):
        return None
    if entry.startswith("MIG-"):
        return _mig_slice(entry)
    if not entry.isdigit():
        return next((gpu for gpu in physical if gpu.uuid.startswith(entry)), None)
    # CUDA numbers the fastest GPU first, but NVML follows the PCI bus. The orders agree if all GPUs are the same model.
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in physical}) > 1:
        return None
    found = next((gpu for gpu in physical if gpu.index == int(entry)), None)
    return found and (_mig_slice(uuid) if (uuid := _first_slice(found.index)) else found)


def identities(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the GPUs and MIG slices that a process can use: the UUID of each, and its entry in CUDA_VISIBLE_DEVICES.

    Args:
        count: The number of GPUs that the process can use.
        environment: The process's environment variables.
    """
    with _session():
        found = [visible_gpu(index, environment) for index in range(count)]
    listed = (environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    entries = [entry.strip() for entry in listed]
    return {gpu.uuid if gpu else entry: entry for gpu, entry in zip(found, entries, strict=False)}


def _first_slice(index: int) -> str:
    """Return the UUID of a GPU's first MIG slice, the only one that CUDA uses, or "" if the GPU is not divided."""
    with _session():
        whole = _query("nvmlDeviceGetHandleByIndex", index)
        current, _ = _query("nvmlDeviceGetMigMode", whole, default=(0, 0))
        part = _query("nvmlDeviceGetMigDeviceHandleByIndex", whole, 0) if current else None
        return "" if part is None else str(_query("nvmlDeviceGetUUID", part, default=""))


def _mig_slice(uuid: str) -> Gpu | None:
    """Return a MIG slice, with its own memory and UUID, and with the other properties of its GPU."""
    with _session():
        part = _query("nvmlDeviceGetHandleByUUID", uuid)
        whole = None if part is None else _query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part)
        if whole is None:
            return None
        found = _describe(_query("nvmlDeviceGetIndex", whole, default=0), whole)
        memory = _query("nvmlDeviceGetMemoryInfo", part)
        return replace(found, uuid=uuid, memory_bytes=0 if memory is None else int(memory.total))


def _describe(index: int, handle: Any) -> Gpu:
    memory, pci = _query("nvmlDeviceGetMemoryInfo", handle), _query("nvmlDeviceGetPciInfo", handle)
    return Gpu(
        index=index,
        name=_query("nvmlDeviceGetName", handle, default=""),
        uuid=_query("nvmlDeviceGetUUID", handle, default=""),
        memory_bytes=0 if memory is None else int(memory.total),
        capability=_query("nvmlDeviceGetCudaComputeCapability", handle, default=(0, 0)),
        pci_bus_id="" if pci is None else pci.busId.lower(),
    )


# ---- peer-to-peer access

# GeForce 40 cards have no peer-to-peer access. Drivers before this version report that they have it, and hang. Source:
# NVIDIA driver 550.40.07, release highlights.
_PEER_TO_PEER_DRIVER = "550.40.07"


def without_peer_to_peer(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that stop NCCL from using peer-to-peer access and InfiniBand, without those already set.

    Args:
        environment: The variables that are already set.
    """
    return {name: "1" for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in environment}


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs support peer-to-peer access and InfiniBand.

    Returns:
        False for several GeForce RTX 40 cards with a driver before 550.40.07. Otherwise True, even without GPUs.
    """
    names = [gpu.name for gpu in gpus()]
    if len(names) < 2 or not any("RTX 40" in name for name in names):
        return True
    version = driver_version()
    return version is not None and parse(version) >= parse(_PEER_TO_PEER_DRIVER)
