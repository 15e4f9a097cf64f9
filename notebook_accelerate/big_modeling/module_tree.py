"""Lists a model's modules in the order of `named_modules`, in linear time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from notebook_accelerate.torch_internals import uncompiled_name


@dataclass
class ModuleTree:
    """A model's modules in depth-first order; a shared module is listed once per name.

    Attributes:
        names: Dotted names; the model's own is "".
        modules: The modules.
        parents: Indices of their parents; -1 for the model.
        ends: Index after the last descendant of each: ``names[i + 1:ends[i]]`` are the descendants of ``names[i]``.
    """

    names: list[str] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def build_tree(model: torch.nn.Module) -> ModuleTree:
    """List the modules of a model.

    Args:
        model: The model, on any device.

    Returns:
        Its modules, in time linear in their number (`named_modules` takes a step per module and level).
    """
    tree = ModuleTree([""], [model], [-1], [1])
    names, modules, parents, ends = tree.names, tree.modules, tree.parents, tree.ends
    # One iterator per level: a module without children costs four appends, and no call.
    levels = [("", 0, iter(model._modules.items()))]
    while levels:
        prefix, parent, children = levels[-1]
        for key, child in children:
            if child is None:
                continue
            names.append(prefix + key)
            modules.append(child)
            parents.append(parent)
            ends.append(len(names))
            if child._modules:
                index = len(names) - 1
                levels.append((f"{names[index]}.", index, iter(child._modules.items())))
                break
        else:
            levels.pop()
            ends[parent] = len(names)
    return tree


def full_name(prefix: str, name: str) -> str:
    """Join a module's dotted name and the name of a member."""
    return f"{prefix}.{name}" if prefix else name


def prefixes(name: str) -> list[str]:
    """List a dotted name's prefixes, the shortest first, and the name itself: "", "a", "a.b"."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def submodule(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Resolve a tensor's dotted name.

    Args:
        module: The module that the name is relative to.
        name: For instance ``layers.0.weight``.

    Returns:
        The module that contains the tensor, and the last part of the name.

    Raises:
        AttributeError: There is no such module.
    """
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def fit_compiled_names(names: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Rename tensors to a model's names where only the modules that `torch.compile` adds are different.

    Args:
        names: Names in a file, of a model that was compiled or not, as a whole or in parts.
        wanted: The model's names.

    Returns:
        The new name of each tensor. Names that already match, or match nothing, are unchanged.
    """
    exact = set(wanted)
    by_plain = {uncompiled_name(name): name for name in exact}
    return {name: name if name in exact else by_plain.get(uncompiled_name(name), name) for name in names}


def find_tensor(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the tensor of a dotted name; None if there is none."""
    try:
        owner, key = submodule(module, name)
    except AttributeError:
        return None
    found = getattr(owner, key, None)
    return found if isinstance(found, torch.Tensor) else None
