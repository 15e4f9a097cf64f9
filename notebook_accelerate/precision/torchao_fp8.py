"""fp8 with torchao: linear layers compute their products in fp8 and keep their weights in full precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from notebook_accelerate.config.enums import FP8BackendType
from notebook_accelerate.config.fp8_recipes import AORecipeKwargs
from notebook_accelerate.hardware.feature_checks import torchao_required
from notebook_accelerate.precision.torch_autocast import Bf16Precision

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

_MULTIPLE = 16
"""torch's fp8 product requires dimensions that are multiples of this."""


class AOPrecision(Bf16Precision):
    """Autocast to bfloat16, and linear layers of torchao that compute in fp8.

    Args:
        device_type: Type of the computing device; fp8 is emulated on a CPU.
        autocast_handler: `AutocastKwargs`; None means torch's defaults.
        scaler_handler: Not used: bfloat16 needs no scaler.
        fp8_recipe: `AORecipeKwargs`; None means its defaults.
    """

    name: ClassVar[str] = "fp8"
    backend: ClassVar[FP8BackendType] = FP8BackendType.AO

    def __init__(self, device_type: str, autocast_handler: Any, scaler_handler: Any, fp8_recipe: Any) -> None:
        super().__init__(device_type, autocast_handler, scaler_handler, fp8_recipe or AORecipeKwargs())

    def wrap_model(self, model: nn.Module, sharded: bool = False) -> nn.Module:
        """Convert linear layers and run the model's forward under autocast; see `Precision.wrap_model`.

        FSDP 2 (`sharded`) can gather weights in fp8.
        """
        self._convert(model, sharded)
        return super().wrap_model(model, sharded)

    def convert_layers(self, model: nn.Module) -> None:
        """Convert linear layers; see `Precision.convert_layers`."""
        self._convert(model, sharded=False)

    def _convert(self, model: nn.Module, sharded: bool) -> None:
        recipe = self.fp8_recipe
        config = replace(
            recipe.config,
            enable_fsdp_float8_all_gather=recipe.config.enable_fsdp_float8_all_gather and sharded,
            emulate=recipe.config.emulate or self.device_type == "cpu",
        )
        if not has_ao_layers(model):
            # By the name that axolotl replaces to keep the routers of mixtures of experts in high precision.
            convert = import_module("notebook_accelerate.accelerator").convert_model_to_fp8_ao
            convert(model, config, recipe.module_filter_func)

    def after_step(self, model: nn.Module) -> None:
        """Compute the scales of all weights that FSDP 2 gathers in fp8, in one reduction; every rank must call this.

        See `Precision.after_step`.
        """
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        if self.fp8_recipe.config.enable_fsdp_float8_all_gather:
            precompute_float8_dynamic_scale_for_fsdp(model)


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layers, in order of registration; None if it has none.

    Args:
        model: The model.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(
    module: nn.Module, fqn: str, first_layer_name: str | None = None, last_layer_name: str | None = None
) -> bool:
    """Tell whether a module can and should compute in fp8.

    Args:
        module: The module.
        fqn: Its name in the model.
        first_layer_name: Name of a layer to exclude.
        last_layer_name: Name of another layer to exclude.
    """
    if not isinstance(module, nn.Linear) or fqn in {first_layer_name, last_layer_name}:
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Tell whether a layer of a model can compute in fp8 and is neither the first nor the last linear one.

    The first and the last layer are the most sensitive: with them in fp8, training often does not converge.

    Args:
        module: The model.
        fqn: The layer's name in it.
    """
    first, last = find_first_last_linear_layers(module)
    return filter_linear_layers(module.get_submodule(fqn), fqn, first, last)


def has_ao_layers(model: nn.Module) -> bool:
    """Tell whether a model has layers of torchao that compute in fp8.

    Args:
        model: The model.
    """
    # By name, because importing torchao is slow. FSDP 2 derives classes of its own, hence the MRO.
    return any(
        kind.__module__.startswith("torchao.float8") for module in model.modules() for kind in type(module).__mro__
    )


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Float8LinearConfig | None = None,
    module_filter_func: Callable[..., Any] | None = None,
) -> None:
    """Make linear layers compute in fp8, in place. Their parameters stay the same objects, in full precision.

    With `config.enable_fsdp_float8_all_gather` the parameters are wrapped so that FSDP 2 can gather them in fp8: create
    the optimizer afterwards.

    Args:
        model: The model.
        config: torchao's settings; None means its defaults.
        module_filter_func: Called with a module and its name, returns whether to convert it; None means all linear
            layers whose dimensions are multiples of 16, except the first and the last.

    Raises:
        ImportError: torchao is missing.
    """
    from torchao.float8 import convert_to_float8_training

    if module_filter_func is None:
        first, last = find_first_last_linear_layers(model)
        module_filter_func = partial(filter_linear_layers, first_layer_name=first, last_layer_name=last)
    convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)
