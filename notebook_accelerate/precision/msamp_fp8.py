"""fp8 by Microsoft's MS-AMP: weights, gradients and optimizer states in fp8.

API: https://azure.github.io/MS-AMP/docs/user-tutorial/usage
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from notebook_accelerate.config.enums import FP8BackendType
from notebook_accelerate.config.fp8_recipes import MSAMPRecipeKwargs
from notebook_accelerate.precision.torch_autocast import Bf16Precision


class MSAMPPrecision(Bf16Precision):
    """MS-AMP changes a model and its optimizer together.

    Args:
        device_type: Must be cuda.
        autocast_handler: `AutocastKwargs`; None means torch's defaults.
        scaler_handler: Not used.
        fp8_recipe: `MSAMPRecipeKwargs`, or `FP8RecipeKwargs`; None means defaults.

    Raises:
        ImportError: MS-AMP is missing.
        ValueError: The device is no GPU.
    """

    name: ClassVar[str] = "fp8"
    backend: ClassVar[FP8BackendType] = FP8BackendType.MSAMP

    def __init__(
        self, device_type: str, autocast_handler: Any = None, scaler_handler: Any = None, fp8_recipe: Any = None
    ) -> None:
        if importlib.util.find_spec("msamp") is None:
            raise ImportError(
                "MS-AMP is not installed: it is built from source, https://azure.github.io/MS-AMP/docs/getting-started/"
                "installation; or pass kwargs_handlers=[AORecipeKwargs()] (pip install torchao)"
            )
        if device_type != "cuda":
            raise ValueError(
                f"MS-AMP computes in fp8 on NVIDIA GPUs, and this rank's device is {device_type}; pass "
                "kwargs_handlers=[AORecipeKwargs()], which emulates fp8 elsewhere, or mixed_precision='bf16'"
            )
        super().__init__(device_type, autocast_handler, scaler_handler, fp8_recipe or MSAMPRecipeKwargs())

    def join(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[Any], list[Any]]:
        """Change one model and its optimizer together.

        Args:
            models: The models of one `prepare`, on their device.
            optimizers: Its optimizers.

        Returns:
            The new model and the new optimizer.

        Raises:
            ValueError: There is not one of each.
        """
        if not models and not optimizers:
            return [], []
        if len(models) != 1 or len(optimizers) != 1:
            raise ValueError(
                f"MS-AMP changes one model and its optimizer together, and prepare() was given {len(models)} models "
                f"and {len(optimizers)} optimizers; write model, optimizer = accelerator.prepare(model, optimizer)"
            )
        msamp = importlib.import_module("msamp")
        model, optimizer = msamp.initialize(
            models[0].to(self.device_type), optimizers[0], opt_level=self.fp8_recipe.opt_level
        )
        return [model], [optimizer]


__all__ = ["MSAMPPrecision"]
