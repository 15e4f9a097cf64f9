"""bf16 and fp16 with torch's own autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from notebook_accelerate.precision.autocast_forward import AutocastForward
from notebook_accelerate.precision.full_precision import Precision


class NativePrecision(Precision):
    """Autocast to `compute_dtype`; outputs are converted to float32."""

    def wrap_model(self, model: torch.nn.Module, sharded: bool = False) -> torch.nn.Module:
        """Run the model's forward under autocast; `_original_forward` keeps it. See `Precision.wrap_model`."""
        super().wrap_model(model, sharded)
        original = model.forward
        model._original_forward = original  # type: ignore[assignment]
        model.forward = AutocastForward(original, self._settings(None))
        return model

    def autocast(self, handler: Any = None) -> AbstractContextManager[Any]:
        """Return torch's autocast for this dtype; see `Precision.autocast`."""
        return torch.autocast(**self._settings(handler))

    def _settings(self, handler: Any) -> dict[str, Any]:
        chosen = handler or self.autocast_handler
        options = chosen.to_kwargs() if chosen is not None else {}
        return {"device_type": self.device_type, "dtype": self.compute_dtype, **options}


class Bf16Precision(NativePrecision):
    """bfloat16, which has the exponent range of float32: no loss scaling is needed."""

    name: ClassVar[str] = "bf16"
    compute_dtype: ClassVar[torch.dtype | None] = torch.bfloat16


class Fp16Precision(NativePrecision):
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
