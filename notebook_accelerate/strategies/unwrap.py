"""Removes the wrappers of a prepared model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from notebook_accelerate.precision import restore_forward
from notebook_accelerate.torch_internals import compiled_module, is_compiled

_WRAPPERS: tuple[type[torch.nn.Module], ...] = (DistributedDataParallel, DataParallel)
_LAZY_WRAPPERS = {
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
}


def _is_wrapper(model: torch.nn.Module) -> bool:
    # FSDP and DeepSpeed take a second to import; a model that they wrapped has imported them.
    return isinstance(model, _WRAPPERS) or any(
        (module := sys.modules.get(name)) is not None and isinstance(model, getattr(module, kind, ()))
        for name, kind in _LAZY_WRAPPERS.items()
    )


def is_compiled_module(module: Any) -> bool:
    """Tell whether `torch.compile` returned a module.

    Args:
        module: A module.

    Returns:
        True for compiled modules.
    """
    return isinstance(module, torch.nn.Module) and is_compiled(module)


def without_compile(model: Any) -> Any:
    """Return the module inside a compiled one; any other model itself.

    Args:
        model: A model, compiled or not.
    """
    while is_compiled_module(model):
        model = compiled_module(model)
    return model


def ddp_inside(model: Any) -> DistributedDataParallel | None:
    """Find the DDP module in a prepared model.

    Args:
        model: A prepared model, compiled or not.

    Returns:
        The DDP module, or None.
    """
    inner = without_compile(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> torch.nn.Module:
    """Remove the wrappers that `prepare` added to a model.

    Args:
        model: The prepared model.
        keep_fp32_wrapper: Keep its forward in mixed precision; otherwise the original forward is restored, in place.
        keep_torch_compile: Return a compiled model for a compiled model.
        recursive: Also remove the wrappers of submodules.

    Returns:
        The model.
    """
    compiled, inner = compiled_around(model), _unwrapped(model)
    if recursive:
        for module in list(inner.modules()):
            for name, child in list(module.named_children()):
                setattr(module, name, _unwrapped(child))
    if not keep_fp32_wrapper:
        restore_forward(inner)
    if compiled is not None and keep_torch_compile:
        if compiled_module(compiled) is inner:
            return compiled  # type: ignore[no-any-return]
        # A second compiled module with the same settings, around the inner model; the prepared one does not change.
        again: Any = type(compiled)(inner, compiled.dynamo_ctx)
        return again  # type: ignore[no-any-return]
    return inner


def compiled_around(model: torch.nn.Module) -> Any:
    """Return the innermost of the compiled modules around a model, which can be inside other wrappers.

    Args:
        model: A model.

    Returns:
        What `torch.compile` returned; None if the model is not compiled.
    """
    compiled = None
    while _is_wrapper(model) or is_compiled_module(model):
        compiled = model if is_compiled_module(model) else compiled
        model = compiled_module(model) if is_compiled_module(model) else model.module  # type: ignore[assignment]
    return compiled


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while _is_wrapper(model) or is_compiled_module(model):
        model = compiled_module(model) if is_compiled_module(model) else model.module  # type: ignore[assignment]
    return model
