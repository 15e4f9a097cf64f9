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
    tree = Tree()
    names, modules, parents = tree.names, tree.modules, tree.parents
    stack: list[tuple[str, torch.nn.Module, int]] = [("", model, -1)]
    while stack:
        name, module, parent = stack.pop()
        index = len(names)
        names.append(name)
        modules.append(module)
        parents.append(parent)
        children = module._modules
        if children:
            prefix = f"{name}." if name else ""
            stack += [(prefix + key, child, index) for key, child in reversed(children.items()) if child is not None]
    tree.ends = _ends(parents)
    return tree


def _ends(parents: list[int]) -> list[int]:
    ends = list(range(1, len(parents) + 1))
    for index in range(len(parents) - 1, 0, -1):
        parent = parents[index]
        ends[parent] = max(ends[parent], ends[index])
    return ends


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
