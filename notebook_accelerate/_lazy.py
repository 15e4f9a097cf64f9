"""Modules that only re-export: each name is imported from its home on first use (PEP 562)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from notebook_accelerate._collection import uncollected


class _LazyModule(ModuleType):
    """A module whose exports are not replaced by submodules of the same name: utils.tqdm is both."""

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule sets it as an attribute of its package.
        if isinstance(value, ModuleType) and name in self.__all__:
            return
        if name in exports(self.__name__).homes:
            replace_everywhere(import_module(exports(self.__name__).homes[name]), name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickle by name, as cloudpickle does with plain modules: functions of cells refer to this package."""
        return import_module, (self.__name__,)


def replace_everywhere(home: ModuleType, name: str, value: object) -> None:
    """Bind a function's name to another value in its home and in all modules of this package that imported it.

    Libraries replace functions of Accelerate where they find them; the callers here look in their own modules.

    Args:
        home: The module that defines the name.
        name: The name.
        value: The new value.
    """
    original = getattr(home, name, value)
    if original is value or not (isinstance(original, FunctionType) or isinstance(value, FunctionType)):
        return  # an object in the place of a function, such as a mock, is replaced when the function is put back
    for module in _modules_of_this_package():
        if vars(module).get(name) is original:
            vars(module)[name] = value


def _modules_of_this_package() -> list[ModuleType]:
    package = __name__.partition(".")[0]
    return [
        module
        for key, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (key == package or key.startswith(f"{package}."))
    ]


def reexport(module_name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a module that re-exports its type-checking imports.

    Type checkers see ordinary imports; at run time the same lines, read from the source, are the table of names. (The
    package lazy_loader reads stub files for this.) Such a module reads::

        if TYPE_CHECKING:
            from notebook_accelerate.hardware.batch_size_search import release_memory as release_memory
        else:
            __getattr__, __dir__, __all__ = reexport(__name__)

    ``from <this package> import submodule as submodule`` makes a submodule an attribute, which is not in ``__all__``;
    ``import *`` re-exports what another such module does, or what an ordinary module defines.

    Args:
        module_name: The module's ``__name__``.

    Returns:
        The functions and the list, in this order.
    """
    homes, submodules = exports(module_name)
    sys.modules[module_name].__class__ = _LazyModule

    def load(name: str) -> Any:
        if name not in homes and name not in submodules:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        with uncollected():
            home = import_module(homes.get(name, f"{module_name}.{name}"))
        value = getattr(home, name) if name in homes else home
        setattr(sys.modules[module_name], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *homes, *submodules})

    return load, listing, sorted(homes)


class Exports(NamedTuple):
    """What a module re-exports: the module that defines each name, and its own submodules."""

    homes: dict[str, str]
    submodules: set[str]


@cache
def exports(module_name: str) -> Exports:
    """Read the imports under ``if TYPE_CHECKING:`` of a module that re-exports; of others, the names they define."""
    source = _source(module_name)
    if "reexport(__name__)" not in source:
        return Exports(dict.fromkeys(_DEFINITION.findall(source), module_name), set())
    homes: dict[str, str] = {}
    submodules: set[str] = set()
    for statement in _type_checking_imports(source):
        home = statement.module or ""
        names = [alias.name for alias in statement.names]
        if home == module_name:
            submodules.update(names)
        elif names == ["*"]:
            homes.update(exports(home).homes)
            if home.startswith(f"{module_name}."):
                submodules.add(home.rpartition(".")[2])
        else:
            homes.update(dict.fromkeys(names, home))
    return Exports(homes, submodules)


# Matches at the start of a line: parsing hardware.feature_checks would take 4 ms.
_DEFINITION = re.compile(r"^(?:class |def |(?=\w+ = ))([A-Za-z]\w*)", re.MULTILINE)


def _source(module_name: str) -> str:
    spec = find_spec(module_name)
    loader: Any = None if spec is None else spec.loader  # importlib.abc.InspectLoader takes 15 ms to import
    source: str | None = loader.get_source(module_name) if hasattr(loader, "get_source") else None
    if source is None:
        raise ImportError(f"{module_name} reads its names from its source; install the package with its .py files")
    return source


def _type_checking_imports(source: str) -> list[ast.ImportFrom]:
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    return [statement for block in blocks for statement in block.body if isinstance(statement, ast.ImportFrom)]
