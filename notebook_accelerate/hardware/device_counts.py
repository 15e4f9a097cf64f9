"""Count the devices of each type that this process can use, without creating a context.

Ranks are forked from a notebook's kernel, and a driver that was initialised in the kernel does not work in its
children. All counts therefore come from device files, management libraries, environment variables or a child process.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from notebook_accelerate.hardware import device_table, nvml, tpu_environment, versions

_PROBE_SECONDS = 60


# These variables change a count, in addition to those in the rows of `device_table`.
_OTHER_VARIABLES = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "TPU_ACCELERATOR_TYPE")


def count(device_type: str, environment: Mapping[str, str] | None = None) -> int:
    """Return how many devices of a type a process can use, or 0 if their software is not installed.

    Args:
        device_type: The name of the type, as in ``torch.device(...).type``. A machine has one "cpu".
        environment: The environment variables of that process. Defaults to this process's environment.

    Returns:
        The number of devices, cached for each combination of the variables that restrict it.
    """
    if device_type == "cpu":
        return 1
    variables = os.environ if environment is None else environment
    names = [*(name for row in device_table.ROWS for name in row.visible_variables), *_OTHER_VARIABLES]
    return _cached_count(device_type, tuple((name, variables[name]) for name in names if name in variables))


def identities(device_type: str, number: int, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the devices that a process can use: the identity of each, and its entry in the variable that selects it.

    Args:
        device_type: The name of the type, other than "cpu".
        number: The number of devices, from `count`.
        environment: The environment variables of that process. Defaults to this process's environment.
    """
    variables = os.environ if environment is None else environment
    if device_type == "cuda" and not versions.torch_build().hip:
        return nvml.identities(number, variables)
    listed = next(
        (variables[name] for name in device_table.row(device_type).visible_variables if name in variables), ""
    )
    entries = [entry.strip() for entry in listed.split(",") if entry.strip()]
    if len(entries) != number:  # The variable is not set, or contains something else, such as "0-3" or "all".
        entries = [str(index) for index in range(number)]
    return {entry: entry for entry in entries}


@lru_cache(maxsize=64)
def _cached_count(device_type: str, variables: tuple[tuple[str, str], ...]) -> int:
    return COUNTERS[device_type](dict(variables))


def _cuda(env: Mapping[str, str]) -> int:
    build = versions.torch_build()
    if build.hip:
        return _rocm(env)
    if not build.cuda or not _nvidia_driver():
        return 0
    physical = nvml.count()
    if physical is None:  # Jetson boards have a driver, but no management library on older releases.
        return _probe(_CUDA_PROBE, env)
    return _visible_cuda(env.get("CUDA_VISIBLE_DEVICES"), physical)


def _nvidia_driver() -> bool:
    files = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/nvhost-ctrl", "/dev/nvmap", "/dev/dxg")
    return platform.system() == "Windows" or any(Path(name).exists() for name in files)


def _visible_cuda(variable: str | None, physical: int) -> int:
    """Count the GPUs in CUDA_VISIBLE_DEVICES as the CUDA driver does: the list ends at the first invalid entry.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if variable is None:
        return physical
    entries = [entry.strip() for entry in variable.split(",")]
    if entries[0].startswith("MIG-"):
        return 1  # A process can use only one MIG slice.
    if entries[0].startswith("GPU-"):
        return _visible_uuids(entries)
    seen: list[int] = []
    for entry in entries:
        number = re.match(r"\d+", entry)
        if number is None or int(number[0]) >= physical:
            break
        if int(number[0]) in seen:
            return 0
        seen.append(int(number[0]))
    return len(seen)


def _visible_uuids(entries: list[str]) -> int:
    uuids = [gpu.uuid for gpu in nvml.gpus()]
    seen: set[str] = set()
    for entry in entries:
        matches = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in seen:
            break
        seen.add(matches[0])
    return len(seen)


def _rocm(env: Mapping[str, str]) -> int:
    """Count the nodes of AMD's kernel driver that are GPUs. Nodes with gpu_id 0 are CPUs."""
    ids = [_read_line(path) for path in _paths("/sys/class/kfd/kfd/topology/nodes/*/gpu_id")]
    physical = sum(identifier not in {"", "0"} for identifier in ids)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        physical = _count_listed(env.get(name), physical)
    return physical


def _xpu(env: Mapping[str, str]) -> int:
    if not versions.torch_build().xpu or not _pci_vendor("0x8086", "/sys/class/drm/renderD*/device/vendor"):
        return 0
    return _probe("import torch; print(torch.xpu.device_count())", env)


def _pci_vendor(vendor: str, pattern: str) -> bool:
    return any(_read_line(path) == vendor for path in _paths(pattern))


def _mps(_env: Mapping[str, str]) -> int:
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return 0
    return int(versions.torch_build().installed)


def _xla(env: Mapping[str, str]) -> int:
    if not _installed("torch_xla"):
        return 0
    runtime = env.get("PJRT_DEVICE", "").upper()
    if runtime == "CPU":
        return _number(env.get("CPU_NUM_DEVICES")) or 1
    if runtime and runtime != "TPU":
        return _probe("import torch_xla.runtime as r; print(r.addressable_device_count())", env)
    return _tpu_chips(env)


def _tpu(env: Mapping[str, str]) -> int:
    """Count TPUs as torch_tpu does or, if a container hides the bus, by the type that Colab and Kaggle set."""
    if not _installed("torch_tpu"):
        return 0
    return _visible_chips(len(tpu_environment.pci_generations()) or tpu_environment.chips_of_host(env), env)


def _tpu_chips(env: Mapping[str, str]) -> int:
    google = _paths("/sys/class/accel/accel*/device/vendor")
    chips = sum(_read_line(path) == "0x1ae0" for path in google)
    if not chips and Path("/dev/vfio/vfio").exists() and env.get("TPU_ACCELERATOR_TYPE"):
        chips = len(_paths("/dev/vfio/[0-9]*"))
    # If a container hides the devices, use the type that Colab and Kaggle set.
    return _visible_chips(chips or tpu_environment.chips_of_host(env), env)


def _visible_chips(chips: int, env: Mapping[str, str]) -> int:
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        chips = _count_listed(env.get(name), chips)
    return chips


def _neuron(env: Mapping[str, str]) -> int:
    devices = _paths("/dev/neuron[0-9]*")
    if not devices or not _installed("torch_neuronx"):
        return 0
    if number := _number(env.get("NEURON_RT_NUM_CORES")):
        return number
    sysfs = _paths("/sys/devices/virtual/neuron_device/neuron*/core_count")
    cores = sum(_number(_read_line(path)) for path in sysfs)
    return _count_listed(env.get("NEURON_RT_VISIBLE_CORES"), cores or 2 * len(devices))


def _device_files(device_type: str, env: Mapping[str, str], pattern: str = "") -> int:
    """Count a vendor's device files. If there are no files, count with the vendor's library in a child process."""
    row = device_table.row(device_type)
    if not _installed(row.extension.partition(".")[0]):
        return 0
    if pattern and (files := _paths(pattern)):
        return _count_listed(env.get(row.visible_variables[0]), len(files))
    return _probe(f"import torch, {row.extension}; print(torch.{row.type}.device_count())", env)


def _count_listed(value: str | None, physical: int) -> int:
    """Return how many of ``physical`` devices a list such as "0,2" or "0-3" selects. None and "all" select all."""
    if value is None or value.strip().lower() == "all":
        return physical
    seen: set[int] = set()
    for entry in value.split(","):
        first, _, last = entry.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            break
        seen.update(range(int(first), int(last or first) + 1))
    return sum(index < physical for index in seen)


def _number(value: str | None) -> int:
    return int(value) if value is not None and value.strip().isdigit() else 0


def _paths(pattern: str) -> list[Path]:
    return list(Path("/").glob(pattern.lstrip("/")))


def _read_line(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _probe(code: str, env: Mapping[str, str]) -> int:
    """Run ``code`` in a child process, which may initialise a driver, and return the number that it prints.

    The child has the variables of this process, except for those that restrict devices, which come from ``env``.
    """
    restricting = {name for row in device_table.ROWS for name in row.visible_variables}.union(_OTHER_VARIABLES)
    others = {name: value for name, value in os.environ.items() if name not in restricting}
    # Remove the working directory from the path, because a random.py there would shadow the standard library's.
    installed_only = "import sys; sys.path[:] = filter(None, sys.path); "
    try:
        done = subprocess.run(
            [sys.executable, "-c", installed_only + code],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
            env={**others, **env},
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return _number((done.stdout.strip().splitlines() or [""])[-1])


_CUDA_PROBE = (
    "import ctypes; d = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int(); "
    "print(0 if d.cuInit(0) or d.cuDeviceGetCount(ctypes.byref(n)) else n.value)"
)

COUNTERS: dict[str, Callable[[Mapping[str, str]], int]] = {
    "tpu": _tpu,
    "xla": _xla,
    "mlu": lambda env: _device_files("mlu", env, "/dev/cambricon_dev*"),
    "sdaa": lambda env: _device_files("sdaa", env),
    "musa": lambda env: _device_files("musa", env),
    "npu": lambda env: _device_files("npu", env, "/dev/davinci[0-9]*"),
    "hpu": lambda env: _device_files("hpu", env, "/dev/accel/accel[0-9]*"),
    "neuron": _neuron,
    "cuda": _cuda,
    "xpu": _xpu,
    "mps": _mps,
}
