"""The table that maps each name to a precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.low_precision import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from notebook_accelerate.hardware.versions import is_package, is_torchao_available
from notebook_accelerate.precision.autocast import Bf16Precision, Fp16Precision, Precision

PrecisionFactory = Callable[..., Precision]

_LIBRARIES = {AORecipeKwargs: "AO", TERecipeKwargs: "TE", MSAMPRecipeKwargs: "MSAMP"}
"""The fp8 library for each class of recipes, named as in `FP8BackendType`."""


def _fp8(device_type: str, autocast_handler: Any, scaler_handler: Any, fp8_recipe: Any) -> Precision:
    from notebook_accelerate.precision.fp8 import FP8_PRECISIONS

    chosen = FP8_PRECISIONS[fp8_library(device_type, fp8_recipe)]
    return chosen(device_type, autocast_handler, scaler_handler, fp8_recipe)


def fp8_library(device_type: str, recipe: Any) -> str:
    """Return the fp8 library to use.

    It is the recipe's library, otherwise the one in ACCELERATE_FP8_BACKEND, and otherwise the first one installed.

    Args:
        device_type: The type of the computing device.
        recipe: The user's recipe, or None.

    Returns:
        AO, TE or MSAMP.

    Raises:
        ValueError: No library was selected, and no library is installed.
    """
    if isinstance(recipe, FP8RecipeKwargs):
        return str(recipe.backend)
    for kind, library in _LIBRARIES.items():
        if isinstance(recipe, kind):
            return library
    requested = environ.choice("ACCELERATE_FP8_BACKEND", [library.lower() for library in _LIBRARIES.values()])
    if requested is not None:
        return requested.upper()
    if device_type == "cuda" and is_package("transformer_engine"):
        return "TE"
    if is_torchao_available():
        return "AO"
    raise ValueError(
        "mixed_precision='fp8' needs a library that computes in fp8, but none is installed: pip install torchao "
        "(any device; emulated on a CPU), or pip install 'transformer_engine[pytorch]' (NVIDIA GPUs); or pass "
        "mixed_precision='bf16'"
    )


PRECISIONS: dict[str, PrecisionFactory] = {"no": Precision, "bf16": Bf16Precision, "fp16": Fp16Precision, "fp8": _fp8}
"""The function that creates each precision, by the name that is passed as `mixed_precision`."""


def register_precision(name: str, factory: PrecisionFactory) -> None:
    """Register a precision. It replaces the precision that was registered under the same name.

    Args:
        name: The name to pass as `mixed_precision`.
        factory: A function that creates the precision. It is called with the device type, the `AutocastKwargs`, the
            `GradScalerKwargs` and the fp8 recipe. All but the device type may be None.
    """
    PRECISIONS[name] = factory


def make_precision(
    name: str, device_type: str, autocast_handler: Any = None, scaler_handler: Any = None, fp8_recipe: Any = None
) -> Precision:
    """Create a precision by name.

    Args:
        name: no, bf16, fp16, fp8, or the name of a registered precision.
        device_type: The type of the computing device: cpu, cuda, ...
        autocast_handler: The settings for autocast (`AutocastKwargs`). None means torch's defaults.
        scaler_handler: The settings for the loss scaler (`GradScalerKwargs`). None means torch's defaults.
        fp8_recipe: The recipe (`AORecipeKwargs`, `TERecipeKwargs` or `MSAMPRecipeKwargs`). None means the defaults.

    Raises:
        ValueError: The name is unknown, or the precision is not available on this machine.
    """
    if name not in PRECISIONS:
        raise ValueError(f"mixed_precision={name!r} is not known; pass one of {', '.join(map(repr, PRECISIONS))}")
    return PRECISIONS[name](device_type, autocast_handler, scaler_handler, fp8_recipe)
