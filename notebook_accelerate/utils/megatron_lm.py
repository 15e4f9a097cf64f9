"""Megatron-LM: re-exports, nothing else."""

from __future__ import annotations

from notebook_accelerate._lazy import attach
from notebook_accelerate.utils._homes import HOMES

__getattr__, __dir__, __all__ = attach(__name__, HOMES["megatron_lm"])
