"""The names of notebook cells: which ones a function needs in a rank that is not forked from the kernel.

cloudpickle detects the globals that a function's code loads. This module adds the names that code reads in other ways.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any

from notebook_accelerate.telemetry.error_text import describe_error

Reduced = tuple[Any, ...]
"""The result of a reducer: callable, arguments, state, None, None, and the callable that sets the state."""
_MODULE_NAMES = ("__name__", "__package__", "__file__")


def is_class(value: object) -> bool:
    """Return whether a value is a class; unlike ``isinstance``, this runs no code of the value."""
    return issubclass(type(value), type)


def names_of_main() -> dict[str, Any]:
    """Return the globals of ``__main__``, the namespace of the user's cells."""
    return vars(sys.modules["__main__"])


def renew_main() -> None:
    """Replace ``__main__`` with an empty module for the names of the user's cells."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main


def owner_in_main(value: Any) -> Any:
    """Return the value under the first part of a class's or function's name in ``__main__``.

    Returns:
        ``value`` itself, or the class that it is nested in; None if it is not found by its name.
    """
    if getattr(value, "__module__", None) != "__main__":
        return None
    first, *rest = value.__qualname__.split(".")
    owner = found = names_of_main().get(first)
    for name in rest:
        found = vars(found).get(name) if is_class(found) else None
    return owner if found is value else None


_WAYS = frozenset(("globals", "eval", "exec", "__main__", "modules", "import_module", "__import__"))
"""Code that uses one of these names may read names of ``__main__`` from strings, or as attributes."""
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_READS_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_LOADS = _READS | _READS_ATTRIBUTE | {"LOAD_CONST"}
_NO_EFFECT = frozenset(("PUSH_NULL", "EXTENDED_ARG", "CACHE"))


def undetected_names(code: CodeType) -> set[str]:
    """Return the names of ``__main__`` that a function reads in ways that cloudpickle does not detect.

    These are the bodies of classes in functions, ``globals()["name"]``, ``eval("name + 1")``, ``from __main__ import
    name``, and attributes of ``__main__`` or ``sys.modules[__name__]``.
    """
    codes = [code]
    for each in codes:
        codes += [value for value in each.co_consts if type(value) is CodeType]
    if all(each.co_flags & inspect.CO_OPTIMIZED and _WAYS.isdisjoint(each.co_names) for each in codes):
        return set()
    uses = _Uses()
    for each in codes:
        uses.add(each)
    main = names_of_main()
    return {name for name in uses.undetected(main) if name in main and not name.startswith("__")}


class _Uses:
    """How code uses names. ``co_names`` does not distinguish a global from an attribute, as in ``model.eval()``."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._read_in_bodies: set[str] = set()
        self._attributes: set[str] = set()
        self._imported: set[str] = set()
        """Names that are imported from ``__main__``."""
        self._texts: set[str] = set()
        self._has_main = False
        """Whether the code gets the module ``__main__``."""

    def add(self, code: CodeType) -> None:
        """Add what one code object uses; those in its constants are not included."""
        self._texts.update(_texts(code.co_consts))
        stored: set[str] = set()  # in the body of a class, names are also its attributes
        loaded: list[Any] = []
        """Operands of the last instructions, if they only loaded values."""
        for each in dis.get_instructions(code):
            name = each.argval
            if each.opname in _READS:
                self._read.add(name)
                if not code.co_flags & inspect.CO_OPTIMIZED and name not in stored:
                    self._read_in_bodies.add(name)
            elif each.opname in _READS_ATTRIBUTE:
                self._attributes.add(name)
            elif each.opname == "STORE_NAME":
                stored.add(name)
            elif each.opname == "IMPORT_NAME" and name == "__main__":
                self._imported.update(loaded[-1] or ())  # in "import __main__", it is None
                self._has_main |= loaded[-1] is None
            if each.opname in _LOADS:
                loaded.append(name)
                self._has_main |= name in ("__main__", "__name__") and _looks_up_module(loaded)
            elif each.opname not in _NO_EFFECT:
                loaded.clear()

    def undetected(self, main: dict[str, Any]) -> set[str]:
        """Return the names that cloudpickle does not detect; some of them may be texts with another meaning."""
        found = self._read_in_bodies | self._imported
        if self._has_main:
            found |= self._attributes | self._texts
        builtin = self._read - main.keys()  # a notebook may have its own eval
        if "globals" in builtin:
            found |= self._texts
        if builtin & {"eval", "exec"}:
            found |= {name for text in self._texts for name in _names_in_source(text)}
        return found


def _looks_up_module(loaded: list[Any]) -> bool:
    """Return whether the last of the loaded values is the argument of ``sys.modules`` or ``import_module``."""
    return loaded[-2:-1] in (["modules"], ["import_module"], ["__import__"]) or loaded[-3:-1] == ["modules", "get"]


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if type(value) is str:
            yield value
        elif isinstance(value, (tuple, frozenset)):
            yield from _texts(value)


def _names_in_source(text: str) -> set[str]:
    try:
        return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python source
        return set()


class MainNames(dict[str, Any]):
    """The globals of the functions of cells in a pickle; its reader uses the globals of ``__main__``.

    Args:
        omitted: Names that could not be pickled, each with the reason, for ``explain_omitted``.
    """

    def __init__(self, omitted: dict[str, str]) -> None:
        main = names_of_main()
        super().__init__({name: main[name] for name in _MODULE_NAMES if name in main})
        self._omitted = omitted

    def __reduce__(self) -> Reduced:
        return _enter_names, (dict(self), self._omitted)


_omitted: dict[str, str] = {}
"""Names that the kernel could not send to this process, each with the reason."""


def _enter_names(module_names: dict[str, Any], omitted: dict[str, str]) -> dict[str, Any]:
    names = names_of_main()
    names.update(module_names)
    _omitted.update(omitted)
    return names


def explain_omitted(error: BaseException) -> None:
    """Add a note to an error about a missing name if the notebook has that name but could not send it."""
    text = describe_error(error)
    of_main = issubclass(type(error), (ImportError, AttributeError)) and "'__main__'" in text
    if not of_main and not issubclass(type(error), (NameError, KeyError)):
        return
    for name, reason in _omitted.items():
        if name not in names_of_main() and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            note = f"The notebook has {name!r}, but it could not be sent to this rank: {reason}"
            with suppress(Exception):  # classes of the user
                error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]


def put_into_main(value: Any, state: Reduced) -> None:
    """Set the state of a class or function, and enter it in ``__main__``."""
    set_state, inner, owner = state
    set_state(value, inner)
    if value is owner:
        names_of_main()[value.__qualname__] = value


# The sources of notebook cells, which a launch sends to its ranks for tracebacks.

MAX_SOURCE_BYTES = 8 << 20
"""Cell sources beyond this are omitted, the oldest first."""


def cell_sources() -> dict[str, str]:
    """Return the sources of notebook cells by file name, so that tracebacks elsewhere show their lines."""
    found: dict[str, str] = {}
    size = 0
    for name, entry in reversed(list(linecache.cache.items())):
        if not is_cell(name) or len(entry) < 3:
            continue
        source = "".join(entry[2])
        size += len(source)
        if size > MAX_SOURCE_BYTES:
            break
        found[name] = source
    return found


NAMED_CELL = "Cell In["
"""Prefix of the file name of another notebook's cell, of which this kernel has no file."""


def is_cell(filename: str) -> bool:
    """Whether a code object's file name is that of a notebook cell or a prompt."""
    return "ipykernel_" in filename or filename.startswith(("<ipython-input", "<python-input", "<stdin", NAMED_CELL))


def install_sources(sources: dict[str, str]) -> None:
    """Add ``sources`` to this process's linecache, for tracebacks."""
    for name, source in sources.items():
        # No loader and no modification time: linecache.checkcache leaves such entries alone.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
