"""Describe this machine's TPUs for torch_tpu: their generation, and how processes share them.

Source: torch_tpu 0.2.0, ``_internal/utils/hardware.py`` and ``_internal/distributed/distributed.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_BUS, _EXPOSED = Path("/sys/bus/pci/devices"), Path("/dev/vfio")
_GENERATIONS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7"}
"""The generations by the devices' PCI id."""
_ALIASES = {"v5litepod": "v5e", "v7x": "v7"}
_FOUR_CHIPS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}
_EIGHT_CHIPS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
_TOPOLOGIES = {
    "v4": _FOUR_CHIPS,
    "v5p": _FOUR_CHIPS,
    "v5e": _EIGHT_CHIPS,
    "v6e": _EIGHT_CHIPS,
    "v7": {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"},
}
"""The mesh of the devices by generation and number of processes, with one device per process."""


def pci_generations() -> list[str]:
    """Return the generation of each TPU device that is on the PCI bus and exposed to this process by VFIO."""
    found = []
    for folder in _BUS.glob("*"):
        group = folder / "iommu_group"
        if _read(folder / "vendor") == "0x1ae0" and (name := _GENERATIONS.get(_read(folder / "device"))):
            found += [name] if group.is_symlink() and (_EXPOSED / group.readlink().name).exists() else []
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def generation(environment: Mapping[str, str], on_bus: Iterable[str] = ()) -> str:
    """Return the generation of this machine's TPU, such as "v5e", or "" if it is unknown.

    Args:
        environment: The environment variables of the processes. Colab and Kaggle set TPU_ACCELERATOR_TYPE.
        on_bus: The result of `pci_generations`, which takes precedence over the variables.
    """
    name, _ = accelerator_type(environment)
    name = next(iter(on_bus), name)
    return _ALIASES.get(name, name)


def process_counts(name: str, devices: int) -> list[int]:
    """Return the numbers of processes that torch_tpu can start on a machine, in ascending order.

    Args:
        name: The TPU's generation.
        devices: Number of its devices on this machine.
    """
    return [count for count in _TOPOLOGIES.get(name, {}) if count <= devices]


def topology(name: str, processes: int) -> str:
    """Return the mesh of the processes' devices in the format of TORCH_TPU_TOPOLOGY, such as "2,4,1".

    Args:
        name: The TPU's generation.
        processes: One of `process_counts`.
    """
    return _TOPOLOGIES[name][processes]


# The rest of this module reads the environment variables that set how torch_xla's runtime divides a machine's devices
# among processes.


@dataclass(frozen=True)
class XlaLayout:
    """The processes and devices of torch_xla's runtime.

    Attributes:
        processes: Number of processes that use all devices together: one per chip, or one on the CPU.
        devices: Number of devices of each process.
    """

    processes: int
    devices: int = 1

    @property
    def ranks(self) -> int:
        """The default number of ranks: one per process if each has one device, otherwise one for all devices."""
        return self.processes if self.devices == 1 else 1


def layout(environment: Mapping[str, str], chips: int) -> XlaLayout:
    """Return the runtime's processes and devices.

    Args:
        environment: The environment variables of the processes.
        chips: Number of devices of this machine.
    """
    if environment.get("PJRT_DEVICE", "").upper() == "CPU":
        return XlaLayout(1, max(1, chips))
    generation, _ = accelerator_type(environment)
    # Chips of the second and third generation have two cores, which must be used by a single process.
    return XlaLayout(max(1, chips), 2 if generation in {"v2", "v3"} else 1)


def chips_of_host(environment: Mapping[str, str]) -> int:
    """Return the number of chips in the TPU type that Colab (such as "v5e-1") or Kaggle (such as "v5e-8") sets.

    Bounds are not used, because Colab's machine with one chip sets TPU_CHIPS_PER_HOST_BOUNDS=2,2,1.

    Args:
        environment: The environment variables of the processes.

    Returns:
        The number of chips, or 0 without a TPU.
    """
    generation, number = accelerator_type(environment)
    if generation in {"v5e", "v5litepod", "v6e"}:
        return min(number, 8)
    # The types of other generations count cores, two per chip, and a machine has at most four chips.
    return min(-(-number // 2), 4)


def accelerator_type(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the generation and the size in the variable TPU_ACCELERATOR_TYPE, or ("", 0) without it."""
    found = re.fullmatch(r"(v\d+\w*)-(\d+)", environment.get("TPU_ACCELERATOR_TYPE", "").strip())
    return (found[1], int(found[2])) if found else ("", 0)
