"""Precisions of a model's computation, selected from a table by name: float32, autocast, or fp8."""

from __future__ import annotations

from notebook_accelerate.precision.autocast import AutocastForward, restore_forward
from notebook_accelerate.precision.autocast import Precision
from notebook_accelerate.precision.precision_table import PRECISIONS, fp8_library, make_precision, register_precision
from notebook_accelerate.precision.torch_autocast import Bf16Precision, Fp16Precision

__all__ = [
    "PRECISIONS",
    "AutocastForward",
    "Bf16Precision",
    "Fp16Precision",
    "Precision",
    "fp8_library",
    "make_precision",
    "register_precision",
    "restore_forward",
]
