"""The precisions by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from notebook_accelerate.precision.base import Precision
from notebook_accelerate.precision.native import Bf16Precision, Fp16Precision

PrecisionFactory = Callable[[str, Any, Any], Precision]


def _fp8(*_: Any) -> Precision:
    raise ValueError(
        "mixed_precision='fp8' is not available in this version; pass mixed_precision='bf16', which every device that "
        "computes in fp8 also has"
    )


PRECISIONS: dict[str, PrecisionFactory] = {"no": Precision, "bf16": Bf16Precision, "fp16": Fp16Precision, "fp8": _fp8}
"""What makes a precision, by the name that `mixed_precision` takes."""


def register_precision(name: str, factory: PrecisionFactory) -> None:
    """Add a row, or replace one.

    Args:
        name: What `mixed_precision` takes.
        factory: Called with device type, `AutocastKwargs` or None, `GradScalerKwargs` or None.
    """
    PRECISIONS[name] = factory


def make_precision(name: str, device_type: str, autocast_handler: Any = None, scaler_handler: Any = None) -> Precision:
    """Make the precision of that name.

    Args:
        name: no, bf16, fp16, fp8, or one that was registered.
        device_type: Type of the device that computes: cpu, cuda, ...
        autocast_handler: `AutocastKwargs`; None means torch's defaults.
        scaler_handler: `GradScalerKwargs`; None means torch's defaults.

    Returns:
        The precision.

    Raises:
        ValueError: It is not known, or not available here.
    """
    if name not in PRECISIONS:
        raise ValueError(f"mixed_precision={name!r} is not known; pass one of {', '.join(map(repr, PRECISIONS))}")
    return PRECISIONS[name](device_type, autocast_handler, scaler_handler)
