"""bf16 and fp16 with torch's own autocast."""

from __future__ import annotations

from typing import ClassVar

import torch

from notebook_accelerate.precision.autocast import Precision


class Bf16Precision(Precision):
    """bfloat16, which has the exponent range of float32: no loss scaling is needed."""

    name: ClassVar[str] = "bf16"
    compute_dtype: ClassVar[torch.dtype | None] = torch.bfloat16


class Fp16Precision(Precision):
    """float16: losses are scaled up, and gradients down again, because gradients would underflow."""

    name: ClassVar[str] = "fp16"
    compute_dtype: ClassVar[torch.dtype | None] = torch.float16

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return torch's `GradScaler` for the device, with the settings of `GradScalerKwargs`."""
        options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        return torch.amp.GradScaler(self.device_type, **options)


def require_cuda(library: str, device_type: str) -> None:
    """Check the device of an fp8 library that needs an NVIDIA GPU.

    Args:
        library: Its name, for the error.
        device_type: Type of the computing device.

    Raises:
        ValueError: The device is not a GPU.
    """
    if device_type != "cuda":
        raise ValueError(
            f"{library} computes in fp8 on NVIDIA GPUs, but this rank's device is {device_type}; pass "
            "kwargs_handlers=[AORecipeKwargs()], which emulates fp8 on other devices, or mixed_precision='bf16'"
        )
