"""The functions of `torch.cuda` that describe devices and count memory, for ranks on a machine without a GPU.

Importing this module changes nothing. The stub only reports memory; it cannot compute anything "on cuda".
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

NAME = "Tesla T4"
TOTAL = 15 << 30


class CountedCuda:
    """A stub whose allocators count memory, in bytes by device index.

    Attributes:
        allocated: The memory that tensors use.
        peak: The maximum of `allocated` since the start.
        reserved: The memory that the allocator has reserved.
        busy: Whether the devices are working.
    """

    def __init__(self, devices: int = 2, *, busy: bool = False) -> None:
        self.busy = busy
        self.allocated, self.peak, self.reserved = ([0] * devices for _ in range(3))

    def install(self) -> CountedCuda:
        """Replace functions of `torch.cuda` in this process from now on."""
        for name in ("allocated", "reserved"):
            setattr(torch.cuda, f"memory_{name}", lambda index, name=name: getattr(self, name)[index])
        answers: dict[str, Any] = {
            "max_memory_allocated": lambda index: self.peak[index],
            "device_count": lambda: len(self.allocated),
            "is_initialized": lambda: True,
            "current_stream": lambda _device=None: SimpleNamespace(query=lambda: not self.busy),
            "get_device_properties": lambda index: SimpleNamespace(name=NAME, total_memory=TOTAL, uuid=f"{index}abc"),
        }
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)
        return self

    def hold(self, allocated: int, reserved: int, device: int | None = None) -> None:
        """Report this much memory from now on, for this rank's device unless another one is named."""
        index = int(os.environ["LOCAL_RANK"]) if device is None else device
        self.allocated[index], self.reserved[index] = allocated, reserved
        self.peak[index] = max(self.peak[index], allocated)


__all__ = ["NAME", "TOTAL", "CountedCuda"]
