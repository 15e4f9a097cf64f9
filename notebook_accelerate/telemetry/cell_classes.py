"""Match classes defined in notebook cells between the kernel and its ranks.

A class of a cell belongs to ``__main__``, which no other process can import, and its instances are compared with
``isinstance`` and ``==`` on both sides. Three rules keep one class one class:

- The ``__main__`` of a rank holds the kernel's names that its function needs, so that pickle finds them there.
- Every class has a token, which is the same in all processes. A class whose token is known here is that class.
- A class of the same name and definition is the same class: the user has run its cell again, perhaps in a new kernel.

Everything else travels by value, and the reader of a value is warned when ``__main__`` has another class of that name.
"""

from __future__ import annotations

import copyreg
import enum
import hashlib
import sys
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

from notebook_accelerate.telemetry.cell_names import Reduced, is_class, names_of_main
from notebook_accelerate.telemetry.sink import current_sink

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
"""Attributes that differ between a class and its copy in another process."""
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
_METHODS = (FunctionType, property, classmethod, staticmethod)
_MAX_DIGEST_PARTS = 20_000
_MAX_DIGEST_BYTES = 4 << 20
"""Only classes with fewer parts are compared by their definition, and with smaller arrays."""


# ---- tokens

_MODULES = ("__main__", "types")  # make_dataclass names the latter
_namespace = type.__dict__["__dict__"].__get__  # vars() would ask the metaclass


def note_classes() -> None:
    """Give each class of a cell a token, before processes are forked that pickle instances of it.

    This includes classes created inside functions of cells: every class is a subclass of ``object``.
    """
    found: dict[int, type] = {id(object): object}  # by identity: a metaclass may define equality and no hash
    new = list(found.values())
    while new:
        below: dict[int, type] = {}
        for kind in new:
            children: list[type] = type.__subclasses__(kind)
            below |= {id(child): child for child in children}
        new = [each for number, each in below.items() if number not in found]
        found |= below
    for kind in found.values():
        if _namespace(kind).get("__module__") in _MODULES:
            with suppress(Exception):  # metaclasses of the user
                token_of(kind)


def token_of(kind: type) -> str:
    """Return the token of a class, by which another process finds the same class."""
    return str(cloudpickle._get_or_create_tracker_id(kind))


def known(token: str) -> type | None:
    """Return the class with this token, or None if this process has none."""
    found: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(token)
    return found


def find(name: str, token: str, digest: str, *, warn: bool = False) -> type | None:
    """Return this process's counterpart of a class in another process, or None.

    Args:
        name: Its qualified name.
        token: Its token.
        digest: What ``definition_digest`` returned there.
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
    if warn and current_sink() is None:  # not in a rank, which receives new definitions
        _warn_once(name, (token, here))
    return ours or _made.get((name, digest))


_warned: set[tuple[str, str]] = set()
"""The token of each class that users were warned about, with the digest of the class that had its name."""


def _warn_once(name: str, pair: tuple[str, str]) -> None:
    if pair in _warned:
        return
    _warned.add(pair)
    text = (
        f"the rank had another definition of {name} than this notebook has now: values from the rank keep theirs, and "
        f"are not instances of the current {name}. Launch again to get those"
    )
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("notebook_accelerate."):
        frame = frame.f_back
    place = ("notebook_accelerate", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(text, UserWarning, *place, registry={})  # shown again when the class changes again


# ---- definitions


def definition_digest(kind: type) -> str:
    """Return a digest that is equal for two executions of the same class statement, in any process.

    Two classes with equal digests compute the same. A class with an attribute that has no digest equals no other.
    """
    return _Digest().of_definition(kind)


class _NoDigestError(Exception):
    """A value is too large, or can only be compared by its identity."""


class _Digest:
    """Digests values with all their parts: code, constants, variables of closures, and the state that pickle reads."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._left = _MAX_DIGEST_PARTS
        self._open: set[int] = set()
        """Ids of the values that the current one is part of."""

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
        if isinstance(value, (set, frozenset)):  # its order differs between processes
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
        with suppress(Exception):  # annotations may be evaluated here
            annotations = dict(getattr(kind, "__annotations__", ()))
            self._add_attribute(kind, "__annotations__", annotations)
        for name, value in sorted(_attributes(kind).items(), key=lambda item: str(item[0])):
            self._add_attribute(kind, name, value)

    def _add_attribute(self, kind: type, name: str, value: Any) -> None:
        before, inside = self._hash.copy(), set(self._open)
        try:
            self._write(name)
            self._add(value)
        except Exception:  # noqa: BLE001 - classes of the user, or a value that cannot be pickled
            self._hash, self._open = before, inside
            # Libraries keep what they make of the other attributes under such names.
            if not name.startswith("__") or callable(value):
                self._hash.update(token_of(kind).encode())


def _is_imported(value: Any) -> bool:
    """Return whether a class or function is found by its name in a module that each process has."""
    if not is_class(value) and type(value) not in (FunctionType, BuiltinFunctionType):
        return False
    module = getattr(value, "__module__", None)
    found: Any = sys.modules.get(module) if type(module) is str and module != "__main__" else None
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _attributes(kind: type) -> dict[str, Any]:
    """Return the attributes that a class statement gives to a class."""
    found = {name: value for name, value in vars(kind).items() if name not in _NOT_DEFINED}
    if not issubclass(kind, enum.Enum):
        return found
    # The rest of its attributes are made from these, in another way by each Python.
    methods = {name: value for name, value in found.items() if isinstance(value, _METHODS)}
    return {name: member.value for name, member in kind.__members__.items()} | methods


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # its variable is not set yet
        return []


def _parts(value: Any) -> Iterable[Any]:
    """Return what a value is made of."""
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
        return reduced, getattr(value, "__wrapped__", None)  # of functools.lru_cache
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]


def reduce_definition(kind: type, reduced: Reduced, *, by_digest: bool) -> Reduced:
    """Reduce a class to its definition. The reader builds the class only if it does not have it yet.

    Args:
        kind: The class.
        reduced: What cloudpickle reduces it to.
        by_digest: Whether a class of the same name and definition is the class. This is wrong for a new process,
            where different classes of one name must stay different.
    """
    make, arguments, state, _, _, set_state = reduced
    found = (kind.__qualname__, token_of(kind), definition_digest(kind) if by_digest else "")
    return _find_or_make, (found, make, arguments), (set_state, state), None, None, _complete


_incomplete: dict[int, weakref.ref[type]] = {}
"""Classes that were made and have no attributes yet, by id; those that were found have all of them."""


_made: weakref.WeakValueDictionary[tuple[str, str], type] = weakref.WeakValueDictionary()
"""Classes that only ranks have, by name and digest: each rank's has another token, and they are the same class here."""


def _find_or_make(identity: tuple[str, str, str], make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    kind = find(*identity) if identity[2] else known(identity[1])
    if kind is None:
        kind = make(*arguments)
        kind.__qualname__ = identity[0]
        _incomplete[id(kind)] = weakref.ref(kind)
        if identity[2] and "<locals>" not in identity[0]:  # each call of a function makes another class
            _made[identity[0], identity[2]] = kind
    return kind


def _complete(kind: type, state: tuple[Callable[[type, Any], Any], Any]) -> None:
    made = _incomplete.pop(id(kind), None)
    if made is not None and made() is kind:
        set_state, attributes = state
        set_state(kind, attributes)
