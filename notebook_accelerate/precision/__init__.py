"""The precision a model computes in: a null object for float32, autocast for the rest, chosen from a table by name."""

from __future__ import annotations

from notebook_accelerate.precision.autocast_forward import AutocastForward, restore_forward
from notebook_accelerate.precision.full_precision import Precision
from notebook_accelerate.precision.precision_table import PRECISIONS, make_precision, register_precision
from notebook_accelerate.precision.torch_autocast import Bf16Precision, Fp16Precision

__all__ = [
    "PRECISIONS",
    "AutocastForward",
    "Bf16Precision",
    "Fp16Precision",
    "Precision",
    "make_precision",
    "register_precision",
    "restore_forward",
]
