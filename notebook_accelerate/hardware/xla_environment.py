"""Reads from environment variables how torch_xla's runtime divides a machine's devices among processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class XlaLayout:
    """The processes and devices of torch_xla's runtime.

    Attributes:
        processes: Number of processes that use all devices: one per chip; one on the CPU.
        devices: Number of devices of each process.
    """

    processes: int
    devices: int = 1

    @property
    def ranks(self) -> int:
        """Default number of ranks: one per process if each has one device, otherwise one for all devices."""
        return self.processes if self.devices == 1 else 1


def layout(environment: Mapping[str, str], chips: int) -> XlaLayout:
    """Return the runtime's processes and devices.

    Args:
        environment: Environment variables.
        chips: Number of devices of this machine.
    """
    if environment.get("PJRT_DEVICE", "").upper() == "CPU":
        return XlaLayout(1, max(1, chips))
    generation, _ = accelerator_type(environment)
    # Chips of the second and third generation have two cores, which one process must use.
    return XlaLayout(max(1, chips), 2 if generation in {"v2", "v3"} else 1)


def chips_of_host(environment: Mapping[str, str]) -> int:
    """Return the chips of this machine by its type of TPU, as in Colab ("v5e-1") and Kaggle ("v5e-8").

    Bounds are not used: Colab's machine with one chip sets TPU_CHIPS_PER_HOST_BOUNDS=2,2,1.

    Args:
        environment: Environment variables.

    Returns:
        The number; 0 without a TPU.
    """
    generation, number = accelerator_type(environment)
    if generation in {"v5e", "v5litepod", "v6e"}:
        return min(number, 8)
    return min(-(-number // 2), 4)  # these count cores, two per chip; a machine has at most four chips


def accelerator_type(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the generation and the size in the variable TPU_ACCELERATOR_TYPE; ("", 0) without it."""
    found = re.fullmatch(r"(v\d+\w*)-(\d+)", environment.get("TPU_ACCELERATOR_TYPE", "").strip())
    return (found[1], int(found[2])) if found else ("", 0)
