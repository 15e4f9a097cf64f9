"""The TPUs of this machine as torch_tpu needs them described: their generation, and how its processes share them.

Source: torch_tpu 0.2.0, ``_internal/utils/hardware.py`` and ``_internal/distributed/distributed.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from notebook_accelerate.hardware.xla_environment import accelerator_type

_BUS, _EXPOSED = Path("/sys/bus/pci/devices"), Path("/dev/vfio")
_GENERATIONS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7"}
"""By the devices' PCI id."""
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
"""By generation: the mesh of the devices of so many processes, one device each."""


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
    """Return the generation of this machine's TPU, as "v5e"; "" if it is not known.

    Args:
        environment: Environment variables; Colab and Kaggle set TPU_ACCELERATOR_TYPE.
        on_bus: What `pci_generations` has returned, which comes first.
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
    """Return the mesh of the processes' devices as TORCH_TPU_TOPOLOGY has it, such as "2,4,1".

    Args:
        name: The TPU's generation.
        processes: One of `process_counts`.
    """
    return _TOPOLOGIES[name][processes]
