"""fp8 with torchao, Transformer Engine or MS-AMP."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from notebook_accelerate.config.enums import FP8BackendType
from notebook_accelerate.config.low_precision import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from notebook_accelerate.hardware.versions import is_torchao_available
from notebook_accelerate.precision.autocast import Bf16Precision, require_cuda

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig


# ---- torchao, whose linear layers multiply matrices in fp8, and keep their weights in full precision

_MULTIPLE = 16
"""torch's multiplication in fp8 requires that the dimensions of matrices are multiples of this number."""


class AOPrecision(Bf16Precision):
    """Autocast to bfloat16, with torchao's linear layers, which compute in fp8.

    Args:
        device_type: The type of the computing device. On a CPU, fp8 is emulated.
        autocast_handler: The settings for autocast (`AutocastKwargs`). None means torch's defaults.
        scaler_handler: Not used, because bfloat16 needs no scaler.
        fp8_recipe: The recipe (`AORecipeKwargs`). None means the defaults.
    """

    name: ClassVar[str] = "fp8"
    backend: ClassVar[FP8BackendType] = FP8BackendType.AO

    def __init__(self, device_type: str, autocast_handler: Any, scaler_handler: Any, fp8_recipe: Any) -> None:
        super().__init__(device_type, autocast_handler, scaler_handler, fp8_recipe or AORecipeKwargs())

    def wrap_model(self, model: nn.Module, sharded: bool = False) -> nn.Module:
        # Only FSDP 2 (`sharded`) can gather weights in fp8.
        self._convert(model, sharded)
        return super().wrap_model(model, sharded)

    def convert_layers(self, model: nn.Module) -> None:
        self._convert(model, sharded=False)

    def _convert(self, model: nn.Module, sharded: bool) -> None:
        recipe = self.fp8_recipe
        config = replace(
            recipe.config,
            enable_fsdp_float8_all_gather=recipe.config.enable_fsdp_float8_all_gather and sharded,
            emulate=recipe.config.emulate or self.device_type == "cpu",
        )
        if not has_ao_layers(model):
            # Call the function through the module, because axolotl replaces it to keep the routers of
            # mixture-of-experts models in high precision.
            convert_model_to_fp8_ao(model, config, recipe.module_filter_func)

    def after_step(self, model: nn.Module) -> None:
        """Compute the scales of all weights that FSDP 2 gathers in fp8, in one reduction; every rank must call this."""
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        if self.fp8_recipe.config.enable_fsdp_float8_all_gather:
            precompute_float8_dynamic_scale_for_fsdp(model)


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layers in order of registration; None without linear layers.

    Args:
        model: The model to inspect.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(
    module: nn.Module, fqn: str, first_layer_name: str | None = None, last_layer_name: str | None = None
) -> bool:
    """Return whether a module can and should compute in fp8.

    Args:
        module: The module to check.
        fqn: The full name of the module in the model.
        first_layer_name: The full name of the first layer, which is excluded.
        last_layer_name: The full name of the last layer, which is excluded.
    """
    if not isinstance(module, nn.Linear) or fqn in {first_layer_name, last_layer_name}:
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a layer can compute in fp8, and is neither the first nor the last linear layer of the model.

    The first and last layers are the most sensitive ones. If they compute in fp8, training often does not converge.

    Args:
        module: The model that contains the layer.
        fqn: The full name of the layer in the model.
    """
    first, last = find_first_last_linear_layers(module)
    return filter_linear_layers(module.get_submodule(fqn), fqn, first, last)


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has torchao's layers, which compute in fp8.

    Args:
        model: The model to inspect.
    """
    # Compare names, because importing torchao is slow. Search the MRO, because FSDP 2 creates subclasses.
    return any(
        kind.__module__.startswith("torchao.float8") for module in model.modules() for kind in type(module).__mro__
    )


def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Float8LinearConfig | None = None,
    module_filter_func: Callable[..., Any] | None = None,
) -> None:
    """Make linear layers compute in fp8, in place. Parameters stay the same objects, in full precision.

    With `config.enable_fsdp_float8_all_gather`, parameters are wrapped, so that FSDP 2 can gather them in fp8. In this
    case, create the optimizer afterwards.

    Args:
        model: The model to convert.
        config: The settings of torchao. None means torchao's defaults.
        module_filter_func: A function that is called with a module and its name, and returns whether to convert it.
            None means all linear layers whose dimensions are multiples of 16, except the first and the last.

    Raises:
        ImportError: torchao is not installed.
    """
    if not is_torchao_available():
        raise ImportError("convert_model_to_fp8_ao needs torchao, which is not installed: pip install 'torchao>=0.6.1'")
    from torchao.float8 import convert_to_float8_training

    if module_filter_func is None:
        first, last = find_first_last_linear_layers(model)
        module_filter_func = partial(filter_linear_layers, first_layer_name=first, last_layer_name=last)
    convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)


# ---- NVIDIA's Transformer Engine, whose layers replace torch's, and whose autocast wraps the forward method
#
# API: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html


class TEPrecision(Bf16Precision):
    """Autocast to bfloat16, with Transformer Engine's layers, which compute in fp8.

    Args:
        device_type: Must be cuda.
        autocast_handler: The settings for autocast (`AutocastKwargs`). None means torch's defaults.
        scaler_handler: Not used, because bfloat16 needs no scaler.
        fp8_recipe: The recipe (`TERecipeKwargs`, or `FP8RecipeKwargs`). None means the defaults.

    Raises:
        ValueError: The device is not an NVIDIA GPU.
    """

    name: ClassVar[str] = "fp8"
    backend: ClassVar[FP8BackendType] = FP8BackendType.TE

    def __init__(self, device_type: str, autocast_handler: Any, scaler_handler: Any, fp8_recipe: Any) -> None:
        require_cuda("Transformer Engine", device_type)
        super().__init__(device_type, autocast_handler, scaler_handler, fp8_recipe or TERecipeKwargs())

    def wrap_model(self, model: nn.Module, sharded: bool = False) -> nn.Module:
        _replace_layers(model)
        wrapped = super().wrap_model(model, sharded)
        return apply_fp8_autowrap(wrapped, self.fp8_recipe)

    def convert_layers(self, model: nn.Module) -> None:
        _replace_layers(model)
        apply_fp8_autowrap(model, self.fp8_recipe)


def _replace_layers(model: nn.Module) -> None:
    if not has_transformer_engine_layers(model):
        with torch.no_grad():
            convert_model(model)


def _te() -> Any:
    try:
        import transformer_engine.pytorch as te
    except ImportError as error:
        raise ImportError("Transformer Engine is not installed: pip install 'transformer_engine[pytorch]'") from error
    return te


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has any of Transformer Engine's layers.

    Args:
        model: The model to inspect.
    """
    return any(type(module).__module__.startswith("transformer_engine") for module in model.modules())


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace torch's linear layers and layer norms with Transformer Engine's, or vice versa, in place.

    The new layers have the same parameter objects, so existing optimizers stay valid.

    Args:
        model: The model to convert.
        to_transformer_engine: Whether to convert to Transformer Engine's layers. If False, convert back to torch's.
        _convert_linear: Whether to replace linear layers, except those whose dimensions are not multiples of 16.
        _convert_ln: Whether to replace layer norms.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    te = _te()
    for name, child in model.named_children():
        new = _replacement(te, child, to_transformer_engine, _convert_linear, _convert_ln)
        if new is None:
            convert_model(child, to_transformer_engine, _convert_linear, _convert_ln)
            continue
        for parameter_name, parameter in child.named_parameters(recurse=False):
            setattr(new, parameter_name, parameter)
        new.train(child.training)
        setattr(model, name, new)


def _replacement(te: Any, child: Any, to_te: bool, linear: bool, norm: bool) -> Any:
    """Return an uninitialized replacement for a module, or None if the module is kept."""
    source, target = (nn, te) if to_te else (te, nn)
    if linear and type(child) is source.Linear:
        weight = child.weight
        if to_te and (weight.shape[0] % 16 or weight.shape[1] % 16):
            return None
        # A missing bias is None in torch, and an empty tensor in Transformer Engine.
        bias = child.bias is not None and child.bias.numel() > 0
        return target.Linear(child.in_features, child.out_features, bias=bias, **_placement(weight, to_te))
    if norm and type(child) is source.LayerNorm and child.weight is not None:
        return target.LayerNorm(tuple(child.weight.shape), eps=child.eps, **_placement(child.weight, to_te))
    return None


def _placement(weight: torch.Tensor, to_te: bool) -> dict[str, Any]:
    return {"device": weight.device, "params_dtype" if to_te else "dtype": weight.dtype}


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward method that runs in fp8 during training, and optionally in evaluation.

    Args:
        model_forward: The module's bound forward method.
        fp8_recipe: A recipe, as an object of Transformer Engine.
        use_during_eval: Whether evaluation also runs in fp8.

    Returns:
        A function that takes the module, and the arguments of its forward method.
    """
    te = _te()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Make a model's forward method run in Transformer Engine's fp8, in place.

    Args:
        model: The model, already converted by `convert_model`.
        fp8_recipe_handler: The recipe (`TERecipeKwargs`). None means Transformer Engine's own defaults.

    Returns:
        The same model.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    use_during_eval = bool(getattr(fp8_recipe_handler, "use_autocast_during_eval", False))
    forward = contextual_fp8_autocast(model.forward, _recipe(fp8_recipe_handler), use_during_eval)
    model.forward = MethodType(forward, model)
    return model


def _recipe(handler: Any) -> Any:
    """Create Transformer Engine's recipe from a handler."""
    _te()
    from transformer_engine.common import recipe

    if handler is None:
        return recipe.DelayedScaling()
    chosen = getattr(recipe.Format, handler.fp8_format)
    if handler.use_mxfp8_block_scaling:
        return recipe.MXFP8BlockScaling(margin=handler.margin, fp8_format=chosen)
    return recipe.DelayedScaling(
        margin=handler.margin,
        fp8_format=chosen,
        amax_history_len=handler.amax_history_len,
        amax_compute_algo=handler.amax_compute_algo,
        override_linear_precision=handler.override_linear_precision,
    )


# ---- Microsoft's MS-AMP, which keeps weights, gradients and optimizer states in fp8
#
# API: https://azure.github.io/MS-AMP/docs/user-tutorial/usage


class MSAMPPrecision(Bf16Precision):
    """The precision of MS-AMP, which replaces a model and its optimizer together.

    Args:
        device_type: Must be cuda.
        autocast_handler: The settings for autocast (`AutocastKwargs`). None means torch's defaults.
        scaler_handler: Not used.
        fp8_recipe: The recipe (`MSAMPRecipeKwargs`, or `FP8RecipeKwargs`). None means the defaults.

    Raises:
        ImportError: MS-AMP is not installed.
        ValueError: The device is not an NVIDIA GPU.
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
        """Replace one model and its optimizer together.

        Raises:
            ValueError: `prepare` was not given exactly one model and one optimizer.
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


FP8_PRECISIONS: dict[str, type[AOPrecision | TEPrecision | MSAMPPrecision]] = {
    precision.backend.value: precision for precision in (AOPrecision, TEPrecision, MSAMPPrecision)
}
"""The precision class of each library, by `FP8BackendType`."""
