"""Keyword arguments for torch's autocast, gradient scaler and process group."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from notebook_accelerate.config import environ

_NCCL_TIMEOUT = timedelta(minutes=10)
_TIMEOUT = timedelta(minutes=30)


class KwargsHandler:
    """Base of the dataclasses that hold keyword arguments of torch's classes and functions."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields by name."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from an instance made without arguments and environment variables."""
        with environ.ignored():
            defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if defaults[name] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``, for mixed precision and for ``Accelerator.autocast``."""

    enabled: bool = True
    """Whether autocast is on."""
    cache_enabled: bool | None = None
    """Whether cast weights are cached until the block ends; None: torch's default."""


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, the gradient scaler of fp16.

    Raises:
        ValueError: A value is out of its range.
    """

    init_scale: float = 65536.0
    """Initial scale."""
    growth_factor: float = 2.0
    """Factor of the scale after ``growth_interval`` steps without an overflow."""
    backoff_factor: float = 0.5
    """Factor of the scale after an overflow."""
    growth_interval: int = 2000
    """Steps without an overflow before the scale grows."""
    enabled: bool = True
    """Whether the scaler is on."""

    def __post_init__(self) -> None:
        if not self.init_scale > 0:
            raise ValueError(f"init_scale={self.init_scale!r} is not allowed; pass a number above 0, as 65536.0")
        if not self.growth_factor > 1:
            raise ValueError(f"growth_factor={self.growth_factor!r} is not allowed; pass a number above 1, as 2.0")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor={self.backoff_factor!r} is not allowed; pass one between 0 and 1, as 0.5")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    Raises:
        ValueError: ``timeout`` is not a ``datetime.timedelta``.
    """

    backend: str | None = "nccl"
    """Its backend; the default means the one for the device, which is nccl on NVIDIA GPUs."""
    init_method: str | None = None
    """URL of the rendezvous; None: the environment's MASTER_ADDR and MASTER_PORT."""
    timeout: timedelta | None = None
    """How long a collective may take; None: 10 minutes for nccl, 30 minutes for others (torch's defaults)."""

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = _NCCL_TIMEOUT if self.backend == "nccl" else _TIMEOUT
        if not isinstance(self.timeout, timedelta):
            raise ValueError(f"timeout={self.timeout!r} is not allowed; pass datetime.timedelta(seconds=...)")
