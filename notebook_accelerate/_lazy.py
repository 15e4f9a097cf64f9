"""Modules that only re-export: names are loaded from where they live when they are asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGE = __name__.rpartition(".")[0]


class _LazyModule(ModuleType):
    """A door with a name that one of its submodules has too: the name stays what the door says it is."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule sets it as an attribute of its package; utils.tqdm is a function and a module.
        if isinstance(value, ModuleType) and name in self.__all__:
            return
        super().__setattr__(name, value)


def attach(
    module_name: str, homes: Mapping[str, Iterable[str]], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the module-level functions of a door.

    Args:
        module_name: The door's ``__name__``.
        homes: Names by the module that has them, below this package: ``{"config.enums": ("RNGType",)}``.
        submodules: The door's own submodules, which become attributes on first use too.

    Returns:
        ``__getattr__``, ``__dir__`` and ``__all__`` of the door.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    inner = frozenset(submodules)
    if inner & home_of.keys():
        sys.modules[module_name].__class__ = _LazyModule

    def load(name: str) -> Any:
        if name in home_of:
            value = _value(home_of[name], name, module_name)
        elif name in inner:
            value = import_module(f"{module_name}.{name}")
        else:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        setattr(sys.modules[module_name], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *home_of, *inner})

    return load, listing, sorted(home_of)


def _value(home: str, name: str, door: str) -> Any:
    path = f"{PACKAGE}.{home}"
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        # Only a room that is missing itself is a missing name; a package it needs is the caller's to know.
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise AttributeError(f"module {door!r} has no attribute {name!r}: there is no {path}") from error
    return getattr(module, name)


__all__ = ["attach"]
