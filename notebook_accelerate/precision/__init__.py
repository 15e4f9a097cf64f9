"""The precision a model computes in: a null object for float32, autocast for the rest, chosen from a table by name."""

from __future__ import annotations

from notebook_accelerate.precision.base import Precision
from notebook_accelerate.precision.native import Bf16Precision, Fp16Precision
from notebook_accelerate.precision.outputs import AutocastForward, restore_forward
from notebook_accelerate.precision.table import PRECISIONS, make_precision, register_precision

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
