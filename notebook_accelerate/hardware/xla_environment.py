"""How torch_xla's runtime shares a machine's devices out over processes, read off environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class XlaLayout:
    """The processes that torch_xla's runtime wants.

    Attributes:
        processes: How many it would start to have all devices: one for each chip; on the CPU one for all.
        devices: Devices of each of them.
    """

    processes: int
    devices: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks a launch starts unless it is told: those that have one device each, or else one for all."""
        return self.processes if self.devices == 1 else 1


def layout(environment: Mapping[str, str], chips: int) -> XlaLayout:
    """Return how the runtime shares devices out.

    Args:
        environment: Environment variables.
        chips: Devices that were counted on this machine.
    """
    if environment.get("PJRT_DEVICE", "").upper() == "CPU":
        return XlaLayout(1, max(1, chips))
    generation, _ = _type(environment)
    # Chips of the second and third generation have two cores, which one process must share.
    return XlaLayout(max(1, chips), 2 if generation in {"v2", "v3"} else 1)


def chips_of_host(environment: Mapping[str, str]) -> int:
    """Return the chips of this machine by the type of its TPU, as Colab ("v5e-1") and Kaggle ("v5e-8") name it.

    Bounds are not asked: Colab's machine of one chip says TPU_CHIPS_PER_HOST_BOUNDS=2,2,1.

    Args:
        environment: Environment variables.

    Returns:
        The number; 0 where there is no TPU.
    """
    generation, number = _type(environment)
    if generation in {"v5e", "v5litepod", "v6e"}:
        return min(number, 8)
    return min(-(-number // 2), 4)  # these count cores, two to a chip; a machine has four chips at most


def _type(environment: Mapping[str, str]) -> tuple[str, int]:
    found = re.fullmatch(r"(v\d+\w*)-(\d+)", environment.get("TPU_ACCELERATOR_TYPE", "").strip())
    return (found[1], int(found[2])) if found else ("", 0)


__all__ = ["XlaLayout", "chips_of_host", "layout"]
