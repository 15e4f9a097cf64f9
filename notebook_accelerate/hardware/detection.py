"""Detect this machine's accelerators, cores, memory and notebook host."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from notebook_accelerate.errors import ipython_shell
from notebook_accelerate.hardware import device_counts, tpu_environment
from notebook_accelerate.hardware.device_table import ROWS


@dataclass(frozen=True, kw_only=True)
class HardwareInfo:
    """Properties of this machine that a launch needs."""

    accelerator: str
    """The device type that training uses here: cpu, cuda, mps, xpu, npu, mlu, musa, sdaa, hpu, neuron, tpu or xla."""
    count: int
    """Number of these devices that this process may use, or 0 for cpu."""
    cpu_count: int
    """Number of cores that this process may use, with affinity and container limits applied."""
    memory_bytes: int
    """CPU memory in bytes, with the container limit applied."""
    host: str
    """Where the user types code: terminal, jupyter, colab, kaggle or vscode."""
    loopback: str | None
    """Name of the loopback network interface, or None if it is unknown."""
    visible: Mapping[str, str] = field(default_factory=dict)
    """These devices: the identity of each, such as the UUID of a GPU, and its entry in CUDA_VISIBLE_DEVICES."""
    cores: tuple[int, ...] = ()
    """The numbers of the cores that this process may use."""
    tpu: str = ""
    """Generation of the TPU, such as "v5e", or "" if it is unknown or torch_tpu is missing."""


def detect(environment: Mapping[str, str] | None = None) -> HardwareInfo:
    """Detect this machine's properties, without creating a context on a device or importing torch.

    Args:
        environment: Environment of the processes that will use the devices. Defaults to this process's.
    """
    accelerator, number = _accelerators(environment)
    return HardwareInfo(
        accelerator=accelerator,
        count=number,
        cpu_count=cpu_count(),
        memory_bytes=machine_memory()[0],
        host=host(),
        loopback=_loopback(),
        visible=device_counts.identities(accelerator, number, environment) if number else {},
        cores=cores(),
        tpu=tpu_environment.generation(os.environ, tpu_environment.pci_generations()) if accelerator == "tpu" else "",
    )


def _accelerators(environment: Mapping[str, str] | None) -> tuple[str, int]:
    """Return the preferred device type of this machine, and the number of its devices."""
    for row in ROWS:
        if row.is_accelerator and (number := device_counts.count(row.type, environment)):
            return row.type, number
    return "cpu", 0


def cpu_count() -> int:
    """Return how many cores this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _container_cores() or allowed))


def cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use, as many as its container's limit allows."""
    known = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(known)[: cpu_count()]


def _container_cores() -> int | None:
    """Return the control group's CPU time quota in cores, rounded up, or None if there is no quota."""
    for file in control_group_files("cpu.max"):
        quota, _, period = file.read_text(encoding="ascii").strip().partition(" ")
        if quota != "max":
            return -(-int(quota) // int(period or 100_000))
    return None


def machine_memory() -> tuple[int, int]:
    """Return the total and the available CPU memory in bytes, within the limits of this process's control groups."""
    total, available = system_memory()
    for limit, used in _memory_limits():
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of each control group. Cached files, which the system can drop, are not counted."""
    for controller, limit_name, used_name, cache in _MEMORY_FILES:
        for file in control_group_files(limit_name, controller):
            with suppress(OSError, ValueError):  # The limit may be "max", which is not a number.
                limit, used = int(file.read_text()), int(file.with_name(used_name).read_text())
                yield limit, used - _statistic(file.with_name("memory.stat"), cache)


_MEMORY_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _statistic(file: Path, name: str) -> int:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def system_memory() -> tuple[int, int]:
    """Return the total and the available CPU memory of this machine in bytes, without a container's limit."""
    import psutil

    try:
        memory = psutil.virtual_memory()
    except OSError:  # This system has no /proc.
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return int(memory.total), int(memory.available)


_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def control_group_files(name: str, controller: str = "") -> list[Path]:
    """Return the files with this name in this process's control group and its parents, nearest first.

    Args:
        name: The name, such as "memory.max".
        controller: A controller of version 1, such as "memory", or "" for the groups of version 2.
    """
    base = _GROUPS / controller
    group = base / _own_group(controller)
    folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(base)]
    return [file for folder in folders if (file := folder / name).is_file()]


def _own_group(controller: str) -> str:
    """Return the path of this process's group below the root group, or "" if it is the root group or unknown."""
    with suppress(OSError):
        for line in os.fsdecode(_OWN_GROUPS.read_bytes()).splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path.lstrip("/")
    return ""


def host() -> str:
    """Return where the user types code: terminal, jupyter, colab, kaggle or vscode."""
    if any(name.startswith("COLAB_") for name in os.environ) or "google.colab" in sys.modules:
        return "colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "kaggle"
    if not in_kernel():
        return "terminal"
    return "vscode" if _in_vscode() else "jupyter"


def in_kernel() -> bool:
    """Return whether this process is a notebook's kernel."""
    return getattr(ipython_shell(), "kernel", None) is not None


def _in_vscode() -> bool:
    return "__vsc_ipynb_file__" in getattr(ipython_shell(), "user_ns", {}) or "VSCODE_PID" in os.environ


def _loopback() -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.startswith("127.") for address in addresses):
            return str(name)
    return None
