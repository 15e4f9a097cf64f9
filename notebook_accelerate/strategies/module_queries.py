"""Properties of a model's modules: compiled, sharded, repeated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from notebook_accelerate.strategies.unwrap import is_compiled_module
from notebook_accelerate.torch_internals import is_compiled_in_place

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Tell whether a model or a submodule was compiled with ``torch.compile``.

    Args:
        module: A model.
    """
    return any(is_compiled_module(child) or is_compiled_in_place(child) for child in module.modules())


def is_repeated_blocks(module: torch.nn.Module) -> bool:
    """Tell whether a module is a list of blocks of one class, for which one compilation is enough.

    Args:
        module: A module.
    """
    if not isinstance(module, torch.nn.ModuleList) or not len(module):
        return False
    return all(type(block) is type(module[0]) for block in module)


def has_repeated_blocks(module: torch.nn.Module) -> bool:
    """Tell whether a model has a list of blocks of one class, at any depth.

    Args:
        module: A model.
    """
    return any(is_repeated_blocks(child) for child in module.modules())


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether a model has parameters that are distributed over a device mesh.

    Args:
        model: The model.
    """
    return any(is_dtensor(parameter) for parameter in model.parameters())


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, without importing their module: it takes a second.

    Args:
        tensor: The tensor. Where the module is not imported, none is a DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Return the number of ranks that transformers split a model over; None if it is not split.

    Args:
        model: The model.
    """
    size = getattr(model, "tp_size", None)
    return size if isinstance(size, int) else None


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of a model, children before their parents, the model last.

    Args:
        model: The model.
        return_fqns: Whether to return pairs of full name and module.

    Returns:
        Modules, or pairs; a module that is shared appears once.
    """
    named = list(_bottom_up(model, "", set()))
    return named if return_fqns else [module for _, module in named]


def _bottom_up(module: torch.nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module's descendants in the order of registration, then the module; each one once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile the repeated blocks of a model one by one, so that one compilation serves all of them; the rest whole.

    Args:
        module: A model, compiled in place; without repeated blocks it is compiled as a whole.
        compile_kwargs: As for `torch.compile`.

    Returns:
        The model; its type and the names of its parameters do not change.
    """
    if not has_repeated_blocks(module):
        module.compile(**compile_kwargs)
        return module
    for child in module.children():
        if is_repeated_blocks(module):
            child.compile(**compile_kwargs)
        else:
            compile_regions(child, **compile_kwargs)
    return module


compile_regions_deepspeed = compile_regions
compile_regions_fsdp2 = compile_regions
