"""bf16 and fp16 by torch's own autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from notebook_accelerate.precision.autocast_forward import AutocastForward
from notebook_accelerate.precision.full_precision import Precision


class NativePrecision(Precision):
    """Autocast to `compute_dtype`; outputs come back in float32."""

    def wrap_model(self, model: torch.nn.Module, sharded: bool = False) -> torch.nn.Module:
        """Run the model's forward under autocast and give back float32, in place.

        Args:
            model: The model.
            sharded: Not used.

        Returns:
            The model; `_original_forward` keeps its forward.
        """
        super().wrap_model(model, sharded)
        original = model.forward
        model._original_forward = original  # type: ignore[assignment]
        model.forward = AutocastForward(original, self._settings(None))
        return model

    def autocast(self, handler: Any = None) -> AbstractContextManager[Any]:
        """Return torch's autocast for this dtype.

        Args:
            handler: `AutocastKwargs` for this block; None means those of the constructor.

        Returns:
            A context manager.
        """
        return torch.autocast(**self._settings(handler))

    def _settings(self, handler: Any) -> dict[str, Any]:
        chosen = handler or self.autocast_handler
        more = chosen.to_kwargs() if chosen is not None else {}
        return {"device_type": self.device_type, "dtype": self.compute_dtype, **more}


class Bf16Precision(NativePrecision):
    """bfloat16: the exponents of float32, so nothing is scaled."""

    name: ClassVar[str] = "bf16"
    compute_dtype: ClassVar[torch.dtype | None] = torch.bfloat16


class Fp16Precision(NativePrecision):
    """float16: gradients would underflow, so losses are scaled up and gradients down again."""

    name: ClassVar[str] = "fp16"
    compute_dtype: ClassVar[torch.dtype | None] = torch.float16

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return a new scaler.

        Returns:
            torch's `GradScaler` for the device, with the settings of `GradScalerKwargs`.
        """
        more = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        return torch.amp.GradScaler(self.device_type, **more)
