"""An engine in half precision: layers in fp8, what goes in and comes out, an optimizer that has not trained yet."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from notebook_accelerate.collectives import convert_to_fp32, recursively_apply
from notebook_accelerate.config.enums import FP8BackendType
from notebook_accelerate.strategies.strategy_setup import Setup


def in_fp8(model: nn.Module, setup: Setup, plugin: Any) -> None:
    """Have the layers of a model compute in fp8, where that is asked for; the engine computes in bf16 around them.

    Args:
        model: The model, before there is an engine; its parameters stay the same objects.
        setup: The settings of the Accelerator.
        plugin: The plugin in use.

    Raises:
        ValueError: MS-AMP is asked for beside DeepSpeed, which has it inside.
    """
    if setup.state.mixed_precision != "fp8":
        return
    inside = plugin.get_value("msamp.enabled") is True
    if getattr(setup.precision, "backend", None) == FP8BackendType.MSAMP and not inside:
        raise ValueError(
            "with DeepSpeed, MS-AMP is a part of the engine: write DeepSpeedPlugin(enable_msamp=True, "
            "msamp_opt_level='O2'); or pass kwargs_handlers=[AORecipeKwargs()] or [TERecipeKwargs()], or "
            "mixed_precision='bf16'"
        )
    if not inside:
        setup.precision.convert_layers(model)


def initializer(deepspeed: Any, plugin: Any) -> Any:
    """Return the module whose `initialize` makes an engine: MS-AMP has one of its own.

    Args:
        deepspeed: DeepSpeed.
        plugin: The plugin in use.

    Returns:
        DeepSpeed, or what MS-AMP made of it.

    Raises:
        ImportError: The plugin asks for MS-AMP, which is missing.
    """
    if plugin.get_value("msamp.enabled") is not True:
        return deepspeed
    try:
        return import_module("msamp.deepspeed")
    except ImportError as error:
        raise ImportError(
            "DeepSpeedPlugin(enable_msamp=True) needs MS-AMP, which is not installed: it is built from source, "
            "https://azure.github.io/MS-AMP/docs/getting-started/installation; or leave enable_msamp out, and pass "
            "kwargs_handlers=[AORecipeKwargs()] (pip install torchao)"
        ) from error


def in_halves(engine: Any) -> None:
    """Cast what goes into an engine's model in half precision, and what comes out, as autocast does.

    Args:
        engine: The engine; one in float32 is left alone.
    """
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16 if engine.bfloat16_enabled() else None
    if dtype is None:
        return

    def cast(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _to(args, dtype), _to(kwargs, dtype)

    engine.module.register_forward_pre_hook(cast, with_kwargs=True)
    engine.module.register_forward_hook(_give_float32)
    _undo_trial_step(engine.optimizer)


@torch.no_grad()
def _undo_trial_step(optimizer: Any) -> None:
    """Undo the step on zeros by which DeepSpeed's stage 0 has states allocated (unfused_optimizer.py of 0.19).

    It counts in Adam's bias correction, which makes the first real step a fifth too small, and decays the weights.
    """
    if not hasattr(optimizer, "initialize_optimizer_states"):
        return
    masters = getattr(optimizer, "fp32_groups_flat", None) or getattr(optimizer, "fp32_groups", None)
    halves = getattr(optimizer, "fp16_groups_flat", None) or getattr(optimizer, "fp16_groups", None)
    if not masters or not halves:
        return  # ZeRO's optimizers take no such step
    optimizer.optimizer.state.clear()
    for master, half in zip(_tensors(masters), _tensors(halves), strict=True):
        master.copy_(half)


def _tensors(groups: Any) -> list[torch.Tensor]:
    return [tensor for group in groups for tensor in ([group] if isinstance(group, torch.Tensor) else group)]


def _give_float32(_module: Any, _args: Any, outputs: Any) -> Any:
    return convert_to_fp32(outputs)


def _to(values: Any, dtype: torch.dtype) -> Any:
    return recursively_apply(lambda tensor: tensor.to(dtype), values, test_type=_is_float32)


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


__all__ = ["in_fp8", "in_halves", "initializer"]
