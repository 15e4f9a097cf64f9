"""One walk over a model's modules, in the order of `named_modules`, without its cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Tree:
    """A model's modules in depth-first order; a module that is reached twice is there twice.

    Attributes:
        names: Dotted names; the model's own is "".
        modules: The modules.
        parents: Positions of their parents; -1 for the model.
        ends: Position after the last module inside each: ``names[i + 1:ends[i]]`` are inside ``names[i]``.
    """

    names: list[str] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def tree_of(model: torch.nn.Module) -> Tree:
    """Walk over a model.

    Args:
        model: The model, on any device.

    Returns:
        Its modules; made in time linear in their number (`named_modules` takes a step per module and level).
    """
    tree = Tree([""], [model], [-1], [1])
    names, modules, parents, ends = tree.names, tree.modules, tree.parents, tree.ends
    # One iterator per level, so that a module without children is four appends, and no call.
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
    """Join a module's dotted name and a name inside it."""
    return f"{prefix}.{name}" if prefix else name


def prefixes(name: str) -> list[str]:
    """List the names of everything a dotted name is in, and itself, from the outside: "", "a", "a.b"."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def submodule(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Resolve a tensor's dotted name.

    Args:
        module: Where the name starts.
        name: For instance ``layers.0.weight``.

    Returns:
        The module that has the tensor, and the last part of the name.

    Raises:
        AttributeError: There is no such module.
    """
    *path, last = name.split(".")
    for part in path:
        found: Any = getattr(module, part)
        if found is None:
            raise AttributeError(f"{module.__class__.__name__} has no submodule named {part!r} (it is None)")
        module = found
    return module, last
