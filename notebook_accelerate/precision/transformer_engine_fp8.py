"""fp8 with NVIDIA's Transformer Engine: its layers replace torch's, and its autocast wraps the forward.

API: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from notebook_accelerate.config.enums import FP8BackendType
from notebook_accelerate.config.fp8_recipes import TERecipeKwargs
from notebook_accelerate.precision.torch_autocast import Bf16Precision, require_cuda


class TEPrecision(Bf16Precision):
    """Autocast to bfloat16, and layers of Transformer Engine that compute in fp8.

    Args:
        device_type: Must be cuda.
        autocast_handler: `AutocastKwargs`; None means torch's defaults.
        scaler_handler: Not used: bfloat16 needs no scaler.
        fp8_recipe: `TERecipeKwargs`, or `FP8RecipeKwargs`; None means defaults.

    Raises:
        ValueError: The device is not a GPU.
    """

    name: ClassVar[str] = "fp8"
    backend: ClassVar[FP8BackendType] = FP8BackendType.TE

    def __init__(self, device_type: str, autocast_handler: Any, scaler_handler: Any, fp8_recipe: Any) -> None:
        require_cuda("Transformer Engine", device_type)
        super().__init__(device_type, autocast_handler, scaler_handler, fp8_recipe or TERecipeKwargs())

    def wrap_model(self, model: nn.Module, sharded: bool = False) -> nn.Module:
        """Replace layers and run the model's forward in fp8; see `Precision.wrap_model`."""
        _replace_layers(model)
        wrapped = super().wrap_model(model, sharded)
        return apply_fp8_autowrap(wrapped, self.fp8_recipe)

    def convert_layers(self, model: nn.Module) -> None:
        """Replace layers and make them compute in fp8; see `Precision.convert_layers`."""
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
    """Tell whether a model has layers of Transformer Engine.

    Args:
        model: The model.
    """
    return any(type(module).__module__.startswith("transformer_engine") for module in model.modules())


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace torch's linear layers and layer norms by Transformer Engine's, or the reverse, in place.

    The new layers get the same parameter objects, so existing optimizers stay valid.

    Args:
        model: The model.
        to_transformer_engine: False converts back to torch's.
        _convert_linear: Whether linear layers are replaced; those whose dimensions are not multiples of 16 never are.
        _convert_ln: Whether layer norms are replaced.

    Raises:
        ImportError: Transformer Engine is missing.
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
    """Return an uninitialized replacement of a module, or None if the module is kept."""
    source, target = (nn, te) if to_te else (te, nn)
    if linear and type(child) is source.Linear:
        weight = child.weight
        if to_te and (weight.shape[0] % 16 or weight.shape[1] % 16):
            return None
        # A missing bias is None in torch, an empty tensor in Transformer Engine.
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
    """Return a forward that runs in fp8 while its module trains, and optionally in evaluation.

    Args:
        model_forward: The module's bound forward.
        fp8_recipe: A recipe of Transformer Engine.
        use_during_eval: Whether evaluation runs in fp8 too.

    Returns:
        A function of the module and the arguments of its forward.
    """
    te = _te()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Run a model's forward in Transformer Engine's fp8, in place.

    Args:
        model: The model, after `convert_model`.
        fp8_recipe_handler: `TERecipeKwargs`; None means Transformer Engine's own defaults.

    Returns:
        The model.

    Raises:
        ImportError: Transformer Engine is missing.
    """
    use_during_eval = bool(getattr(fp8_recipe_handler, "use_autocast_during_eval", False))
    forward = contextual_fp8_autocast(model.forward, _recipe(fp8_recipe_handler), use_during_eval)
    model.forward = MethodType(forward, model)
    return model


def _recipe(handler: Any) -> Any:
    """Build Transformer Engine's own recipe."""
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
