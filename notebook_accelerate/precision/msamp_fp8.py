"""fp8 with Microsoft's MS-AMP: weights, gradients and optimizer states in fp8.

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
from notebook_accelerate.precision.torch_autocast import Bf16Precision, require_cuda


class MSAMPPrecision(Bf16Precision):
    """MS-AMP, which replaces a model and its optimizer together.

    Args:
        device_type: Must be cuda.
        autocast_handler: `AutocastKwargs`; None means torch's defaults.
        scaler_handler: Not used.
        fp8_recipe: `MSAMPRecipeKwargs`, or `FP8RecipeKwargs`; None means defaults.

    Raises:
        ImportError: MS-AMP is missing.
        ValueError: The device is not a GPU.
    """

    name: ClassVar[str] = "fp8"
    backend: ClassVar[FP8BackendType] = FP8BackendType.MSAMP

    def __init__(self, device_type: str, autocast_handler: Any, scaler_handler: Any, fp8_recipe: Any) -> None:
        if importlib.util.find_spec("msamp") is None:
            raise ImportError(
                "MS-AMP is not installed: it is built from source, https://azure.github.io/MS-AMP/docs/getting-started/"
                "installation; or pass kwargs_handlers=[AORecipeKwargs()] (pip install torchao)"
            )
        require_cuda("MS-AMP", device_type)
        super().__init__(device_type, autocast_handler, scaler_handler, fp8_recipe or MSAMPRecipeKwargs())

    def join(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[Any], list[Any]]:
        """Replace one model and its optimizer together; see `Precision.join`.

        Raises:
            ValueError: `prepare` did not get exactly one of each.
        """
        if not models and not optimizers:
            return [], []
        if len(models) != 1 or len(optimizers) != 1:
            raise ValueError(
                f"prepare() got {len(models)} models and {len(optimizers)} optimizers, but MS-AMP replaces one model "
                "and its optimizer together: model, optimizer = accelerator.prepare(model, optimizer)"
            )
        msamp = importlib.import_module("msamp")
        model, optimizer = msamp.initialize(
            models[0].to(self.device_type), optimizers[0], opt_level=self.fp8_recipe.opt_level
        )
        return [model], [optimizer]
