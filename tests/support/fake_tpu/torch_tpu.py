"""A stub of torch_tpu that registers itself with torch without a TPU. Put its folder on the path to import it.

The device type and the process group's backend exist, but nothing can be computed.
"""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

seeds: list[int] = []
"""The seeds that torch has passed to `manual_seed_all`."""


def _refuse(*_: Any) -> None:
    raise RuntimeError("internal to TorchTPU and can only be called by the PyTorch framework")


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


module = ModuleType("torch.tpu")
module.manual_seed_all = seeds.append  # type: ignore[attr-defined]
module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
module.default_generators = (torch.Generator(),)  # type: ignore[attr-defined]
# torch.accelerator requires these functions.
for name in ("device_count", "is_available", "get_rng_state", "synchronize"):
    setattr(module, name, _refuse)

_torch: Any = torch
_torch.utils.rename_privateuse1_backend("tpu")
_torch._register_device_module("tpu", module)
torch.accelerator.current_device_index = lambda: 0
dist.Backend.register_backend("tpu_dist", _group, devices=["tpu"])
