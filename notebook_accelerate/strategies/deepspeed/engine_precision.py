"""Half precision of an engine: fp8 layers, casts of inputs and outputs, and the state of a new optimizer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from notebook_accelerate.collectives import convert_to_fp32, recursively_apply
from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
from notebook_accelerate.config.enums import FP8BackendType
from notebook_accelerate.strategies.strategy_setup import Setup


def convert_to_fp8(model: nn.Module, setup: Setup, plugin: DeepSpeedPlugin) -> None:
    """Convert layers of a model to fp8, for mixed_precision="fp8"; the engine computes in bf16 around them.

    Args:
        model: The model, before its engine is created; its parameters stay the same objects.
        setup: The settings of the Accelerator.
        plugin: The active plugin.

    Raises:
        ValueError: MS-AMP is selected outside DeepSpeed, which integrates it.
    """
    if setup.state.mixed_precision != "fp8":
        return
    integrated = plugin.get_value("msamp.enabled") is True
    if getattr(setup.precision, "backend", None) == FP8BackendType.MSAMP and not integrated:
        raise ValueError(
            "with DeepSpeed, MS-AMP is a part of the engine: pass DeepSpeedPlugin(enable_msamp=True, "
            "msamp_opt_level='O2'); or pass kwargs_handlers=[AORecipeKwargs()] or [TERecipeKwargs()], or "
            "mixed_precision='bf16'"
        )
    if not integrated:
        setup.precision.convert_layers(model)


def initialize_module(deepspeed: Any, plugin: DeepSpeedPlugin) -> Any:
    """Return the module whose `initialize` creates an engine: MS-AMP has its own.

    Args:
        deepspeed: DeepSpeed.
        plugin: The active plugin.

    Returns:
        DeepSpeed, or MS-AMP's module.

    Raises:
        ImportError: The plugin selects MS-AMP, which is not installed.
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


def add_half_precision_casts(engine: Any) -> None:
    """Cast inputs of an engine's model to half precision and its outputs to float32, as autocast does.

    Args:
        engine: The engine; an engine in float32 stays as it is.
    """
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16 if engine.bfloat16_enabled() else None
    if dtype is None:
        return

    def cast_inputs(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    engine.module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    engine.module.register_forward_hook(_outputs_to_float32)
    _undo_trial_step(engine.optimizer)


@torch.no_grad()
def _undo_trial_step(optimizer: Any) -> None:
    """Undo the step on zeros with which DeepSpeed's stage 0 allocates states (unfused_optimizer.py of 0.19).

    That step counts in Adam's bias correction, which makes the first real step a fifth too small, and decays weights.
    """
    if not hasattr(optimizer, "initialize_optimizer_states"):
        return
    masters = getattr(optimizer, "fp32_groups_flat", None) or getattr(optimizer, "fp32_groups", None)
    halves = getattr(optimizer, "fp16_groups_flat", None) or getattr(optimizer, "fp16_groups", None)
    if not masters or not halves:
        return  # ZeRO's optimizers have no such step
    optimizer.optimizer.state.clear()
    for master, half in zip(_tensors(masters), _tensors(halves), strict=True):
        master.copy_(half)


def _tensors(groups: Any) -> list[torch.Tensor]:
    return [tensor for group in groups for tensor in ([group] if isinstance(group, torch.Tensor) else group)]


def _outputs_to_float32(_module: Any, _args: Any, outputs: Any) -> Any:
    return convert_to_fp32(outputs)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return recursively_apply(lambda tensor: tensor.to(dtype), values, test_type=_is_float32)


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
