"""Detects this machine's accelerators, cores, memory and notebook host."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from notebook_accelerate.errors import ipython_shell
from notebook_accelerate.hardware import device_counts, tpu_environment
from notebook_accelerate.hardware.device_table import ROWS


@dataclass(frozen=True, kw_only=True)
class HardwareInfo:
    """Properties of this machine that a launch needs."""

    accelerator: str
    """Type of device that training uses here: cpu, cuda, mps, xpu, npu, mlu, musa, sdaa, hpu, neuron, tpu or xla."""
    count: int
    """Number of these devices that this process may use; 0 for cpu."""
    cpu_count: int
    """Cores this process may use (affinity and container limits applied)."""
    memory_bytes: int
    """Main memory in bytes (container limit applied)."""
    host: str
    """Where the user types code: terminal, jupyter, colab, kaggle or vscode."""
    loopback: str | None
    """Name of the loopback network interface; None if it is unknown."""
    tpu: str = ""
    """Generation of the TPU, as "v5e"; "" without torch_tpu or if it is not known."""


def detect(environment: Mapping[str, str] | None = None) -> HardwareInfo:
    """Detect this machine's properties; creates no context on a device and does not import torch.

    Args:
        environment: Environment of the processes that will use the devices. Defaults to this process's.
    """
    accelerator, number = _accelerators(environment)
    return HardwareInfo(
        accelerator=accelerator,
        count=number,
        cpu_count=cpu_count(),
        memory_bytes=memory_bytes(),
        host=host(),
        loopback=_loopback(),
        tpu=tpu_environment.generation(os.environ, tpu_environment.pci_generations()) if accelerator == "tpu" else "",
    )


def _accelerators(environment: Mapping[str, str] | None) -> tuple[str, int]:
    """Return the preferred type of the devices here, and their number."""
    for row in ROWS:
        if row.is_accelerator and (number := device_counts.count(row.type, environment)):
            return row.type, number
    return "cpu", 0


def cpu_count() -> int:
    """Return how many cores this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _container_cores() or allowed))


def _container_cores() -> int | None:
    """Return the control group's CPU time quota in cores, rounded up; None without one."""
    for file in _control_group_files("cpu.max"):
        quota, _, period = file.read_text(encoding="ascii").strip().partition(" ")
        if quota != "max":
            return -(-int(quota) // int(period or 100_000))
    return None


def memory_bytes() -> int:
    """Return the main memory this process may use, in bytes."""
    total, _ = system_memory()
    for file in _control_group_files("memory.max"):
        limit = file.read_text(encoding="ascii").strip()
        if limit != "max":
            return min(total, int(limit))
    return total


def system_memory() -> tuple[int, int]:
    """Return the total and the available main memory of this machine in bytes, without a container's limit."""
    import psutil

    try:
        memory = psutil.virtual_memory()
    except OSError:  # there is no /proc
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return int(memory.total), int(memory.available)


def _control_group_files(name: str) -> Iterable[Path]:
    """Return the limit files of this process's control group and its parents (cgroup v2), nearest first."""
    own = Path("/proc/self/cgroup")
    if not own.exists():
        return []
    lines = [line[3:] for line in os.fsdecode(own.read_bytes()).splitlines() if line.startswith("0::")]
    group = Path("/sys/fs/cgroup") / lines[0].lstrip("/") if lines else Path("/sys/fs/cgroup")
    folders = [group, *group.parents]
    return [folder / name for folder in folders if (folder / name).is_file()]


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
