"""The precisions that a model can compute in (float32, autocast and fp8), and a table of them by name."""

from __future__ import annotations

from notebook_accelerate.precision.autocast import (
    AutocastForward as AutocastForward,
    Bf16Precision as Bf16Precision,
    Fp16Precision as Fp16Precision,
    Precision as Precision,
    restore_forward as restore_forward,
)
from notebook_accelerate.precision.precision_table import (
    PRECISIONS as PRECISIONS,
    fp8_library as fp8_library,
    make_precision as make_precision,
    register_precision as register_precision,
)
