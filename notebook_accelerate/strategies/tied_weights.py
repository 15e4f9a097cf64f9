"""Parameters that several modules of a model share, and how they stay shared while a model is prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from notebook_accelerate.strategies.parameter_names import plain_name


def tied_names(model: nn.Module) -> list[list[str]]:
    """List the plain names of each parameter that has several.

    Args:
        model: The model.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, groups: Iterable[list[str]]) -> None:
    """Share parameters again that were shared before.

    Args:
        model: The model.
        groups: As from `tied_names`.
    """
    owners = {plain_name(name): module for name, module in model.named_modules()}
    for first, *others in groups:
        parameter = getattr(owners[first.rpartition(".")[0]], first.rpartition(".")[2])
        for name in others:
            setattr(owners[name.rpartition(".")[0]], name.rpartition(".")[2], parameter)


def keep_ties(make: Callable[[nn.Module], Any], model: nn.Module) -> Callable[[nn.Module], Any]:
    """Make a function that allocates modules keep shared parameters shared.

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
