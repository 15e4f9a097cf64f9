"""Which modules of a model FSDP handles as units, which it leaves alone, and which share a parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Policy = Callable[..., Any]
_PARTS_OF_NAMES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers add to it.

    Args:
        name: The full name in a wrapped model.
    """
    for part in _PARTS_OF_NAMES:
        name = name.replace(part, "")
    return name


def units_of(model: nn.Module, policy: Policy | None) -> list[nn.Module]:
    """List the modules that become units of their own, inner ones first.

    A module that shares a parameter with a module outside of it is left to the unit around both: a parameter belongs
    to one unit, and taking it into two would silently untie it.

    Args:
        model: The model; it is not among the units itself.
        policy: As torch's FSDP takes it: called with module, recurse and nonwrapped_numel; None means no units.

    Returns:
        The modules.
    """
    units: list[nn.Module] = []
    if policy is None:
        return units
    _visit(model, policy, units)
    shared = _owners_of_shared(model)
    kept = [unit for unit in units if unit is not model]
    return [unit for unit in kept if not any(_splits(set(unit.modules()), owners) for owners in shared)]


def _visit(module: nn.Module, policy: Policy, units: list[nn.Module]) -> int:
    """Decide for everything below a module, then for itself, as torch's FSDP does.

    Returns:
        How many elements of its parameters have become part of units.
    """
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(_visit(child, policy, units) for child in module.children())
    containers = (nn.ModuleList, nn.ModuleDict)  # they are never called, so nothing would gather their parameters
    if isinstance(module, containers) or not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        return wrapped
    if not any(module is unit for unit in units):
        units.append(module)
    return numel


def _owners_of_shared(model: nn.Module) -> list[set[nn.Module]]:
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(module)
    return [group for group in owners.values() if len(group) > 1]


def _splits(inside: set[nn.Module], owners: set[nn.Module]) -> bool:
    return bool(owners & inside) and not owners <= inside


def tied_names(model: nn.Module) -> list[list[str]]:
    """List the names of parameters that are one, for each that has several.

    Args:
        model: The model.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, groups: Iterable[list[str]]) -> None:
    """Make parameters one again that were.

    Args:
        model: The model.
        groups: As from `tied_names`.
    """
    owners = {plain_name(name): module for name, module in model.named_modules()}
    for first, *others in groups:
        parameter = getattr(owners[first.rpartition(".")[0]], first.rpartition(".")[2])
        for name in others:
            setattr(owners[name.rpartition(".")[0]], name.rpartition(".")[2], parameter)


def keeping_ties(make: Callable[[nn.Module], Any], model: nn.Module) -> Callable[[nn.Module], Any]:
    """Make a function that gives modules their memory keep shared parameters shared.

    Args:
        make: Called with each module.
        model: The model, its parameters shared as they should be.

    Returns:
        The function to use instead.
    """
    owners: dict[tuple[int, str], int] = {
        (id(module), name): id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    made: dict[int, nn.Parameter] = {}

    def made_once(module: nn.Module) -> Any:
        result = make(module)
        for name, parameter in list(module._parameters.items()):
            key = owners.get((id(module), name))
            if key is not None and parameter is not None:
                setattr(module, name, made.setdefault(key, parameter))
        return result

    return made_once


def ignored_of(model: nn.Module, given: Iterable[nn.Module] | str | None) -> list[nn.Module]:
    """List the modules that FSDP leaves alone.

    Args:
        model: The model.
        given: The modules, or a regular expression that their full names match wholly.

    Raises:
        ValueError: The expression matches nothing.
    """
    if not isinstance(given, str):
        return list(given or ())
    found = [module for name, module in model.named_modules() if re.fullmatch(given, name)]
    if not found:
        raise ValueError(f"ignored_modules={given!r} matches no module of {type(model).__name__} by its full name")
    return found


def checkpoint_activations(model: nn.Module, units: list[nn.Module], offload: bool) -> list[nn.Module]:
    """Make units compute their activations again in backward, in place.

    Args:
        model: The model.
        units: As from `units_of`.
        offload: Whether the inputs of units are kept in main memory.

    Returns:
        The wrapped units, in the same order.

    Raises:
        ValueError: There are no units.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        checkpoint_wrapper,
        offload_wrapper,
    )

    if not units:
        raise ValueError(
            "activation_checkpointing=True computes units again, and this model is one unit; say which modules are "
            "units: FullyShardedDataParallelPlugin(auto_wrap_policy='transformer_based_wrap', "
            'transformer_cls_names_to_wrap=["Block"], activation_checkpointing=True)'
        )
    wrappers: dict[nn.Module, nn.Module] = {}
    for unit in units:
        wrapped = checkpoint_wrapper(unit, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        wrappers[unit] = offload_wrapper(wrapped) if offload else wrapped
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in wrappers and wrappers[child] is not parent:
                setattr(parent, name, wrappers[child])
    return list(wrappers.values())


def upcast(model: nn.Module) -> bool:
    """Make a model's trainable parameters of low precision float32, in place; tied ones stay tied.

    Args:
        model: The model.

    Returns:
        Whether there was one.
    """
    low = [p for p in model.parameters() if p.requires_grad and p.dtype in {torch.float16, torch.bfloat16}]
    for parameter in low:
        parameter.data = parameter.data.float()
    return bool(low)
