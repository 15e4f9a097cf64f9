"""Modules that only re-export names, and import each name from the module that defines it on first use (PEP 562)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from notebook_accelerate._collection import gc_paused


class _LazyModule(ModuleType):
    """A module that imports its exports on first use. Replacing a name here also replaces it in the defining module."""

    def __getattr__(self, name: str) -> Any:
        homes, submodules = exports(self.__name__)
        home = homes.get(name, f"{self.__name__}.{name}" if name in submodules else self.__name__)
        if home == self.__name__:
            raise AttributeError(f"module {home!r} has no attribute {name!r}")
        with gc_paused():
            module = import_module(home)
        value = getattr(module, name) if name in homes else module
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule sets an attribute of its package, which must not hide an export: utils.tqdm is both.
        if isinstance(value, ModuleType) and name in exports(self.__name__).homes:
            return
        if name in exports(self.__name__).homes:
            replace_everywhere(import_module(exports(self.__name__).homes[name]), name, value)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        homes, submodules = exports(self.__name__)
        return sorted({*vars(self), *homes, *submodules})

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickle the module by name, as cloudpickle does for plain modules.

        Functions defined in cells may refer to this package.
        """
        return import_module, (self.__name__,)


def replace_everywhere(home: ModuleType, name: str, value: object) -> None:
    """Bind a name to another value in the module that defines it, and in all modules of this package that imported it.

    Libraries replace functions of Accelerate in the module that exports them, but callers in this package look
    functions up in their own modules.

    Args:
        home: The module that defines the name.
        name: The name to bind.
        value: The new value of that name.
    """
    original = getattr(home, name, value)
    if original is value or not (isinstance(original, FunctionType) or isinstance(value, FunctionType)):
        return  # Only functions, and objects in their place, such as mocks, are replaced elsewhere.
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


def reexport(module_name: str, without: Collection[str] = ()) -> None:
    """Make a module re-export its type-checking imports, and list its exports in ``__all__``.

    Type checkers see ordinary imports. At run time, the same lines, read from the source, are the table of names. (The
    package lazy_loader reads stub files for this purpose.) The module looks like this::

        if TYPE_CHECKING:
            from notebook_accelerate.batch_size_search import release_memory as release_memory

        reexport(__name__)

    ``from <this package> import submodule as submodule`` makes a submodule an attribute that is not in ``__all__``.
    ``import *`` re-exports the exports of another module of this kind, or the definitions of an ordinary module. As in
    type checking, an import without ``as`` is not re-exported. An import outside the block, for the module's own use,
    may be re-exported. Public definitions below the call are exports, too.

    Args:
        module_name: The module's ``__name__``.
        without: Exports that can only be imported by name. They are not in ``__all__``.
    """
    module: Any = sys.modules[module_name]
    module.__all__ = sorted(exports(module_name).homes.keys() - set(without))
    module.__class__ = _LazyModule


class Exports(NamedTuple):
    """The exports of a module: the module that defines each name, and its own submodules."""

    homes: dict[str, str]
    submodules: set[str]


@cache
def exports(module_name: str) -> Exports:
    """Read a module's exports from its source: its definitions, and its re-exports if it calls `reexport`."""
    source = _source(module_name)
    head, call, body = source.partition(_CALL)
    homes = dict.fromkeys(_DEFINITION.findall(body if call else source), module_name)
    submodules: set[str] = set()
    for statement in _imports(head) if call else ():
        home = statement.module or ""
        names = [alias.name for alias in statement.names if alias.asname]
        if home == module_name:
            submodules.update(names)
        elif statement.names[0].name == "*":
            homes.update(exports(home).homes)
            if home.startswith(f"{module_name}."):
                submodules.add(home.rpartition(".")[2])
        else:
            homes.update(dict.fromkeys(names, home))
    return Exports(homes, submodules)


_CALL = "\nreexport(__name__"
# Matches definitions at the start of a line. Parsing all of utils.imports would take 4 ms.
_DEFINITION = re.compile(r"^(?:class |def |(?=\w+ = ))([A-Za-z]\w*)", re.MULTILINE)


def _source(module_name: str) -> str:
    spec = find_spec(module_name)
    loader: Any = None if spec is None else spec.loader  # Importing importlib.abc.InspectLoader takes 15 ms.
    source: str | None = loader.get_source(module_name) if hasattr(loader, "get_source") else None
    if source is None:
        raise ImportError(f"{module_name} reads its names from its source; install the package with its .py files")
    return source


def _imports(source: str) -> list[ast.ImportFrom]:
    found: list[ast.stmt] = []
    for node in ast.parse(source).body:
        found += node.body if isinstance(node, ast.If) else [node]
    return [statement for statement in found if isinstance(statement, ast.ImportFrom)]
