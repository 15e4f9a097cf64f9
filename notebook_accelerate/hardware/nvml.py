"""Describes NVIDIA GPUs through NVML (the package nvidia-ml-py), which creates no CUDA context."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One physical GPU."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    """Total memory; 0 where the GPU shares the main memory and NVML reports no size."""
    capability: tuple[int, int]
    pci_bus_id: str


@contextmanager
def _session() -> Iterator[None]:
    """Initialise NVML; without a driver, every `_query` inside returns its default."""
    pynvml: Any = importlib.import_module("pynvml")  # 40 ms, which machines without a GPU need not spend
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield
        return
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _query(name: str, *args: Any, default: Any = None) -> Any:
    """Call a function of pynvml; return `default` where NVML cannot answer."""
    pynvml: Any = importlib.import_module("pynvml")
    try:
        return getattr(pynvml, name)(*args)
    except pynvml.NVMLError:
        return default


def count() -> int | None:
    """Return the number of physical GPUs; None without a driver."""
    with _session():
        number: int | None = _query("nvmlDeviceGetCount")
        return number


def driver_version() -> str | None:
    """Return the driver's version; None without a driver."""
    with _session():
        version: str | None = _query("nvmlSystemGetDriverVersion")
        return version


def gpus() -> list[Gpu]:
    """Return all physical GPUs in PCI bus order; empty without a driver."""
    with _session():
        handles = [
            _query("nvmlDeviceGetHandleByIndex", index) for index in range(_query("nvmlDeviceGetCount", default=0))
        ]
        return [_describe(index, handle) for index, handle in enumerate(handles) if handle is not None]


def visible_gpu(local_index: int) -> Gpu | None:
    """Return the physical GPU of ``cuda:local_index``; None if it is unknown.

    Args:
        local_index: Index among the GPUs of CUDA_VISIBLE_DEVICES.
    """
    physical = gpus()
    entries = os.environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return physical[local_index] if local_index < len(physical) else None
    chosen = [entry.strip() for entry in entries.split(",")]
    if local_index >= len(chosen):
        return None
    entry = chosen[local_index]
    return next((gpu for gpu in physical if entry and (entry == str(gpu.index) or gpu.uuid.startswith(entry))), None)


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
