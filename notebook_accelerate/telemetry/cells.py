"""Transfer classes and names defined in notebook cells to ranks that are not forked from the kernel.

A class of a cell belongs to ``__main__``, which no other process can import, and its instances are compared with
``isinstance`` and ``==`` on both sides. Three rules ensure that a class remains a single class:

- The ``__main__`` of a rank holds the kernel's names that its function needs, so that pickle finds them there.
- Every class has a token, which is the same in all processes. A process that knows the token uses its own class.
- A class with the same name and definition is the same class, because the user has run its cell again, perhaps in a new
kernel.

Everything else is sent by value, and the reader of a value is warned if ``__main__`` has another class of that name.

cloudpickle detects the globals that a function's code loads. This module adds the names that code reads in other ways.
"""

from __future__ import annotations

import ast
import builtins
import copyreg
import dis
import enum
import gc
import hashlib
import inspect
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

from cloudpickle import cloudpickle

from notebook_accelerate._collection import instances
from notebook_accelerate.telemetry.sink import current_sink
from notebook_accelerate.telemetry.tracebacks import describe_error

_NOT_DEFINED = frozenset(
    (
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__slotnames__",
        "__weakref__",
        "_abc_impl",
        "__firstlineno__",
        "__static_attributes__",
        "__annotate__",
        "__annotate_func__",
    )
)
"""Attributes that are not compared, because they may differ between a class and its copy in another process."""
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
_METHODS = (FunctionType, property, classmethod, staticmethod)
_MAX_DIGEST_PARTS = 20_000
_MAX_DIGEST_BYTES = 4 << 20
"""Classes whose definitions or arrays are larger than this are not compared by their definitions."""


# ---- tokens

_MODULES = ("__main__", "types")  # "types" is the module of classes created by make_dataclass.
_namespace = type.__dict__["__dict__"].__get__  # Unlike vars(), this does not call the metaclass.


class _Mark:
    """Marks the time of a search. While a mark is in a young generation, so are all objects created after it."""


_last_noted: _Mark | None = None
_YOUNG = (0, 1) if sys.version_info < (3, 14) else ()
"""The garbage collector's young generations, or () on Python 3.14, which moves their objects one by one."""
_MANY = 100_000
"""If there are more young objects than this, searching all classes is faster than listing them."""


def note_classes() -> None:
    """Give each class of a cell a token. A process must call this before it forks others that pickle their instances.

    Classes created inside the cells' functions are found too. Searching all classes takes 30 ms in a kernel that has
    imported 4,000 modules, and longer after a fork, so only the classes created since the last call are searched if
    possible.
    """
    global _last_noted  # noqa: PLW0603 - one process has one collector
    mark = _Mark()
    for kind in _classes_since(_last_noted):
        if _namespace(kind).get("__module__") in _MODULES:
            with suppress(Exception):  # The user's metaclass may raise any error.
                token_of(kind)
    _last_noted = mark  # Set this last, so that a concurrent call does not rely on an unfinished one.


def _classes_since(mark: _Mark | None) -> list[type]:
    """Return the classes created after ``mark``, or all classes if it is unknown which ones are new.

    Before Python 3.14, the garbage collector and ``gc.freeze`` move either all objects of a generation to an older one
    or none. Therefore, if the mark is still in a young generation, so are all classes created after it.
    """
    recent, collections, _ = gc.get_count()
    # If the user disabled the collector or raised its threshold, the young generations may contain millions of objects.
    if mark is not None and recent + collections * gc.get_threshold()[0] < _MANY:
        young = [each for generation in _YOUNG for each in instances(type, _Mark, generation=generation)]
        if any(each is mark for each in young):
            return list(filter(is_class, young))
    return _all_classes()


def _all_classes() -> list[type]:
    """Return all classes of the process: every class is a subclass of ``object``."""
    subclasses = type.__subclasses__
    # Compare ids, because a metaclass may define equality without a hash. `found` keeps the classes alive, so that no
    # id is reused.
    found: list[type] = []
    left: list[type] = [object]
    numbers: set[int] = set()
    while left:
        kind = left.pop()
        if id(kind) not in numbers:
            numbers.add(id(kind))
            found.append(kind)
            left += subclasses(kind)
    return found


def _renew_lock() -> None:
    """Replace cloudpickle's lock in a forked process. Another thread may have held it when the process was forked."""
    cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def token_of(kind: type) -> str:
    """Return the token of a class, which identifies the class in other processes."""
    return str(cloudpickle._get_or_create_tracker_id(kind))


def known(token: str) -> type | None:
    """Return the class with this token, or None if this process does not have it."""
    found: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(token)
    return found


def find(name: str, token: str, digest: str, *, warn: bool = False) -> type | None:
    """Return this process's counterpart of a class in another process, or None if it does not have the class.

    Args:
        name: The qualified name of the class.
        token: The token of the class.
        digest: The result of ``definition_digest`` for the class in the other process.
        warn: Whether to warn if ``__main__`` has another class of that name.
    """
    ours = known(token)
    current: Any = names_of_main().get(name.partition(".")[0])
    for part in name.split(".")[1:]:
        current = vars(current).get(part) if is_class(current) else None
    if current is ours or not is_class(current):
        return ours or _made.get((name, digest))
    if (here := definition_digest(current)) == digest:
        return current  # type: ignore[no-any-return]
    if warn and current_sink() is None:  # Don't warn in a rank, which is expected to receive new definitions.
        _warn_once(name, (token, here))
    return ours or _made.get((name, digest))


_warned: set[tuple[str, str]] = set()
"""The classes that the user was warned about: their tokens, each with the digest of this process's class."""


def _warn_once(name: str, pair: tuple[str, str]) -> None:
    if pair in _warned:
        return
    _warned.add(pair)
    text = (
        f"the rank's definition of {name} differs from this notebook's: values from the rank keep theirs, and are "
        f"not instances of the current {name}. Launch again to get instances of it"
    )
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("notebook_accelerate."):
        frame = frame.f_back
    place = ("notebook_accelerate", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    # Pass an empty registry, so that the warning is shown again when the class changes again.
    warnings.warn_explicit(text, UserWarning, *place, registry={})


# ---- definitions


def definition_digest(kind: type) -> str:
    """Return a digest that is equal for two executions of the same class statement, in any process.

    Two classes with equal digests behave the same. If an attribute has no digest, the class is not equal to any other.
    """
    return _Digest().of_definition(kind)


class _NoDigestError(Exception):
    """Raised if a value is too large, or can only be compared by identity."""


class _Digest:
    """Computes digests of values from all their parts: code, constants, closures, and the state that pickle reads."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._left = _MAX_DIGEST_PARTS
        self._open: set[int] = set()
        """The ids of the values that contain the one being digested."""

    def of_definition(self, kind: type) -> str:
        """Return the digest of a class."""
        self._inside(kind, self._add_definition)
        return self._hash.hexdigest()

    def _write(self, *parts: object) -> None:
        self._left -= 1
        if self._left < 0:
            raise _NoDigestError
        self._hash.update(repr(parts).encode(errors="surrogatepass"))

    def _inside(self, value: Any, add: Callable[[Any], None]) -> None:
        if id(value) in self._open:
            self._write("itself", type(value).__name__)
            return
        self._open.add(id(value))
        add(value)
        self._open.remove(id(value))

    def _add(self, value: Any) -> None:
        if type(value) in _CONSTANTS:
            self._write(value)
        elif isinstance(value, ModuleType) or _is_imported(value):
            self._write(getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
        else:
            self._write(type(value).__module__, type(value).__qualname__)
            self._inside(value, self._add_definition if is_class(value) else self._add_parts)

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, (set, frozenset)):  # The order of a set may differ between processes.
            if len(value) > self._left:
                raise _NoDigestError
            for each in sorted(_Digest._of(part) for part in value):
                self._write(each)
        elif isinstance(value, CodeType):
            self._add_code(value)
        elif getattr(value, "nbytes", 0) > _MAX_DIGEST_BYTES:
            raise _NoDigestError
        else:
            parts = list(_parts(value))
            self._write(len(parts))
            for part in parts:
                self._add(part)

    @staticmethod
    def _of(value: Any) -> str:
        digest = _Digest()
        digest._add(value)
        return digest._hash.hexdigest()

    def _add_code(self, code: CodeType) -> None:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._write(code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_code, names)
        for value in code.co_consts:
            self._add(value)

    def _add_definition(self, kind: type) -> None:
        self._write(kind.__qualname__)
        for base in (type(kind), *kind.__bases__):
            self._add(base)
        with suppress(Exception):  # Reading annotations may evaluate them, which can raise any error.
            annotations = dict(getattr(kind, "__annotations__", ()))
            self._add_attribute(kind, "__annotations__", annotations)
        for name, value in sorted(_attributes(kind).items(), key=lambda item: str(item[0])):
            self._add_attribute(kind, name, value)

    def _add_attribute(self, kind: type, name: str, value: Any) -> None:
        before, inside = self._hash.copy(), set(self._open)
        try:
            self._write(name)
            self._add(value)
        except Exception:  # noqa: BLE001 - the user's classes may raise any error, and values may not be picklable
            self._hash, self._open = before, inside
            # Ignore other dunder names, under which libraries store values that they derive from other attributes.
            if not name.startswith("__") or callable(value):
                self._hash.update(token_of(kind).encode())


def _is_imported(value: Any) -> bool:
    """Return whether a class or function can be found by its name in a module that every process can import."""
    if not is_class(value) and type(value) not in (FunctionType, BuiltinFunctionType):
        return False
    module = getattr(value, "__module__", None)
    found: Any = sys.modules.get(module) if type(module) is str and module != "__main__" else None
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _attributes(kind: type) -> dict[str, Any]:
    """Return the attributes that a class statement gives the class."""
    found = {name: value for name, value in vars(kind).items() if name not in _NOT_DEFINED}
    if not issubclass(kind, enum.Enum):
        return found
    # The other attributes are derived from these, and each Python version does it differently.
    methods = {name: value for name, value in found.items() if isinstance(value, _METHODS)}
    return {name: member.value for name, member in kind.__members__.items()} | methods


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # The closure variable is not set yet.
        return []


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of ``value``, whose digests determine its own."""
    kind = type(value)
    if kind is FunctionType:
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return value.__code__, value.__defaults__, value.__kwdefaults__, cells, vars(value)
    if isinstance(value, (classmethod, staticmethod)):
        return (value.__func__,)
    if kind is property:
        return value.fget, value.fset, value.fdel
    if kind is cached_property:
        return value.func, value.attrname
    if kind is MethodType:
        return value.__self__, value.__func__
    if kind in (dict, MappingProxyType):
        return [part for item in value.items() for part in item]
    if kind in (list, tuple):
        return value  # type: ignore[no-any-return]
    torch: Any = sys.modules.get("torch")
    if torch is not None and any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), str(value.device), value.requires_grad, data
    reduce = copyreg.dispatch_table.get(kind)
    reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduced, str):
        return reduced, getattr(value, "__wrapped__", None)  # functools.lru_cache sets this attribute.
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]


def reduce_definition(kind: type, reduced: Reduced, *, by_digest: bool) -> Reduced:
    """Reduce a class to its definition. The reader creates the class only if it does not have it yet.

    Args:
        kind: The class to reduce.
        reduced: The result of cloudpickle's reducer for that class.
        by_digest: Whether the reader takes a class with the same name and definition for the same class. It must be
            False for a new process, because different classes of the same name must remain different there.
    """
    make, arguments, state, _, _, set_state = reduced
    found = (kind.__qualname__, token_of(kind), definition_digest(kind) if by_digest else "")
    return _find_or_make, (found, make, arguments), (set_state, state), None, None, _complete


_incomplete: dict[int, weakref.ref[type]] = {}
"""Classes, by id, that this process has created but not completed, because their attributes are set later."""


_made: weakref.WeakValueDictionary[tuple[str, str], type] = weakref.WeakValueDictionary()
"""Classes defined in ranks, by name and digest. A class's token differs between ranks, but here it is one class."""


def _find_or_make(identity: tuple[str, str, str], make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    kind = find(*identity) if identity[2] else known(identity[1])
    if kind is None:
        kind = make(*arguments)
        kind.__qualname__ = identity[0]
        _incomplete[id(kind)] = weakref.ref(kind)
        if identity[2] and "<locals>" not in identity[0]:  # In a function, each call creates a different class.
            _made[identity[0], identity[2]] = kind
    return kind


def _complete(kind: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    made = _incomplete.pop(id(kind), None)
    if made is not None and made() is kind:
        set_state, attributes = state
        set_state(kind, attributes)


# ---- names

Reduced = tuple[Any, ...]
"""The return value of a reducer: callable, arguments, state, None, None, and the callable that sets the state."""
_MODULE_NAMES = ("__name__", "__package__", "__file__")


def is_class(value: object) -> bool:
    """Return whether a value is a class. Unlike ``isinstance``, this does not run code of the value's class."""
    return issubclass(type(value), type)


def names_of_main() -> dict[str, Any]:
    """Return the globals of ``__main__``, the namespace of the user's cells."""
    return vars(sys.modules["__main__"])


def renew_main() -> None:
    """Replace ``__main__`` with an empty module, which will hold the names of the user's cells."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main


def owner_in_main(value: Any) -> Any:
    """Return the value in ``__main__`` under the first part of the name of a class or function.

    Returns:
        ``value`` itself, or the outermost class that contains it, or None if ``value`` is not found by its name.
    """
    if getattr(value, "__module__", None) != "__main__":
        return None
    first, *rest = value.__qualname__.split(".")
    owner = found = names_of_main().get(first)
    for name in rest:
        found = vars(found).get(name) if is_class(found) else None
    return owner if found is value else None


_INDIRECT_READS = frozenset(("globals", "eval", "exec", "__main__", "modules", "import_module", "__import__"))
"""Code that uses one of these names may read names of ``__main__`` as strings or attributes."""
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_READS_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_LOADS = _READS | _READS_ATTRIBUTE | {"LOAD_CONST"}
_NO_EFFECT = frozenset(("PUSH_NULL", "EXTENDED_ARG", "CACHE"))


def undetected_names(code: CodeType) -> set[str]:
    """Return the names of ``__main__`` that a function reads in ways that cloudpickle does not detect.

    Examples are class bodies in functions, ``globals()["name"]``, ``eval("name + 1")``, ``from __main__ import name``,
    and attributes of ``__main__`` or ``sys.modules[__name__]``.
    """
    codes = [code]
    for each in codes:
        codes += [value for value in each.co_consts if type(value) is CodeType]
    if all(each.co_flags & inspect.CO_OPTIMIZED and _INDIRECT_READS.isdisjoint(each.co_names) for each in codes):
        return set()
    uses = _Uses()
    for each in codes:
        uses.add(each)
    main = names_of_main()
    return {name for name in uses.undetected(main) if name in main and not name.startswith("__")}


class _Uses:
    """The names that code uses as globals, as attributes or in strings. ``co_names`` mixes globals and attributes."""

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
        """Add the names that one code object uses, without those of the code objects among its constants."""
        self._texts.update(_texts(code.co_consts))
        stored: set[str] = set()  # In a class body, stored names are attributes of the class.
        loaded: list[Any] = []
        """The operands of the preceding instructions, back to the last one that did more than load a value."""
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
                self._imported.update(loaded[-1] or ())  # The operand is None for "import __main__".
                self._has_main |= loaded[-1] is None
            if each.opname in _LOADS:
                loaded.append(name)
                self._has_main |= name in ("__main__", "__name__") and _looks_up_module(loaded)
            elif each.opname not in _NO_EFFECT:
                loaded.clear()

    def undetected(self, main: dict[str, Any]) -> set[str]:
        """Return the names that cloudpickle does not detect. Some may be strings that only look like names."""
        found = self._read_in_bodies | self._imported
        if self._has_main:
            found |= self._attributes | self._texts
        builtin = self._read - main.keys()  # The notebook may define its own eval.
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
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Ignore a string that is not Python source.
        return set()


class MainNames(dict[str, Any]):
    """Represents the globals of a cell's function in a pickle. The reader uses the globals of its ``__main__``.

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
"""The names that the kernel could not send to this process, each with the reason."""


def _enter_names(module_names: dict[str, Any], omitted: dict[str, str]) -> dict[str, Any]:
    names = names_of_main()
    names.update(module_names)
    _omitted.update(omitted)
    return names


def explain_omitted(error: BaseException) -> None:
    """If an error is about a missing name that the notebook has but could not send, add a note that says so."""
    text = describe_error(error)
    of_main = issubclass(type(error), (ImportError, AttributeError)) and "'__main__'" in text
    if not of_main and not issubclass(type(error), (NameError, KeyError)):
        return
    for name, reason in _omitted.items():
        if name not in names_of_main() and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            note = f"The notebook has {name!r}, but it could not be sent to this rank: {reason}"
            with suppress(Exception):  # The user's class may raise any error.
                error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]


def put_into_main(value: Any, state: Reduced) -> None:
    """Set the state of a class or function, and put it into ``__main__`` under its name."""
    set_state, inner, owner = state
    set_state(value, inner)
    if value is owner:
        names_of_main()[value.__qualname__] = value
