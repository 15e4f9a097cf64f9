"""NVIDIA's management library, called through ctypes: it tells about GPUs without creating a CUDA context.

Names and struct layouts: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LIBRARIES = {"win32": ("nvml.dll",)}
_LINUX = ("libnvidia-ml.so.1", "libnvidia-ml.so")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One physical GPU."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int]
    pci_bus_id: str


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


@contextmanager
def _session() -> Iterator[Any]:
    """Yield the initialised library, or None where there is none or it does not answer."""
    library = _library()
    if library is None or library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _library() -> Any:
    for name in _LIBRARIES.get(sys.platform, _LINUX):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def count() -> int | None:
    """Return the number of physical GPUs; None where the library is missing or does not answer."""
    with _session() as library:
        if library is None:
            return None
        number = ctypes.c_uint()
        return None if library.nvmlDeviceGetCount_v2(ctypes.byref(number)) else number.value


def driver_version() -> str | None:
    """Return the driver's version; None where the library is missing or does not answer."""
    with _session() as library:
        version = ctypes.create_string_buffer(80)
        if library is None or library.nvmlSystemGetDriverVersion(version, 80):
            return None
        return version.value.decode()


def gpus() -> list[Gpu]:
    """Return all physical GPUs in PCI bus order; empty where the library is missing or does not answer."""
    with _session() as library:
        number = ctypes.c_uint()
        if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(number)):
            return []
        return [gpu for index in range(number.value) if (gpu := _describe(library, index)) is not None]


def _describe(library: Any, index: int) -> Gpu | None:
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    memory, pci = _Memory(), _Pci()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvmlDeviceGetName(handle, name, 96)
    library.nvmlDeviceGetUUID(handle, uuid, 96)
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(
        index=index,
        name=name.value.decode(),
        uuid=uuid.value.decode(),
        memory_bytes=int(memory.total),
        capability=(major.value, minor.value),
        pci_bus_id=pci.busId.decode().lower(),
    )


__all__ = ["Gpu", "count", "driver_version", "gpus"]
