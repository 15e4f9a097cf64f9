"""Choose the modules of a model that FSDP shards as units, and the modules that it ignores."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.accelerator_arguments import Setup

Policy = Callable[..., Any]


def choose_units(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> tuple[list[nn.Module], list[nn.Module]]:
    """Choose the units of a model, and apply activation checkpointing to them in place.

    Args:
        model: The model before it is sharded.
        plugin: The plugin with the user's settings.

    Returns:
        The units, inner ones first, and the modules that FSDP ignores.

    Raises:
        ValueError: A setting of the plugin does not fit the model.
    """
    ignored = find_ignored_modules(model, plugin.ignored_modules)
    units = [unit for unit in find_units(model, plugin.policy_for(model)) if unit not in set(ignored)]
    if plugin.activation_checkpointing:
        units = checkpoint_activations(model, units, bool(plugin.activation_checkpointing_offload))
    return units, ignored


def find_units(model: nn.Module, policy: Policy | None) -> list[nn.Module]:
    """List the modules that become separate units, inner ones first.

    A parameter can belong to only one unit, and a second unit would silently untie it. A module that shares a parameter
    with a module outside of it therefore does not become a unit, but belongs to the unit around both modules.

    Args:
        model: The model, which is not one of the units itself.
        policy: A policy of torch's FSDP, called with module, recurse and nonwrapped_numel. If None, there are no units.

    Returns:
        The modules that become units.
    """
    units: list[nn.Module] = []
    if policy is None:
        return units
    _visit(model, policy, units)
    shared = _owners_of_shared(model)
    kept = [unit for unit in units if unit is not model]
    return [unit for unit in kept if not any(_splits(set(unit.modules()), owners) for owners in shared)]


def _visit(module: nn.Module, policy: Policy, units: list[nn.Module]) -> int:
    """Apply the policy to a module's descendants, then to the module itself, as torch's FSDP does.

    Returns:
        The number of elements in the module's parameters that now belong to units.
    """
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(_visit(child, policy, units) for child in module.children())
    containers = (nn.ModuleList, nn.ModuleDict)  # These are never called, so nothing would gather their parameters.
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


def find_ignored_modules(model: nn.Module, given: Iterable[nn.Module] | str | None) -> list[nn.Module]:
    """List the modules that FSDP ignores.

    Args:
        model: The model to search.
        given: The modules, or a regular expression that matches their full names.

    Raises:
        ValueError: The regular expression does not match any module.
    """
    if not isinstance(given, str):
        return list(given or ())
    found = [module for name, module in model.named_modules() if re.fullmatch(given, name)]
    if not found:
        raise ValueError(f"ignored_modules={given!r} matches no module of {type(model).__name__} by its full name")
    return found


def checkpoint_activations(model: nn.Module, units: list[nn.Module], offload: bool) -> list[nn.Module]:
    """Make units recompute their activations in the backward pass. The model is changed in place.

    If there are no units, nothing is recomputed, and a warning is issued once.

    Args:
        model: The model that contains the units.
        units: The units, as returned by `find_units`.
        offload: Whether to keep the inputs of units in CPU memory.

    Returns:
        The wrapped units in the same order.
    """
    from notebook_accelerate.torch_internals import CheckpointImpl, checkpoint_wrapper, offload_wrapper

    if not units:
        warn_once(
            "activation_checkpointing=True recomputes units, but this model is one unit, so nothing is recomputed; "
            "name the classes of units: FullyShardedDataParallelPlugin(auto_wrap_policy='transformer_based_wrap', "
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


def resolved_plugin(setup: Setup) -> FullyShardedDataParallelPlugin:
    """Return a copy of the user's plugin, with torch's objects in place of their names.

    Args:
        setup: The settings of the `Accelerator`.

    Raises:
        ValueError: `cpu_offload` or `mixed_precision_policy` belongs to the other version of FSDP.
    """
    plugin: FullyShardedDataParallelPlugin = copy.copy(setup.state.fsdp_plugin)
    dtype: Any = setup.precision.compute_dtype
    if plugin.mixed_precision_policy is not None or dtype is not None:
        plugin.set_mixed_precision(dtype)
    plugin.validate_cpu_offload()
    return plugin
